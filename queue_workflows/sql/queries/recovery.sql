-- Find claims of dead workers, count crashes and lapses, and queue the jobs again.

-- name: lapsed many
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return up to 100 jobs whose lease has lapsed, of `ids` (all if NULL) and not in `aside`. `had_s`: for how many
-- seconds the caller has had the database. `before`: only jobs whose last renewal is older, else only the others. If
-- `had_s` is NULL and `before` is false, return all.
SELECT j.id FROM ingest_jobs j
 WHERE j.status = 'running' AND (j.lease_expires_at IS NULL OR j.lease_expires_at < now())
   AND ((j.heartbeat_at < now() - %(had_s)s::float8 * interval '1 second') IS TRUE) = %(before)s::boolean
   AND {chosen(j)}
 ORDER BY j.lease_expires_at LIMIT 100 FOR UPDATE SKIP LOCKED;

-- name: gone many
-- tables: ingest_jobs workflow_node_jobs
-- Like `lapsed`, for jobs whose worker is gone: neither the job nor the worker was renewed for
-- `silent_s`, and no session holds the advisory lock of the worker. The jobs of a worker that never
-- had a lock are left to their leases. Workers write `detail`, so it is compared as jsonb: a cast
-- to boolean would raise for any other value.
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
   AND {chosen(j)}
 LIMIT 100 FOR UPDATE OF j SKIP LOCKED;

-- name: count_crash many
-- tables: ingest_jobs workflow_node_jobs
-- End claims and count a crash of each job. One element of each array is a claim. A job is queued
-- again, the first time with at least the priority `band`, later after `backoff_s` times its
-- crashes; at `cap` crashes it has failed as poison. If it must end, it is cancelled instead, and
-- nothing is counted. `worker`: the worker that reports the crash, or NULL. A claim without a row
-- is lost.
{count_loss(crash_count, crashes, 'poison: took down ' || crashes || ' workers, the last one ')}
     WHERE j.id = ANY (%(jobs)s::text[])
       AND (j.status = 'running' AND (j.id, j.claim_no, j.worker_id) IN (
            SELECT h.id, h.claim_no, h.worker
              FROM unnest(%(jobs)s::text[], %(claims)s::bigint[], %(workers)s::text[])
                   AS h (id, claim_no, worker))) IS TRUE
 {recorded(j, {unless_queued('reclaimed')}, worker => %(worker)s, error => %(error)s)};

-- name: count_lapse many
-- tables: ingest_jobs workflow_node_jobs
-- Take running jobs, which the caller has locked, from their workers. Count a lapse of each, in a
-- row, as `count_crash` counts crashes. The cause of a lapse is unknown.
{count_loss(lapse_count, lapses, 'poison: its lease lapsed ' || lapses || ' times in a row, the last time of ')}
     WHERE j.id = ANY (%(ids)s::text[]) AND (j.status = 'running') IS TRUE
 {recorded(j, {unless_queued('reclaimed')}, worker => %(worker)s, error => %(error)s)};

-- name: requeue many
-- tables: ingest_jobs workflow_node_jobs
-- Take running jobs from their workers: the jobs in `ids`, a host's jobs in one queue, or all if these are NULL. A job is
-- queued again with at least the priority `band`, or cancelled if it must end. If `counted`, it counts as ended by the
-- watchdog, else not at all.
WITH done AS (
    UPDATE ingest_jobs j
       SET (status, finished_at) = (
               SELECT CASE WHEN must_end THEN 'cancelled' ELSE 'queued' END,
                      CASE WHEN must_end THEN now() END
                 FROM queue_workflows_must_end(j) AS must_end),
           priority = least(j.priority, %(band)s::smallint),
           watchdog_retries = j.watchdog_retries + %(counted)s::boolean::integer,
           worker_id = NULL, lease_expires_at = NULL
     WHERE (j.status = 'running') IS TRUE AND (%(ids)s::text[] IS NULL OR j.id = ANY (%(ids)s::text[]))
       AND (%(host)s::text IS NULL OR j.claimed_by = %(host)s::text AND j.queue = %(queue)s::text)
 {recorded(j, {unless_queued('requeued')}, detail => %(detail)s)};
