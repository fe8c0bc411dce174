-- Pause and limit queues and partitions, and read their settings and counts.

-- name: pause_queue row
-- Pause a queue until `at`, for `lasts` from now, or (both NULL) until it is resumed; return
-- its row. A pause that is in force keeps its beginning.
INSERT INTO queue_settings AS s (queue, paused_at, paused_until, paused_by)
VALUES (%(queue)s, now(), coalesce(%(at)s::timestamptz, now() + %(lasts)s::interval), %(by)s)
    ON CONFLICT (queue) DO UPDATE
   SET paused_at = CASE WHEN queue_workflows_is_paused(s.paused_at, s.paused_until)
                        THEN s.paused_at ELSE now() END,
       paused_until = excluded.paused_until, paused_by = excluded.paused_by, updated_at = now()
RETURNING *;

-- name: pause_partition row
-- Pause one partition of a queue, as pause_queue does; return its row.
INSERT INTO queue_partitions AS p (queue, partition_key, paused_at, paused_until, paused_by)
VALUES (%(queue)s, %(partition)s, now(),
        coalesce(%(at)s::timestamptz, now() + %(lasts)s::interval), %(by)s)
    ON CONFLICT (queue, partition_key) DO UPDATE
   SET paused_at = CASE WHEN queue_workflows_is_paused(p.paused_at, p.paused_until)
                        THEN p.paused_at ELSE now() END,
       paused_until = excluded.paused_until, paused_by = excluded.paused_by, updated_at = now()
RETURNING *;

-- name: resume_queue many
-- End the pause of a queue, also one that has run out. Returns no row if it had none.
UPDATE queue_settings
   SET paused_at = NULL, paused_until = NULL, paused_by = NULL, updated_at = now()
 WHERE queue = %(queue)s AND paused_at IS NOT NULL
RETURNING queue;

-- name: resume_partition many
-- End the pause of a partition, also one that has run out. Returns no row if it had none.
UPDATE queue_partitions
   SET paused_at = NULL, paused_until = NULL, paused_by = NULL, updated_at = now()
 WHERE queue = %(queue)s AND partition_key = %(partition)s AND paused_at IS NOT NULL
RETURNING queue;

-- name: limit_queue row
-- Set limits of a queue; return its row. `limits` is a JSON object of columns: null takes a
-- limit off, and a column that is absent stays as it is.
INSERT INTO queue_settings AS s (queue, max_running, rate_limit, rate_period_s,
       partition_max_running, partition_rate_limit, partition_rate_period_s)
SELECT %(queue)s, n.max_running, n.rate_limit, n.rate_period_s,
       n.partition_max_running, n.partition_rate_limit, n.partition_rate_period_s
  FROM jsonb_populate_record(NULL::queue_settings, %(limits)s::jsonb) AS n
    ON CONFLICT (queue) DO UPDATE
   SET (max_running, rate_limit, rate_period_s,
        partition_max_running, partition_rate_limit, partition_rate_period_s) = (
       SELECT n.max_running, n.rate_limit, n.rate_period_s,
              n.partition_max_running, n.partition_rate_limit, n.partition_rate_period_s
         FROM jsonb_populate_record(s, %(limits)s::jsonb) AS n),
       updated_at = now()
RETURNING *;

-- name: limit_partition row
-- Set limits of one partition of a queue, as limit_queue does; return its row.
INSERT INTO queue_partitions AS p (queue, partition_key, max_running, rate_limit, rate_period_s)
SELECT %(queue)s, %(partition)s, n.max_running, n.rate_limit, n.rate_period_s
  FROM jsonb_populate_record(NULL::queue_partitions, %(limits)s::jsonb) AS n
    ON CONFLICT (queue, partition_key) DO UPDATE
   SET (max_running, rate_limit, rate_period_s) = (
       SELECT n.max_running, n.rate_limit, n.rate_period_s
         FROM jsonb_populate_record(p, %(limits)s::jsonb) AS n),
       updated_at = now()
RETURNING *;

