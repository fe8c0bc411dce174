-- Cancel jobs, request the end of running ones, and cancel the nodes of runs that are over.

-- name: cancel many
-- tables: ingest_jobs workflow_node_jobs
-- Cancel the jobs with these ids that wait, also for an answer, and ask the running ones to end, which their workers see;
-- an earlier request stays. A trigger records the events of ingest jobs. Return the rows. Returns no row if it is over.
WITH done AS (
    UPDATE ingest_jobs j
       SET (status, finished_at, blocked_reason, cancel_requested_at) = (
               SELECT CASE WHEN runs THEN j.status ELSE 'cancelled' END,
                      CASE WHEN runs THEN j.finished_at ELSE now() END, CASE WHEN runs THEN j.blocked_reason END,
                      CASE WHEN runs THEN coalesce(j.cancel_requested_at, now()) ELSE j.cancel_requested_at END
                 FROM (SELECT j.status = 'running' AS runs) AS state)
     WHERE j.id = ANY (%(ids)s::text[]) AND NOT queue_workflows_is_terminal_job(j.status)
 RETURNING
 CASE j.status WHEN 'cancelled' THEN queue_workflows_record(j, 'cancelled', {host_before(j)}) ELSE  -- nodes only
 j
 END  -- nodes only
 AS job)
SELECT (job).* FROM done;

-- name: cancel_queued_nodes many
-- Cancel the queued nodes of a run.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
     WHERE j.status = 'queued' AND j.run_id = %(run_id)s
 RETURNING queue_workflows_record(j, 'cancelled', {node:host_before(j)}) AS job)
SELECT (job).* FROM done;

-- name: orphans many
-- Lock and return up to 500 nodes that wait although their run is over, of `ids` (all if NULL) and not in `aside`. They
-- were inserted while the run ended. OFFSET 0 forces one look-up of the run per job; without it, the plan may compare
-- each job with every run.
SELECT q.id FROM workflow_node_jobs q
 WHERE q.status IN ('queued', 'awaiting_input')
   AND EXISTS (SELECT FROM workflow_runs r
                WHERE r.id = q.run_id AND r.mode = 'node'
                  AND queue_workflows_is_terminal_run(r.status) OFFSET 0)
   AND {chosen(q)}
 LIMIT 500 FOR UPDATE OF q SKIP LOCKED;
