-- Insert, read, find, cancel and delete ingest jobs.

-- name: insert value prepared
-- Queue one ingest job that has no options, for an app; return its id.
INSERT INTO ingest_jobs (task_name, queue, reason, priority, args)
VALUES (%(task_name)s, %(queue)s, %(reason)s, %(priority)s, %(args)s::jsonb)
RETURNING id;

-- name: insert_many none prepared
-- Queue a job of one task for each member of the JSON array `args`. The id of a job is the
-- prefix and its place in the array, from 1, in twelve hexadecimal digits.
INSERT INTO ingest_jobs (id, task_name, queue, reason, priority, args)
SELECT %(prefix)s || lpad(to_hex(a.place), 12, '0'), %(task_name)s, %(queue)s, %(reason)s,
       %(priority)s::smallint, a.args
  FROM jsonb_array_elements(%(args)s::jsonb) WITH ORDINALITY AS a (args, place);

-- name: insert_batch many prepared
-- Queue the jobs of a JSON array, each an object with a member per column; ids as in
-- insert_many. Returns a row for each job whose idempotency key another job has: its place,
-- that job's id, and whether that job has the same task, queue and args. If one has not,
-- nothing is written.
SELECT place, id, same FROM queue_workflows_enqueue(%(prefix)s::text, %(jobs)s::jsonb);

-- name: insert_once one prepared
-- Queue the one job of the JSON array `jobs`, as insert_batch does, and append its event `queued`, by
-- `actor`. Returns no row if the job is queued, under the first id of `prefix`. If another job has its
-- idempotency key, even past its window, returns that job, and whether it has the same task, queue and args.
WITH key_owner AS MATERIALIZED (
    SELECT j.id, j.status::text AS status,
           queue_workflows_is_lost(j.status, j.lease_expires_at) AS lost,
           j.task_name = %(jobs)s::jsonb #>> '{0,task_name}'
           AND j.queue = %(jobs)s::jsonb #>> '{0,queue}'
           AND j.args = coalesce(%(jobs)s::jsonb #> '{0,args}', '{}') AS same
      FROM ingest_jobs j
     WHERE j.idempotency_key = %(jobs)s::jsonb #>> '{0,idempotency_key}'
       AND NOT j.idempotency_released),
put AS MATERIALIZED (
    SELECT p.id, p.same FROM queue_workflows_enqueue(%(prefix)s::text, %(jobs)s::jsonb) p
     WHERE NOT EXISTS (SELECT FROM key_owner)),
noted AS (
    INSERT INTO ingest_job_events (job_id, attempt, event_type, queue, actor)
    SELECT %(prefix)s::text || '000000000001', 0, 'queued', %(jobs)s::jsonb #>> '{0,queue}',
           left(%(actor)s::text, 200)
     WHERE NOT EXISTS (SELECT FROM key_owner) AND NOT EXISTS (SELECT FROM put))
SELECT id, status, lost, same FROM key_owner
UNION ALL
SELECT id, 'queued', false, same FROM put;

-- name: state one prepared
-- Return how far a job is, and whether its claim is lost.
SELECT id, status::text, task_name, queue::text, attempts, max_attempts, claim_no, generation,
       created_at, queue_workflows_due_at(available_at, resume_at, resume_until) AS available_at,
       started_at, finished_at, heartbeat_at, cancel_requested_at, error,
       progress, queue_workflows_is_lost(status, lease_expires_at) AS lost
  FROM ingest_jobs WHERE id = %(job)s;

-- name: get one
-- Return one ingest job with every column. Returns no row if the job does not exist.
SELECT * FROM ingest_jobs WHERE id = %(job)s;

-- name: count_by_status many
-- Count all ingest jobs, by queue and status.
SELECT queue::text, status::text, count(*) AS n FROM ingest_jobs GROUP BY queue, status;

-- name: find many
-- List jobs for an operator, the newest first. A filter that is NULL matches every job. `before`: only jobs with a smaller
-- `seq`, for the next page. `text`: part of the id, the task, a key or the error. `lost`: only running jobs whose claim is
-- lost, or only the other running jobs. Reads the table once, since no index serves every filter.
SELECT j.id, j.seq, j.task_name, j.queue::text, j.status::text, j.reason, j.priority, j.attempts,
       j.max_attempts, j.crash_count, j.lapse_count, j.watchdog_retries, j.claim_no, j.generation, j.claimed_by,
       j.worker_id, j.blocked_reason,
       queue_workflows_due_at(j.available_at, j.resume_at, j.resume_until) AS available_at,
       j.cancel_requested_at, j.lock_key,
       j.partition_key, j.idempotency_key, j.progress, j.error, j.seconds, j.created_at,
       j.started_at, j.finished_at,
       queue_workflows_is_lost(j.status, j.lease_expires_at) AS lost
  FROM ingest_jobs j
 WHERE (%(queue)s::text IS NULL OR j.queue = %(queue)s)
   AND (%(task_name)s::text IS NULL OR j.task_name = %(task_name)s)
   AND (%(statuses)s::text[] IS NULL OR j.status = ANY (%(statuses)s::text[]))
   AND (%(lost)s::boolean IS NULL OR j.status <> 'running'
        OR queue_workflows_is_lost(j.status, j.lease_expires_at) = %(lost)s)
   AND (%(at)s::timestamptz IS NULL
        OR greatest(j.created_at, j.started_at, j.finished_at) >= %(at)s)
   AND (%(ago)s::interval IS NULL
        OR greatest(j.created_at, j.started_at, j.finished_at) >= now() - %(ago)s::interval)
   AND (%(key)s::text IS NULL OR %(key)s IN (j.idempotency_key, j.lock_key, j.partition_key))
   AND (%(before)s::bigint IS NULL OR j.seq < %(before)s)
   AND (%(text)s::text IS NULL
        OR strpos(lower(concat_ws(' ', j.id, j.task_name, j.idempotency_key, j.lock_key,
                                  j.partition_key, j.error)), lower(%(text)s)) > 0)
 ORDER BY j.seq DESC LIMIT %(limit)s;

-- name: lock many
-- Lock these jobs, in one order, so that no two callers wait for each other. Jobs that do not
-- exist are left out.
SELECT id, status::text, generation, cancel_requested_at FROM ingest_jobs
 WHERE id = ANY (%(ids)s::text[]) ORDER BY id FOR UPDATE;

-- name: delete none
-- Delete the jobs with these ids that do not run.
DELETE FROM ingest_jobs WHERE id = ANY (%(ids)s::text[]) AND status <> 'running';

-- name: find_node_jobs many
-- Return which of these ids are node jobs, each with its run.
SELECT id, run_id, status::text FROM workflow_node_jobs
 WHERE id = ANY (%(ids)s::text[]) ORDER BY run_id, id;
