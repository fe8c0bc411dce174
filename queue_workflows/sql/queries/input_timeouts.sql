-- Find input nodes whose wait is over, and end or extend the wait.

-- name: next_overdue value prepared
-- Return the job of the oldest wait that is over and not locked, without those of
-- `set_aside`.
SELECT job_id FROM workflow_input_timeouts
 WHERE due_at <= now() AND job_id <> ALL (%(set_aside)s::text[])
 ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED;

-- name: lock_wait one prepared
-- Lock the wait of a job. Returns no row if it is not over, or another transaction holds it.
SELECT FROM workflow_input_timeouts WHERE job_id = %(job)s AND due_at <= now()
   FOR UPDATE SKIP LOCKED;

-- name: lock_job_if_free one prepared
-- Lock the row of a job. Returns no row if another transaction has it locked, or the job does not exist.
SELECT FROM workflow_node_jobs WHERE id = %(job)s FOR UPDATE SKIP LOCKED;

-- name: overdue one
-- Return the job of a wait, with NULL in each column if the job is gone. `answered`: an answer is
-- stored and not taken yet, or another transaction has the row of the job locked (`free` is false)
-- and may be submitting one. `over`: the job does not wait, waits for a run, or this is a later
-- wait.
SELECT j.*,
       NOT %(free)s::boolean
       OR EXISTS (SELECT FROM workflow_input_submissions s
                   WHERE s.run_id = j.run_id AND s.node_id = j.node_id
                     AND s.status IN ('pending', 'processing')) AS answered,
       j.status IS DISTINCT FROM 'awaiting_input' OR j.child_run_id IS NOT NULL
       OR j.claim_no <> due.claim_no AS over
  FROM workflow_input_timeouts due
  LEFT JOIN workflow_node_jobs j ON j.id = due.job_id
 WHERE due.job_id = %(job)s;

-- name: end_wait none
-- Forget the wait of a job.
DELETE FROM workflow_input_timeouts WHERE job_id = %(job)s;

-- name: extend_wait none
-- Let the wait of a job end `more_s` seconds from now.
UPDATE workflow_input_timeouts SET due_at = now() + %(more_s)s * interval '1 second'
 WHERE job_id = %(job)s;

-- name: fail_node one
-- Fail a node that waited too long for its answer. Returns no row if it does not wait.
WITH done AS (
    UPDATE workflow_node_jobs j SET status = 'failed', error = %(error)s, finished_at = now()
     WHERE j.id = %(job)s AND (j.status = 'awaiting_input') IS TRUE
 {node:recorded(j, 'failed', detail => '{"by": "timeout"}')};
