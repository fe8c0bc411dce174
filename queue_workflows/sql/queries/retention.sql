-- Find and delete finished jobs and runs, outbox rows, events and heartbeats past their retention.

-- name: pages value
-- Return how many pages a table has now.
SELECT pg_relation_size(%(table)s::regclass) / current_setting('block_size')::bigint AS n;

-- name: mark none
-- Mark the transaction as one that deletes by age: then no event is written for each deleted
-- row.
SELECT set_config('queue_workflows.retention', 'on', true);

-- name: set_timeout none
-- Set the statement timeout of the transaction.
SELECT set_config('statement_timeout', %(timeout)s, true);

-- name: delete_jobs many
-- Delete the ingest jobs past their retention that lie in the pages from `first` to before
-- `end`. The `retention_days` of a queue stands before `days`; 0 keeps rows forever. The table is
-- walked as it lies: an index by time of ending would cost every job. Rows that are locked
-- stay.
WITH old AS MATERIALIZED (
    SELECT j.ctid AS at
      FROM ingest_jobs j
      LEFT JOIN queue_settings q ON q.queue = j.queue
     WHERE queue_workflows_is_past_retention(j.status, coalesce(j.finished_at, j.created_at),
               coalesce(q.retention_days, %(days)s::float8))
       AND j.ctid >= %(first)s::tid AND j.ctid < %(end)s::tid
       FOR UPDATE OF j SKIP LOCKED)
DELETE FROM ingest_jobs j USING old WHERE j.ctid = old.at RETURNING j.id;

-- name: find_jobs many
-- Return the ids of the jobs that delete_jobs would delete, without those set aside.
SELECT j.id
  FROM ingest_jobs j
  LEFT JOIN queue_settings q ON q.queue = j.queue
 WHERE queue_workflows_is_past_retention(j.status, coalesce(j.finished_at, j.created_at),
           coalesce(q.retention_days, %(days)s::float8))
   AND j.ctid >= %(first)s::tid AND j.ctid < %(end)s::tid
   AND j.id <> ALL (%(aside)s::text[]);

-- name: delete_jobs_by_id many
-- Delete those of these ingest jobs that are past their retention.
WITH old AS MATERIALIZED (
    SELECT j.ctid AS at
      FROM ingest_jobs j
      LEFT JOIN queue_settings q ON q.queue = j.queue
     WHERE queue_workflows_is_past_retention(j.status, coalesce(j.finished_at, j.created_at),
               coalesce(q.retention_days, %(days)s::float8))
       AND j.id = ANY (%(ids)s::text[])
       FOR UPDATE OF j SKIP LOCKED)
DELETE FROM ingest_jobs j USING old WHERE j.ctid = old.at RETURNING j.id;

-- name: count_jobs value
-- Count the ingest jobs that are past their retention.
SELECT count(*) AS n
  FROM ingest_jobs j
  LEFT JOIN queue_settings q ON q.queue = j.queue
 WHERE queue_workflows_is_past_retention(j.status, coalesce(j.finished_at, j.created_at),
           coalesce(q.retention_days, %(days)s::float8));

-- name: delete_runs many
-- Delete up to `limit` runs past their retention that lie in the pages from `first` to before
-- `end`; their nodes, answers and outbox rows go with them. A run stays while it has an open
-- outbox row or a node that has not ended.
WITH old AS MATERIALIZED (
    SELECT r.ctid AS at
      FROM workflow_runs r
     CROSS JOIN queue_workflows_prunable_run(
               r.id, r.status, coalesce(r.finished_at, r.updated_at), %(days)s::float8)
     WHERE r.ctid >= %(first)s::tid AND r.ctid < %(end)s::tid
     LIMIT %(limit)s FOR UPDATE OF r SKIP LOCKED)
DELETE FROM workflow_runs r USING old WHERE r.ctid = old.at RETURNING r.id;

-- name: find_runs many
-- Return the ids of the runs that delete_runs would delete, without those set aside.
SELECT r.id
  FROM workflow_runs r
 CROSS JOIN queue_workflows_prunable_run(
           r.id, r.status, coalesce(r.finished_at, r.updated_at), %(days)s::float8)
 WHERE r.ctid >= %(first)s::tid AND r.ctid < %(end)s::tid
   AND r.id <> ALL (%(aside)s::text[])
 LIMIT %(limit)s;

-- name: delete_runs_by_id many
-- Delete those of these runs that are past their retention, as delete_runs does.
WITH old AS MATERIALIZED (
    SELECT r.ctid AS at
      FROM workflow_runs r
     CROSS JOIN queue_workflows_prunable_run(
               r.id, r.status, coalesce(r.finished_at, r.updated_at), %(days)s::float8)
     WHERE r.id = ANY (%(ids)s::text[])
       FOR UPDATE OF r SKIP LOCKED)
DELETE FROM workflow_runs r USING old WHERE r.ctid = old.at RETURNING r.id;

-- name: count_runs value
-- Count the runs that are past their retention and that delete_runs would not keep.
SELECT count(*) AS n
  FROM workflow_runs r
 CROSS JOIN queue_workflows_prunable_run(
           r.id, r.status, coalesce(r.finished_at, r.updated_at), %(days)s::float8);

-- name: delete_outbox count
-- Delete up to `limit` outbox rows that were processed over `days` days ago.
DELETE FROM workflow_dispatch_events WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM workflow_dispatch_events
     WHERE processed_at < now() - %(days)s * interval '1 day'
     ORDER BY id LIMIT %(limit)s FOR UPDATE SKIP LOCKED));

-- name: delete_ingest_events count
-- Delete up to `limit` events of ingest jobs that are over `days` days old.
DELETE FROM ingest_job_events WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM ingest_job_events
     WHERE created_at < now() - %(days)s * interval '1 day'
     ORDER BY id LIMIT %(limit)s));

-- name: delete_heartbeats count
-- Delete the heartbeats that are over `days` days old.
DELETE FROM worker_heartbeats WHERE last_seen < now() - %(days)s * interval '1 day';
