-- Complete, fail, park and requeue jobs for a person, whichever worker has the claim.

-- name: complete one
-- tables: ingest_jobs workflow_node_jobs
-- Complete a job that is not over, whichever worker has it. A trigger records the event of an ingest job that did not run.
-- `rss`: the peak memory of a node. No row: it is over, or there is no such job.
WITH done AS (
    UPDATE ingest_jobs j
       SET {to_completed(j, %(result)s::jsonb, %(seconds)s::float8, %(rss)s::integer, NULL)}, blocked_reason = NULL
     WHERE j.id = %(job)s AND NOT queue_workflows_is_terminal_job(j.status)
 {recorded_if_run(j, 'completed')};

-- name: fail one
-- tables: ingest_jobs workflow_node_jobs
-- Fail a job as `complete` completes it.
WITH done AS (
    UPDATE ingest_jobs j
       SET status = 'failed', error = %(error)s, seconds = %(seconds)s::float8,
           finished_at = now(), blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL
     WHERE j.id = %(job)s AND NOT queue_workflows_is_terminal_job(j.status)
 {recorded_if_run(j, 'failed')};

-- name: park_node one
-- Let a node that is not over wait for an answer, whichever worker has it. No row: it is over, waits
-- already, or there is no such job.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'awaiting_input', blocked_reason = NULL, worker_id = NULL,
           lease_expires_at = NULL
     WHERE j.id = %(job)s
       AND j.status <> 'awaiting_input' AND NOT queue_workflows_is_terminal_job(j.status)
 {node:recorded(j, 'parked', detail => '{"by": "operator"}')};

-- name: requeue many
-- tables: ingest_jobs workflow_node_jobs
-- Queue running jobs again at the front: one, those of a host in one queue, or (all NULL) every one. `counted`: as ended by
-- the watchdog, else nothing is counted. A job that must end is cancelled instead. No row: none runs.
WITH done AS (
    UPDATE ingest_jobs j
       SET (status, finished_at, started_at) = (
               SELECT CASE WHEN must_end THEN 'cancelled' ELSE 'queued' END,
                      CASE WHEN must_end THEN now() END,
                      CASE WHEN must_end THEN j.started_at END
                 FROM queue_workflows_must_end(j) AS must_end),
           worker_id = NULL, lease_expires_at = NULL, priority = least(j.priority, 10),
           watchdog_retries = j.watchdog_retries + %(counted)s::boolean::integer
     WHERE j.status = 'running' AND (%(job)s::text IS NULL OR j.id = %(job)s::text)
       AND (%(host)s::text IS NULL OR j.claimed_by = %(host)s::text AND j.queue = %(queue)s::text)
 {recorded(j, {unless_queued('requeued')}, detail => '{"by": "operator"}')};
