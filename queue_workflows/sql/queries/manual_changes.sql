-- Complete, fail and park jobs for a person, whichever worker has the claim.

-- name: complete one
-- tables: ingest_jobs workflow_node_jobs
-- Complete a job that is not over, whichever worker has it. A trigger records the event of an ingest job that did not run: it
-- is locked first, so that it is not handed back meanwhile. `rss`: the peak memory of a node. Returns no row if it is over,
-- or the job does not exist.
WITH {was()},
done AS (
    UPDATE ingest_jobs j
       SET {to_completed(j, %(result)s::jsonb, %(seconds)s::float8, %(rss)s::integer, NULL)}, blocked_reason = NULL
      FROM was
     WHERE j.id = was.id AND NOT queue_workflows_is_terminal_job(j.status)
 {recorded_if_run(j, 'completed')};

-- name: fail one
-- tables: ingest_jobs workflow_node_jobs
-- Fail a job as `complete` completes it.
WITH {was()},
done AS (
    UPDATE ingest_jobs j
       SET status = 'failed', error = %(error)s, seconds = %(seconds)s::float8,
           finished_at = now(), blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL
      FROM was
     WHERE j.id = was.id AND NOT queue_workflows_is_terminal_job(j.status)
 {recorded_if_run(j, 'failed')};

-- name: park_node one
-- Let a node that is not over wait for an answer, whichever worker has it. Returns no row if it is
-- over, waits already, or the job does not exist.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'awaiting_input', blocked_reason = NULL, worker_id = NULL,
           lease_expires_at = NULL
     WHERE j.id = %(job)s
       AND j.status <> 'awaiting_input' AND NOT queue_workflows_is_terminal_job(j.status)
 {node:recorded(j, 'parked', detail => '{"by": "operator"}')};
