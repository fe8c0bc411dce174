-- Complete, fail, park and requeue jobs for a person, whichever worker has the claim.

-- name: lock_ingest_job none
-- Lock an ingest job until the transaction ends, so that its state is known to the next statement.
SELECT FROM ingest_jobs WHERE id = %(job)s FOR UPDATE;

-- name: complete_node one
-- Complete a node that is not over, whichever worker has it. No row: it is over, or there is no such job.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'completed', context_delta = %(result)s::jsonb, error = NULL,
           seconds = %(seconds)s::float8, vm_rss_mb_peak = %(rss)s::integer, finished_at = now(),
           blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL,
           progress = CASE WHEN jsonb_typeof(j.progress) IN ('object', 'string') THEN j.progress
                           ELSE '1' END
     WHERE j.id = %(job)s AND NOT queue_workflows_is_terminal_job(j.status)
 RETURNING queue_workflows_record(
               j, 'completed',
               host => (SELECT o.claimed_by FROM workflow_node_jobs o WHERE o.id = j.id),
               seconds => %(seconds)s::float8, detail => '{"by": "operator"}') AS job)
SELECT (job).* FROM done;

-- name: complete_ingest_job one
-- Complete an ingest job that is not over, whichever worker has it. A trigger records the event of a job
-- that did not run. No row: it is over, or there is no such job.
WITH done AS (
    UPDATE ingest_jobs j
       SET status = 'completed', result = %(result)s::jsonb, error = NULL,
           seconds = %(seconds)s::float8, finished_at = now(), blocked_reason = NULL,
           worker_id = NULL, lease_expires_at = NULL,
           progress = CASE WHEN jsonb_typeof(j.progress) IN ('object', 'string') THEN j.progress
                           ELSE '1' END
     WHERE j.id = %(job)s AND NOT queue_workflows_is_terminal_job(j.status)
 RETURNING CASE (SELECT o.status FROM ingest_jobs o WHERE o.id = j.id)
           WHEN 'running' THEN queue_workflows_record(
               j, 'completed', host => (SELECT o.claimed_by FROM ingest_jobs o WHERE o.id = j.id),
               seconds => %(seconds)s::float8, detail => '{"by": "operator"}')
           ELSE j END AS job)
SELECT (job).* FROM done;

-- name: fail_node one
-- Fail a node that is not over, whichever worker has it. No row: it is over, or there is no such job.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'failed', error = %(error)s, seconds = %(seconds)s::float8,
           finished_at = now(), blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL
     WHERE j.id = %(job)s AND NOT queue_workflows_is_terminal_job(j.status)
 RETURNING queue_workflows_record(
               j, 'failed',
               host => (SELECT o.claimed_by FROM workflow_node_jobs o WHERE o.id = j.id),
               seconds => %(seconds)s::float8, detail => '{"by": "operator"}') AS job)
SELECT (job).* FROM done;

-- name: fail_ingest_job one
-- Fail an ingest job that is not over, whichever worker has it. A trigger records the event of a job that
-- did not run. No row: it is over, or there is no such job.
WITH done AS (
    UPDATE ingest_jobs j
       SET status = 'failed', error = %(error)s, seconds = %(seconds)s::float8,
           finished_at = now(), blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL
     WHERE j.id = %(job)s AND NOT queue_workflows_is_terminal_job(j.status)
 RETURNING CASE (SELECT o.status FROM ingest_jobs o WHERE o.id = j.id)
           WHEN 'running' THEN queue_workflows_record(
               j, 'failed', host => (SELECT o.claimed_by FROM ingest_jobs o WHERE o.id = j.id),
               seconds => %(seconds)s::float8, detail => '{"by": "operator"}')
           ELSE j END AS job)
SELECT (job).* FROM done;

-- name: park_node one
-- Let a node that is not over wait for an answer, whichever worker has it. No row: it is over, waits
-- already, or there is no such job.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'awaiting_input', blocked_reason = NULL, worker_id = NULL,
           lease_expires_at = NULL
     WHERE j.id = %(job)s
       AND j.status <> 'awaiting_input' AND NOT queue_workflows_is_terminal_job(j.status)
 RETURNING queue_workflows_record(
               j, 'parked',
               host => (SELECT o.claimed_by FROM workflow_node_jobs o WHERE o.id = j.id),
               detail => '{"by": "operator"}') AS job)
SELECT (job).* FROM done;

-- name: requeue_node one
-- Queue a running node again at the front, and count it as ended by the watchdog. It is cancelled
-- instead if it must end. No row: it does not run.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET (status, finished_at, started_at) = (
               SELECT CASE WHEN must_end THEN 'cancelled' ELSE 'queued' END,
                      CASE WHEN must_end THEN now() END,
                      CASE WHEN must_end THEN j.started_at END
                 FROM queue_workflows_must_end(j) AS must_end),
           worker_id = NULL, lease_expires_at = NULL, priority = least(j.priority, 10),
           watchdog_retries = j.watchdog_retries + 1
     WHERE j.id = %(job)s AND j.status = 'running'
 RETURNING queue_workflows_record(
               j, CASE j.status WHEN 'queued' THEN 'requeued' ELSE j.status END,
               host => (SELECT o.claimed_by FROM workflow_node_jobs o WHERE o.id = j.id),
               detail => '{"by": "operator"}') AS job)
SELECT (job).* FROM done;

-- name: requeue_all_nodes many
-- Queue every running node again at the front, counting nothing. A node that must end is cancelled
-- instead.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET (status, finished_at, started_at) = (
               SELECT CASE WHEN must_end THEN 'cancelled' ELSE 'queued' END,
                      CASE WHEN must_end THEN now() END,
                      CASE WHEN must_end THEN j.started_at END
                 FROM queue_workflows_must_end(j) AS must_end),
           worker_id = NULL, lease_expires_at = NULL, priority = least(j.priority, 10)
     WHERE j.status = 'running'
 RETURNING queue_workflows_record(
               j, CASE j.status WHEN 'queued' THEN 'requeued' ELSE j.status END,
               host => (SELECT o.claimed_by FROM workflow_node_jobs o WHERE o.id = j.id),
               detail => '{"by": "operator"}') AS job)
SELECT (job).* FROM done;

-- name: requeue_of_host many
-- tables: ingest_jobs workflow_node_jobs
-- Queue the running jobs of a host in one queue again at the front, counting nothing. A job that
-- must end is cancelled instead.
WITH done AS (
    UPDATE ingest_jobs j
       SET (status, finished_at, started_at) = (
               SELECT CASE WHEN must_end THEN 'cancelled' ELSE 'queued' END,
                      CASE WHEN must_end THEN now() END,
                      CASE WHEN must_end THEN j.started_at END
                 FROM queue_workflows_must_end(j) AS must_end),
           worker_id = NULL, lease_expires_at = NULL, priority = least(j.priority, 10)
     WHERE j.status = 'running' AND j.claimed_by = %(host)s AND j.queue = %(queue)s
 RETURNING queue_workflows_record(
               j, CASE j.status WHEN 'queued' THEN 'requeued' ELSE j.status END,
               host => (SELECT o.claimed_by FROM ingest_jobs o WHERE o.id = j.id),
               detail => '{"by": "operator"}') AS job)
SELECT (job).* FROM done;
