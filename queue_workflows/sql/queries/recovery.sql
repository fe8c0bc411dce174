-- Find claims of dead workers, count crashes and lapses, and queue the jobs again.

-- name: lapsed many
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return up to 100 jobs whose lease has lapsed, without those that are `aside`.
-- `had_s`: only what was renewed in these last seconds, in which the caller has had the
-- database; NULL: whatever.
SELECT id FROM ingest_jobs
 WHERE status = 'running' AND (lease_expires_at IS NULL OR lease_expires_at < now())
   AND (%(had_s)s::float8 IS NULL OR heartbeat_at IS NULL
        OR heartbeat_at >= now() - %(had_s)s::float8 * interval '1 second')
   AND id <> ALL (%(aside)s::text[])
 ORDER BY lease_expires_at LIMIT 100 FOR UPDATE SKIP LOCKED;

-- name: lapsed_among many
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return those of `ids` that `lapsed` finds.
SELECT id FROM ingest_jobs
 WHERE id = ANY (%(ids)s::text[])
   AND (status = 'running' AND (lease_expires_at IS NULL OR lease_expires_at < now())
        AND (%(had_s)s::float8 IS NULL OR heartbeat_at IS NULL
             OR heartbeat_at >= now() - %(had_s)s::float8 * interval '1 second')) IS TRUE
   FOR UPDATE SKIP LOCKED;

-- name: unwatched many
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return up to 100 jobs whose lease has lapsed and whose last renewal is older than
-- `had_s`: what `lapsed` leaves out.
SELECT id FROM ingest_jobs
 WHERE status = 'running' AND (lease_expires_at IS NULL OR lease_expires_at < now())
   AND heartbeat_at < now() - %(had_s)s::float8 * interval '1 second'
   AND id <> ALL (%(aside)s::text[])
 ORDER BY lease_expires_at LIMIT 100 FOR UPDATE SKIP LOCKED;

-- name: unwatched_among many
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return those of `ids` that `unwatched` finds.
SELECT id FROM ingest_jobs
 WHERE id = ANY (%(ids)s::text[])
   AND (status = 'running' AND (lease_expires_at IS NULL OR lease_expires_at < now())
        AND heartbeat_at < now() - %(had_s)s::float8 * interval '1 second') IS TRUE
   FOR UPDATE SKIP LOCKED;

-- name: gone many
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return up to 100 jobs whose worker is gone, without those that are `aside`:
-- neither the job nor the worker was renewed for `silent_s`, and no session holds the
-- advisory lock of the worker. A worker that never had a lock is left to its lease. Workers
-- write `detail`, so that it is compared as jsonb: a cast to boolean would raise for any
-- other word.
SELECT j.id
  FROM ingest_jobs j
  JOIN workers w USING (worker_id)
 WHERE j.status = 'running' AND w.detail -> 'lock' = 'true'::jsonb
   AND j.heartbeat_at < now() - %(silent_s)s::float8 * interval '1 second'
   AND w.last_seen < now() - %(silent_s)s::float8 * interval '1 second'
   AND NOT EXISTS (
       SELECT FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.objsubid = 1
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND ((l.classid::bigint << 32) | l.objid::bigint)
              = hashtextextended(%(lock)s::text || j.worker_id, 0))
   AND j.id <> ALL (%(aside)s::text[])
 LIMIT 100 FOR UPDATE OF j SKIP LOCKED;

-- name: gone_among many
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return those of `ids` that `gone` finds.
SELECT j.id
  FROM ingest_jobs j
  JOIN workers w USING (worker_id)
 WHERE j.status = 'running' AND w.detail -> 'lock' = 'true'::jsonb
   AND j.heartbeat_at < now() - %(silent_s)s::float8 * interval '1 second'
   AND w.last_seen < now() - %(silent_s)s::float8 * interval '1 second'
   AND NOT EXISTS (
       SELECT FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.objsubid = 1
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND ((l.classid::bigint << 32) | l.objid::bigint)
              = hashtextextended(%(lock)s::text || j.worker_id, 0))
   AND j.id = ANY (%(ids)s::text[])
   FOR UPDATE OF j SKIP LOCKED;

-- name: of_process many
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return the jobs that workers hold whose id starts with `prefix`.
SELECT id FROM ingest_jobs
 WHERE status = 'running' AND starts_with(worker_id, %(prefix)s::text) FOR UPDATE;

-- name: of_claim many
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return the job of a claim. No row: the claim is lost.
SELECT id FROM ingest_jobs
 WHERE id = %(job)s AND status = 'running' AND worker_id = %(worker)s AND claim_no = %(claim)s
   FOR UPDATE;

