-- Cancel jobs, request the end of running ones, and cancel the nodes of runs that are over.

-- name: lock_job none
-- tables: ingest_jobs workflow_node_jobs
-- Lock a job until the transaction ends, so that it neither starts nor is handed back meanwhile.
SELECT FROM ingest_jobs WHERE id = %(job)s FOR UPDATE;

-- name: cancel_waiting_node one
-- Cancel a node that is queued or waits for an answer. No row: it is neither.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
     WHERE j.id = %(job)s AND j.status IN ('queued', 'awaiting_input')
 RETURNING queue_workflows_record(
               j, 'cancelled',
               host => (SELECT o.claimed_by FROM workflow_node_jobs o WHERE o.id = j.id)) AS job)
SELECT (job).* FROM done;

-- name: cancel_waiting_ingest_job one
-- Cancel a queued ingest job; a trigger records the event. No row: it is not queued.
UPDATE ingest_jobs SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
 WHERE id = %(job)s AND status = 'queued'
RETURNING *;

-- name: request_end one
-- tables: ingest_jobs workflow_node_jobs
-- Ask a running job to end, which its worker sees; an earlier request stays. No row: it does not
-- run.
UPDATE ingest_jobs SET cancel_requested_at = coalesce(cancel_requested_at, now())
 WHERE id = %(job)s AND status = 'running'
RETURNING *;

-- name: cancel_queued_nodes many
-- Cancel the queued nodes of a run.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
     WHERE j.status = 'queued' AND j.run_id = %(run_id)s
 RETURNING queue_workflows_record(
               j, 'cancelled',
               host => (SELECT o.claimed_by FROM workflow_node_jobs o WHERE o.id = j.id)) AS job)
SELECT (job).* FROM done;

-- name: cancel_orphans many
-- Cancel up to 500 nodes that wait although their run is over: they were inserted while the run
-- ended. OFFSET 0 keeps the look-up of the run one per job: without it, the plan may compare each
-- job with every run.
WITH chosen AS MATERIALIZED (
    SELECT q.id FROM workflow_node_jobs q
     WHERE q.status IN ('queued', 'awaiting_input')
       AND EXISTS (SELECT FROM workflow_runs r
                    WHERE r.id = q.run_id AND r.mode = 'node'
                      AND queue_workflows_is_terminal_run(r.status) OFFSET 0)
     LIMIT 500 FOR UPDATE OF q SKIP LOCKED),
done AS (
    UPDATE workflow_node_jobs j
       SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
     WHERE j.id = ANY (ARRAY(SELECT id FROM chosen))
 RETURNING queue_workflows_record(
               j, 'cancelled',
               host => (SELECT o.claimed_by FROM workflow_node_jobs o WHERE o.id = j.id)) AS job)
SELECT (job).* FROM done;

-- name: orphans many
-- Return the ids of up to 500 nodes that `cancel_orphans` would cancel, without those of `aside`.
SELECT q.id FROM workflow_node_jobs q
 WHERE q.status IN ('queued', 'awaiting_input')
   AND EXISTS (SELECT FROM workflow_runs r
                WHERE r.id = q.run_id AND r.mode = 'node'
                  AND queue_workflows_is_terminal_run(r.status) OFFSET 0)
   AND q.id <> ALL (%(aside)s::text[])
 LIMIT 500;

-- name: cancel_these_orphans many
-- Cancel those of these nodes that `cancel_orphans` would cancel.
WITH chosen AS MATERIALIZED (
    SELECT q.id FROM workflow_node_jobs q
     WHERE q.id = ANY (%(ids)s::text[]) AND q.status IN ('queued', 'awaiting_input')
       AND EXISTS (SELECT FROM workflow_runs r
                    WHERE r.id = q.run_id AND r.mode = 'node'
                      AND queue_workflows_is_terminal_run(r.status) OFFSET 0)
       FOR UPDATE OF q SKIP LOCKED),
done AS (
    UPDATE workflow_node_jobs j
       SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
     WHERE j.id = ANY (ARRAY(SELECT id FROM chosen))
 RETURNING queue_workflows_record(
               j, 'cancelled',
               host => (SELECT o.claimed_by FROM workflow_node_jobs o WHERE o.id = j.id)) AS job)
SELECT (job).* FROM done;