-- name: delete_unset_partition none
-- Delete the row of a partition that is not paused and has no limit of its own.
DELETE FROM queue_partitions
 WHERE queue = %(queue)s AND partition_key = %(partition)s
   AND paused_at IS NULL AND max_running IS NULL AND rate_limit IS NULL;

-- name: prune_starts count
-- Delete up to `batch` starts of partitions that are over `days` days old and that no rate counts any more.
DELETE FROM partition_starts WHERE ctid = ANY (ARRAY(
    SELECT b.ctid
      FROM partition_starts b
      LEFT JOIN queue_partitions p ON p.queue = b.queue AND p.partition_key = b.partition_key
      LEFT JOIN queue_settings s ON s.queue = b.queue
     WHERE b.started_at < now() - interval '1 day' * greatest(%(days)s, CASE
               WHEN p.rate_limit IS NULL THEN s.partition_rate_period_s ELSE p.rate_period_s END / 86400)
     LIMIT %(batch)s FOR UPDATE OF b SKIP LOCKED));

-- name: admit_from_partitions value prepared
-- Admit jobs of the partitions whose time has come, and of partitions in which no job is admitted.
-- Returns how many partitions of the second kind there were.
SELECT queue_workflows_mend_lines() AS n;

-- name: settings many
-- Return the settings of one queue, or (NULL) of every queue that has some, with `paused`:
-- whether it is paused now.
SELECT s.*, queue_workflows_is_paused(s.paused_at, s.paused_until) AS paused
  FROM queue_settings s
 WHERE %(queue)s::text IS NULL OR s.queue = %(queue)s
 ORDER BY s.queue;

-- name: is_used value
-- Return whether a queue has settings, or an ingest job that could be claimed.
SELECT EXISTS (SELECT FROM queue_settings WHERE queue = %(queue)s)
    OR EXISTS (SELECT FROM ingest_jobs
                WHERE queue = %(queue)s
                  AND queue_workflows_is_claimable(status, blocked_reason)) AS found;

-- name: list many unprepared
-- Return the queues that have settings, live jobs, or events of the last `window` seconds, and with `served` also those
-- that a worker has served or a switch names; only one of them if `queue` is given. Each has its settings, with `paused`;
-- its live jobs by what keeps them (`blocked`: all that something keeps); the age of the oldest that is due and no map
-- that waits for its items (`oldest_s`), and of the oldest that is not blocked (`ready_s`); how many jobs came in
-- (`came`) and ended (`went`) within the window; its live workers (`alive`), and those that take jobs (`taking`). Behind
-- a queue come its partitions with settings of their own, of all queues the first `most`. Reads every live job, and no
-- other but those with events of the window: the three conditions are those of indexes.
WITH jobs AS MATERIALIZED (
    SELECT c.queue, sum(c.n) FILTER (WHERE c.why = 'running') AS running,
           sum(c.n) FILTER (WHERE c.why = 'ready') AS ready,
           sum(c.n) FILTER (WHERE c.why NOT IN ('running', 'ready')) AS blocked,
           sum(c.n) FILTER (WHERE c.why = 'limited') AS limited,
           sum(c.n) FILTER (WHERE c.why IN ('locked', 'unserved')) AS locked,
           sum(c.n) FILTER (WHERE c.why = 'unserved') AS unserved,
           sum(c.n) FILTER (WHERE c.why = 'not_due') AS not_due,
           min(c.since) FILTER (WHERE c.why NOT IN ('running', 'not_due', 'items')) AS oldest_at,
           min(c.since) FILTER (WHERE c.why = 'ready') AS ready_at, sum(c.fresh) AS fresh
      FROM (
        -- both:
        SELECT j.queue::text,
               CASE j.status WHEN 'running' THEN 'running' ELSE coalesce(j.blocked_reason, 'ready') END AS why,
               count(*) AS n, min(j.created_at) AS since,
               count(*) FILTER (WHERE j.status = 'queued'
                   AND j.created_at > now() - %(window)s::float8 * interval '1 second') AS fresh
          FROM ingest_jobs j
         WHERE j.status = 'queued' AND j.blocked_reason IS NULL
            OR j.status = 'queued' AND j.blocked_reason IS NOT NULL
            OR j.status = 'running'
         GROUP BY 1, 2
        -- end
        ) c
     GROUP BY c.queue),