-- name: count_crash many
-- tables: ingest_jobs workflow_node_jobs
-- Take running jobs, which the caller has locked, from their workers and count a crash of
-- each. A job is queued again, the first time with at least the priority `band`, later after
-- `backoff_s` times its crashes; at `cap` crashes it has failed as poison. If it must end, it is
-- cancelled instead, and nothing is counted.
WITH done AS (
    UPDATE ingest_jobs j
       SET (crash_count, status, finished_at, error, available_at) = (
               SELECT CASE WHEN must_end THEN j.crash_count ELSE crashes END,
                      CASE WHEN must_end THEN 'cancelled'
                           WHEN is_poison THEN 'failed' ELSE 'queued' END,
                      CASE WHEN must_end OR is_poison THEN now() END,
                      CASE WHEN is_poison AND NOT must_end
                           THEN 'poison: took down ' || crashes || ' workers, the last one '
                                || coalesce(j.worker_id, j.claimed_by, '?')
                                || coalesce('; ' || %(error)s::text, '')
                                || coalesce('; last beat ' || to_char(
                                       j.heartbeat_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')
                                       || ' UTC', '') END,
                      CASE WHEN j.crash_count > 0 AND NOT is_poison AND NOT must_end
                           THEN now() + crashes * %(backoff_s)s::float8 * interval '1 second' END
                 FROM queue_workflows_must_end(j) AS must_end
                CROSS JOIN (
                      SELECT least(greatest(j.crash_count, 0), 999999) + 1 AS crashes) AS counted
                CROSS JOIN LATERAL (SELECT crashes >= %(cap)s::integer AS is_poison) AS decided),
           priority = CASE WHEN j.crash_count <= 0 THEN least(j.priority, %(band)s::smallint)
                           ELSE j.priority END,
           worker_id = NULL, lease_expires_at = NULL
     WHERE j.id = ANY (%(ids)s::text[]) AND (j.status = 'running') IS TRUE
 RETURNING queue_workflows_record(
               j, CASE j.status WHEN 'queued' THEN 'reclaimed' ELSE j.status END,
               host => (SELECT o.claimed_by FROM ingest_jobs o WHERE o.id = j.id),
               worker => %(worker)s, error => %(error)s) AS job)
SELECT (job).* FROM done;

-- name: count_lapse many
-- tables: ingest_jobs workflow_node_jobs
-- Take running jobs, which the caller has locked, from their workers and count a lapse of each:
-- nobody knows what ended them. A job is queued again, the first time with at least the priority
-- `band`, later after `backoff_s` times its lapses; at `cap` lapses in a row it has failed as
-- poison. If it must end, it is cancelled instead.
WITH done AS (
    UPDATE ingest_jobs j
       SET (lapse_count, status, finished_at, error, available_at) = (
               SELECT CASE WHEN must_end THEN j.lapse_count ELSE lapses END,
                      CASE WHEN must_end THEN 'cancelled'
                           WHEN is_poison THEN 'failed' ELSE 'queued' END,
                      CASE WHEN must_end OR is_poison THEN now() END,
                      CASE WHEN is_poison AND NOT must_end
                           THEN 'poison: its lease lapsed ' || lapses || ' times in a row, the last time of '
                                || coalesce(j.worker_id, j.claimed_by, '?')
                                || coalesce('; ' || %(error)s::text, '')
                                || coalesce('; last beat ' || to_char(
                                       j.heartbeat_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS')
                                       || ' UTC', '') END,
                      CASE WHEN j.lapse_count > 0 AND NOT is_poison AND NOT must_end
                           THEN now() + lapses * %(backoff_s)s::float8 * interval '1 second' END
                 FROM queue_workflows_must_end(j) AS must_end
                CROSS JOIN (
                      SELECT least(greatest(j.lapse_count, 0), 999999) + 1 AS lapses) AS counted
                CROSS JOIN LATERAL (SELECT lapses >= %(cap)s::integer AS is_poison) AS decided),
           priority = CASE WHEN j.lapse_count <= 0 THEN least(j.priority, %(band)s::smallint)
                           ELSE j.priority END,
           worker_id = NULL, lease_expires_at = NULL
     WHERE j.id = ANY (%(ids)s::text[]) AND (j.status = 'running') IS TRUE
 RETURNING queue_workflows_record(
               j, CASE j.status WHEN 'queued' THEN 'reclaimed' ELSE j.status END,
               host => (SELECT o.claimed_by FROM ingest_jobs o WHERE o.id = j.id),
               worker => %(worker)s, error => %(error)s) AS job)
SELECT (job).* FROM done;

-- name: hand_back many
-- tables: ingest_jobs workflow_node_jobs
-- Take running jobs, which the caller has locked, from their workers without counting
-- anything. A job is queued again with at least the priority `band`, or cancelled if it must
-- end.
WITH done AS (
    UPDATE ingest_jobs j
       SET (status, finished_at) = (
               SELECT CASE WHEN must_end THEN 'cancelled' ELSE 'queued' END,
                      CASE WHEN must_end THEN now() END
                 FROM queue_workflows_must_end(j) AS must_end),
           priority = least(j.priority, %(band)s::smallint),
           worker_id = NULL, lease_expires_at = NULL
     WHERE j.id = ANY (%(ids)s::text[]) AND (j.status = 'running') IS TRUE
 RETURNING queue_workflows_record(
               j, CASE j.status WHEN 'queued' THEN 'requeued' ELSE j.status END,
               host => (SELECT o.claimed_by FROM ingest_jobs o WHERE o.id = j.id),
               detail => %(detail)s) AS job)
SELECT (job).* FROM done;
