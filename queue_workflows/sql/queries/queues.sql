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

-- name: partition_limits row
-- Return the limits in force for one partition (its own, else the queue's for partitions),
-- whether it is paused, when its next job may be admitted (NULL: no time is set), and how
-- many of its jobs run. Always one row.
SELECT coalesce(queue_workflows_is_paused(p.paused_at, p.paused_until), false) AS paused,
       p.paused_until, p.paused_by,
       coalesce(p.max_running, s.partition_max_running) AS max_running,
       coalesce(p.rate_limit, s.partition_rate_limit) AS rate_limit,
       CASE WHEN p.rate_limit IS NULL THEN s.partition_rate_period_s ELSE p.rate_period_s END
           AS rate_period_s,
       (SELECT min(d.due_at) FROM partition_dues d
         WHERE d.queue = %(queue)s AND d.partition_key = %(partition)s
           AND d.due_at < 'infinity') AS due_at,
       (SELECT count(*) FROM ingest_jobs j
         WHERE j.queue = %(queue)s AND j.partition_key = %(partition)s
           AND j.status = 'running') AS running
  FROM (SELECT) AS one
  LEFT JOIN queue_settings s ON s.queue = %(queue)s
  LEFT JOIN queue_partitions p ON p.queue = %(queue)s AND p.partition_key = %(partition)s;

-- name: is_used value
-- Return whether a queue has settings, or an ingest job that could be claimed.
SELECT EXISTS (SELECT FROM queue_settings WHERE queue = %(queue)s)
    OR EXISTS (SELECT FROM ingest_jobs
                WHERE queue = %(queue)s
                  AND queue_workflows_is_claimable(status, blocked_reason)) AS found;

-- name: count_jobs many
-- Count the jobs of each queue that are queued or running, by what keeps them (`blocked`: all that something keeps);
-- `oldest_s` is the age of the oldest that is due, `ready_s` of the oldest that nothing keeps. `fresh` counts those queued
-- within the last `window` seconds, `lapsed` the running ones whose lease has lapsed. Reads every such job, and no other:
-- the three conditions are those of indexes.
SELECT c.queue,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'running'), 0)::bigint AS running,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'ready'), 0)::bigint AS ready,
       coalesce(sum(c.n) FILTER (WHERE c.why NOT IN ('running', 'ready')), 0)::bigint AS blocked,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'limited'), 0)::bigint AS limited,
       coalesce(sum(c.n) FILTER (WHERE c.why IN ('locked', 'unserved')), 0)::bigint AS locked,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'unserved'), 0)::bigint AS unserved,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'not_due'), 0)::bigint AS not_due,
       coalesce(sum(c.n) FILTER (WHERE c.why = 'set_aside'), 0)::bigint AS set_aside,
       extract(epoch FROM now())::float8 - extract(epoch FROM min(c.since) FILTER (
           WHERE c.why NOT IN ('running', 'not_due')))::float8 AS oldest_s,
       extract(epoch FROM now())::float8
       - extract(epoch FROM min(c.since) FILTER (WHERE c.why = 'ready'))::float8 AS ready_s,
       sum(c.fresh)::bigint AS fresh, sum(c.lapsed)::bigint AS lapsed
  FROM (
    -- both:
    SELECT j.queue::text,
           CASE j.status WHEN 'running' THEN 'running' ELSE coalesce(j.blocked_reason, 'ready') END AS why,
           count(*) AS n, min(j.created_at) AS since,
           count(*) FILTER (WHERE j.status = 'queued'
               AND j.created_at > now() - %(window)s * interval '1 second') AS fresh,
           count(*) FILTER (WHERE j.status = 'running'
               AND (j.lease_expires_at IS NULL OR j.lease_expires_at < now())) AS lapsed
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

-- name: use row
-- Return how many jobs of an ingest queue run, and in how many seconds its rate allows the
-- next start. `due_s` is NULL if it allows one now, or if there is no rate. Always one row.
SELECT (SELECT count(*) FROM ingest_jobs j
         WHERE j.status = 'running' AND j.queue = %(queue)s) AS running,
       (SELECT nullif(greatest(0, %(rate_period_s)s::float8 - extract(epoch FROM now())::float8
               + extract(epoch FROM s.started_at)::float8), 0)
          FROM queue_starts s
         WHERE s.queue = %(queue)s
           AND s.n = 1 - %(rate_limit)s::bigint
               + (SELECT max(n) FROM queue_starts l WHERE l.queue = %(queue)s)) AS due_s;

-- name: waiting many
-- Return each queue with settings: `paused`, and whether jobs could be claimed but for the
-- queue's own limits (`ready`) or are blocked by the limits of their partitions (`limited`).
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
                  AND j.status = 'queued' AND j.blocked_reason = 'limited') AS limited
  FROM queue_settings s;

-- name: paused many
-- Return the queues and partitions (NULL: the whole queue) that are paused now.
SELECT s.queue, s.partition, s.paused_at AS since, s.paused_until AS until, s.paused_by AS by
  FROM (SELECT queue, NULL AS partition, paused_at, paused_until, paused_by FROM queue_settings
         UNION ALL
        SELECT queue, partition_key, paused_at, paused_until, paused_by FROM queue_partitions) s
 WHERE queue_workflows_is_paused(s.paused_at, s.paused_until)
 ORDER BY 1, 2 NULLS FIRST;
