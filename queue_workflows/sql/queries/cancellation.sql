-- Cancel jobs, request the end of running ones, and cancel the nodes of runs that are over.

-- name: lock_job none
-- tables: ingest_jobs workflow_node_jobs
-- Lock a job until the transaction ends, so that it neither starts nor is handed back meanwhile.
SELECT FROM ingest_jobs WHERE id = %(job)s FOR UPDATE;

-- name: cancel_waiting one
-- tables: ingest_jobs workflow_node_jobs
-- Cancel a job that is queued, or a node that waits for an answer; a trigger records the event of an ingest job. No row: it
-- does not wait.
WITH done AS (  -- nodes only
    UPDATE ingest_jobs j
       SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
     WHERE j.id = %(job)s AND j.status IN ('queued', 'awaiting_input')
 RETURNING j.*  -- ingest only
 RETURNING queue_workflows_record(j, 'cancelled', {host_before(j)}) AS job)  -- nodes only
SELECT (job).* FROM done  -- nodes only
;

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
 RETURNING queue_workflows_record(j, 'cancelled', {node:host_before(j)}) AS job)
SELECT (job).* FROM done;

-- name: orphans many
-- Lock and return up to 500 nodes that wait although their run is over, of `ids` (NULL: of all) and none of `aside`: they
-- were inserted while the run ended. OFFSET 0 keeps the look-up of the run one per job: without it, the plan may compare
-- each job with every run.
SELECT q.id FROM workflow_node_jobs q
 WHERE q.status IN ('queued', 'awaiting_input')
   AND EXISTS (SELECT FROM workflow_runs r
                WHERE r.id = q.run_id AND r.mode = 'node'
                  AND queue_workflows_is_terminal_run(r.status) OFFSET 0)
   AND {chosen(q)}
 LIMIT 500 FOR UPDATE OF q SKIP LOCKED;

-- name: cancel_nodes many
-- Cancel nodes that wait, which the caller has locked.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
     WHERE j.id = ANY (%(ids)s::text[])
 RETURNING queue_workflows_record(j, 'cancelled', {node:host_before(j)}) AS job)
SELECT (job).* FROM done;