events AS MATERIALIZED (
    -- A job that came in and is queued still has no event.
    SELECT c.queue, sum(c.came) AS came, sum(c.went) AS went
      FROM (
        -- both:
        SELECT e.queue::text,
               count(DISTINCT e.job_id) FILTER (
                   WHERE j.created_at > now() - %(window)s::float8 * interval '1 second'
                     AND j.status <> 'queued') AS came,
               count(*) FILTER (WHERE e.event_type IN ('completed', 'failed', 'cancelled')) AS went
          FROM ingest_job_events e
          LEFT JOIN ingest_jobs j ON j.id = e.job_id
         WHERE %(window)s::float8 > 0 AND e.created_at > now() - %(window)s::float8 * interval '1 second'
           AND e.queue IS NOT NULL
         GROUP BY 1
        -- end
        ) c
     GROUP BY c.queue),
partitions AS MATERIALIZED (
    SELECT * FROM queue_partitions
     WHERE %(queue)s::text IS NULL OR queue = %(queue)s
     ORDER BY queue, partition_key LIMIT %(most)s)
SELECT n.queue, NULL::text AS partition,
       coalesce(queue_workflows_is_paused(s.paused_at, s.paused_until), false) AS paused,
       s.paused_at, s.paused_until, s.paused_by, s.max_running, s.rate_limit, s.rate_period_s,
       s.partition_max_running, s.partition_rate_limit, s.partition_rate_period_s,
       coalesce(j.running, 0)::bigint AS running, coalesce(j.ready, 0)::bigint AS ready,
       coalesce(j.blocked, 0)::bigint AS blocked, coalesce(j.limited, 0)::bigint AS limited,
       coalesce(j.locked, 0)::bigint AS locked, coalesce(j.unserved, 0)::bigint AS unserved,
       coalesce(j.not_due, 0)::bigint AS not_due,
       extract(epoch FROM now())::float8 - extract(epoch FROM j.oldest_at)::float8 AS oldest_s,
       extract(epoch FROM now())::float8 - extract(epoch FROM j.ready_at)::float8 AS ready_s,
       (coalesce(j.fresh, 0) + coalesce(e.came, 0))::bigint AS came, coalesce(e.went, 0)::bigint AS went,
       coalesce(w.alive, 0) AS alive, coalesce(w.taking, 0) AS taking
  FROM (SELECT queue FROM queue_settings
         UNION SELECT queue FROM jobs
         UNION SELECT queue FROM events
         UNION SELECT queue FROM partitions
         UNION SELECT k.queue FROM ({known_queues()}) k WHERE %(served)s::boolean) n
  LEFT JOIN queue_settings s ON s.queue = n.queue
  LEFT JOIN jobs j ON j.queue = n.queue
  LEFT JOIN events e ON e.queue = n.queue
  LEFT JOIN (SELECT v.queue, count(*) AS alive, count(*) FILTER (WHERE v.takes_jobs) AS taking
               FROM ({serving(%(stale_s)s::float8)}) v GROUP BY v.queue) w ON w.queue = n.queue
 WHERE %(queue)s::text IS NULL OR n.queue = %(queue)s
UNION ALL
SELECT p.queue, p.partition_key, coalesce(queue_workflows_is_paused(p.paused_at, p.paused_until), false),
       p.paused_at, p.paused_until, p.paused_by, p.max_running, p.rate_limit, p.rate_period_s,
       NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
  FROM partitions p
 ORDER BY queue, partition NULLS FIRST
 LIMIT 10000;

-- name: waiting many
-- Return one queue with settings, or each if NULL, with the use of its limits.
SELECT {in_use(s)}, s.paused_until, s.paused_by
  FROM queue_settings s
 WHERE %(queue)s::text IS NULL OR s.queue = %(queue)s
 ORDER BY s.queue
 LIMIT 10000;
