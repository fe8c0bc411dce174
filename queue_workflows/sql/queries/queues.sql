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
-- End the pause of a queue, also one that has run out. No row: it had none.
UPDATE queue_settings
   SET paused_at = NULL, paused_until = NULL, paused_by = NULL, updated_at = now()
 WHERE queue = %(queue)s AND paused_at IS NOT NULL
RETURNING queue;

-- name: resume_partition many
-- End the pause of a partition, also one that has run out. No row: it had none.
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

-- name: admit_from_partitions value prepared
-- Admit jobs of the partitions whose time has come, and of those from which no job is
-- admitted. Returns how many partitions of the second kind there were.
SELECT queue_workflows_mend_lines() AS n;

-- name: settings many
-- Return the settings of one queue, or (NULL) of every queue that has some, with `paused`:
-- whether it is paused now.
SELECT s.*, queue_workflows_is_paused(s.paused_at, s.paused_until) AS paused
  FROM queue_settings s
 WHERE %(queue)s::text IS NULL OR s.queue = %(queue)s
 ORDER BY s.queue;

-- name: partition_settings many
-- Return the settings of all partitions that have some of their own, with `paused`.
SELECT p.*, queue_workflows_is_paused(p.paused_at, p.paused_until) AS paused
  FROM queue_partitions p
 ORDER BY p.queue, p.partition_key;

-- name: is_used value
-- Return whether a queue has settings, or an ingest job that could be claimed.
SELECT EXISTS (SELECT FROM queue_settings WHERE queue = %(queue)s)
    OR EXISTS (SELECT FROM ingest_jobs
                WHERE queue = %(queue)s
                  AND queue_workflows_is_claimable(status, blocked_reason)) AS found;

-- name: count_jobs many
-- Count the jobs of each queue that are queued or running, by what keeps them (`blocked`: all that something keeps);
-- `oldest_s` is the age of the oldest that is due, `ready_s` of the oldest that nothing keeps, and `fresh` counts those
-- queued within the last `window` seconds. Reads every such job, and no other: the three conditions are those of indexes.
SELECT c.queue,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'running'), 0)::bigint AS running,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'ready'), 0)::bigint AS ready,
       coalesce(sum(c.n) FILTER (WHERE c.why NOT IN ('running', 'ready')), 0)::bigint AS blocked,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'limited'), 0)::bigint AS limited,
       coalesce(sum(c.n) FILTER (WHERE c.why IN ('locked', 'unserved')), 0)::bigint AS locked,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'unserved'), 0)::bigint AS unserved,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'not_due'), 0)::bigint AS not_due,
       extract(epoch FROM now())::float8 - extract(epoch FROM min(c.since) FILTER (
           WHERE c.why NOT IN ('running', 'not_due')))::float8 AS oldest_s,
       extract(epoch FROM now())::float8
       - extract(epoch FROM min(c.since) FILTER (WHERE c.why = 'ready'))::float8 AS ready_s,
       sum(c.fresh)::bigint AS fresh
  FROM (
    -- both:
    SELECT j.queue::text,
           CASE j.status WHEN 'running' THEN 'running' ELSE coalesce(j.blocked_reason, 'ready') END AS why,
           count(*) AS n, min(j.created_at) AS since,
           count(*) FILTER (WHERE j.status = 'queued'
               AND j.created_at > now() - %(window)s * interval '1 second') AS fresh
      FROM ingest_jobs j
     WHERE j.status = 'queued' AND j.blocked_reason IS NULL
        OR j.status = 'queued' AND j.blocked_reason IS NOT NULL
        OR j.status = 'running'
     GROUP BY 1, 2
    -- end
  ) c
 GROUP BY c.queue ORDER BY c.queue;

-- name: count_events many
-- Count the jobs of each queue that came in (`came`) or ended (`went`) within the last
-- `window` seconds, by their events. A job that came in and is queued still has no event:
-- count_jobs has it.
-- both:
SELECT e.queue,
       count(DISTINCT e.job_id) FILTER (
           WHERE j.created_at > now() - %(window)s * interval '1 second'
             AND j.status <> 'queued') AS came,
       count(*) FILTER (WHERE e.event_type IN ('completed', 'failed', 'cancelled')) AS went
  FROM ingest_job_events e
  LEFT JOIN ingest_jobs j ON j.id = e.job_id
 WHERE e.created_at > now() - %(window)s * interval '1 second' AND e.queue IS NOT NULL
 GROUP BY 1
-- end
 ORDER BY 1;

-- name: waiting many
-- Return one queue with settings, or (NULL) each: whether it is `paused`; whether jobs could be
-- claimed but for the queue's own limits (`ready`) or are blocked by the limits of their partitions
-- (`limited`); how many of its ingest jobs run, and in how many seconds its rate allows the next
-- start (`due_s`; NULL: now, or there is no rate).
SELECT s.*, queue_workflows_is_paused(s.paused_at, s.paused_until) AS paused,
       EXISTS (SELECT FROM ingest_jobs j
                WHERE j.queue = s.queue
                  AND queue_workflows_is_claimable(j.status, j.blocked_reason))
       OR EXISTS (SELECT FROM workflow_node_jobs j
                   WHERE j.queue = s.queue
                     AND queue_workflows_is_claimable(j.status, j.blocked_reason))
           AS ready,
       EXISTS (SELECT FROM ingest_jobs j
                WHERE j.queue = s.queue AND j.partition_key IS NOT NULL
                  AND j.status = 'queued' AND j.blocked_reason = 'limited') AS limited,
       (SELECT count(*) FROM ingest_jobs j
         WHERE j.status = 'running' AND j.queue = s.queue) AS running,
       (SELECT nullif(greatest(0, s.rate_period_s - extract(epoch FROM now())::float8
               + extract(epoch FROM b.started_at)::float8), 0)
          FROM queue_starts b
         WHERE b.queue = s.queue
           AND b.n = 1 - s.rate_limit::bigint
               + (SELECT max(n) FROM queue_starts l WHERE l.queue = s.queue)) AS due_s
  FROM queue_settings s
 WHERE %(queue)s::text IS NULL OR s.queue = %(queue)s
 ORDER BY s.queue
 LIMIT 10000;

-- name: paused many
-- Return the queues and partitions (NULL: the whole queue) that are paused now.
SELECT s.queue, s.partition, s.paused_at AS since, s.paused_until AS until, s.paused_by AS by
  FROM (SELECT queue, NULL AS partition, paused_at, paused_until, paused_by FROM queue_settings
         UNION ALL
        SELECT queue, partition_key, paused_at, paused_until, paused_by FROM queue_partitions) s
 WHERE queue_workflows_is_paused(s.paused_at, s.paused_until)
 ORDER BY 1, 2 NULLS FIRST;
