-- Find and delete finished jobs and runs, outbox rows, events and heartbeats past their retention.

-- name: pages value
-- Return how many pages a table has now.
SELECT pg_relation_size(%(table)s::regclass) / current_setting('block_size')::bigint AS n;

-- name: old_jobs many
-- Lock and return the ingest jobs past their retention that lie in the pages from `first` to before `end`, of `ids` (all
-- if NULL) and not in `aside`. The `retention_days` of a queue precede `days`; 0 keeps rows forever. The table is read in
-- its physical order, since an index by time of ending would make every job slower. Locked rows stay.
SELECT j.id
  FROM ingest_jobs j
  LEFT JOIN queue_settings q ON q.queue = j.queue
 WHERE queue_workflows_is_past_retention(j.status, coalesce(j.finished_at, j.created_at),
           coalesce(q.retention_days, %(days)s::float8))
   AND j.ctid >= %(first)s::tid AND j.ctid < %(end)s::tid AND {chosen(j)}
   FOR UPDATE OF j SKIP LOCKED;

-- name: delete_jobs many
-- Delete ingest jobs, which the caller has locked; return their ids.
DELETE FROM ingest_jobs WHERE id = ANY (%(ids)s::text[]) RETURNING id;

-- name: count_jobs value
-- Count the ingest jobs that are past their retention.
SELECT count(*) AS n
  FROM ingest_jobs j
  LEFT JOIN queue_settings q ON q.queue = j.queue
 WHERE queue_workflows_is_past_retention(j.status, coalesce(j.finished_at, j.created_at),
           coalesce(q.retention_days, %(days)s::float8));

-- name: old_runs many
-- Do as `old_jobs`, for up to `limit` runs. A run stays while it has an open outbox row or a node that has not ended.
SELECT r.id
  FROM workflow_runs r
 CROSS JOIN queue_workflows_prunable_run(
           r.id, r.status, coalesce(r.finished_at, r.updated_at), %(days)s::float8)
 WHERE r.ctid >= %(first)s::tid AND r.ctid < %(end)s::tid AND {chosen(r)}
 LIMIT %(limit)s FOR UPDATE OF r SKIP LOCKED;

-- name: delete_runs many
-- Delete runs, which the caller has locked; return their ids. Their nodes, answers and outbox rows go with them.
DELETE FROM workflow_runs WHERE id = ANY (%(ids)s::text[]) RETURNING id;

-- name: count_runs value
-- Count the runs that are past their retention and that `old_runs` would not leave out.
SELECT count(*) AS n
  FROM workflow_runs r
 CROSS JOIN queue_workflows_prunable_run(
           r.id, r.status, coalesce(r.finished_at, r.updated_at), %(days)s::float8);

-- name: delete_outbox count
-- Delete up to `batch` outbox rows that were processed over `days` days ago.
DELETE FROM workflow_dispatch_events WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM workflow_dispatch_events
     WHERE processed_at < now() - %(days)s * interval '1 day'
     ORDER BY id LIMIT %(batch)s FOR UPDATE SKIP LOCKED));

-- name: delete_events count
-- tables: ingest_jobs workflow_node_jobs
-- Delete up to `batch` events of jobs that are over `days` days old.
DELETE FROM ingest_job_events WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM ingest_job_events
     WHERE created_at < now() - %(days)s * interval '1 day'
     ORDER BY id LIMIT %(batch)s));

-- name: delete_heartbeats count
-- Delete the heartbeats that are over `days` days old.
DELETE FROM worker_heartbeats WHERE last_seen < now() - %(days)s * interval '1 day';
