-- Count the history of jobs into totals, and read the figures of `queue-workflows metrics`.

-- name: count_events value
-- Count the events of the next `most` transactions that are not counted yet; return whether more
-- are left, or NULL while another transaction counts.
SELECT queue_workflows_count_events(%(most)s) AS more;

-- name: progress row
-- Return how long ago events were last counted, NULL if never, how many transactions the server
-- has made since, and whether this role and server may write the totals.
SELECT (SELECT extract(epoch FROM now())::float8 - extract(epoch FROM p.counted_at)::float8
          FROM metric_position p) AS counted_s,
       (SELECT greatest(-1, pg_snapshot_xmin(pg_current_snapshot())::text::numeric
                            - pg_snapshot_xmin(p.counted)::text::numeric)::bigint
          FROM metric_position p) AS behind,
       NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off'
       AND has_table_privilege('metric_totals', 'INSERT')
       AND has_table_privilege('metric_totals', 'UPDATE')
       AND has_table_privilege('metric_position', 'INSERT')
       AND has_table_privilege('metric_position', 'UPDATE')
       AND has_function_privilege('queue_workflows_count_events(bigint)', 'EXECUTE') AS may_count;

-- name: bounds value
-- Return the upper bounds of the buckets of histograms.
SELECT queue_workflows_metric_bounds() AS bounds;

-- name: totals many
-- Return the totals that are counted so far.
SELECT metric, name, label, bucket, n, seconds
  FROM metric_totals
 ORDER BY metric, name, label, bucket
 LIMIT %(limit)s;

-- name: by_pages none
-- tables: ingest_jobs workflow_node_jobs
-- Let the planner read the pages of a table once each for the rest of this transaction, if it has
-- no statistics. It would fetch each queued row by the index alone, which takes twice as long
-- before the first VACUUM.
SELECT set_config(s.name, CASE WHEN c.reltuples <= 0 THEN 'off' ELSE 'on' END, true)
  FROM pg_class c
 CROSS JOIN unnest('{enable_indexscan,enable_indexonlyscan,enable_sort}'::text[]) s (name)
 WHERE c.oid = 'ingest_jobs'::regclass;

-- name: waiting many
-- tables: ingest_jobs workflow_node_jobs
-- Count the queued jobs of each queue by the reason that holds them back; `ready` jobs have none.
-- Each part walks an index that has only such jobs.
SELECT queue::text, 'ready' AS why, count(*) AS n
  FROM ingest_jobs
 WHERE status = 'queued' AND blocked_reason IS NULL
 GROUP BY queue
UNION ALL
SELECT queue::text,
       CASE WHEN blocked_reason IN ('not_due', 'locked', 'limited', 'unserved', 'set_aside')
            THEN blocked_reason ELSE 'other' END, count(*)
  FROM ingest_jobs
 WHERE status = 'queued' AND blocked_reason IS NOT NULL
 GROUP BY 1, 2;

-- name: oldest_nodes many
-- For each queue, return the age of its oldest node job that is not blocked. The statement steps from version to version
-- and from priority to priority of each queue, however many jobs wait. Jobs without a version come last in the index.
WITH RECURSIVE line AS (
    (SELECT queue, required_version, priority, created_at, 1 AS step
       FROM workflow_node_jobs
      WHERE status = 'queued' AND blocked_reason IS NULL
      ORDER BY queue, required_version, priority, seq LIMIT 1)
    UNION ALL
    SELECT n.queue, n.required_version, n.priority, n.created_at, line.step + 1
      FROM line
     CROSS JOIN LATERAL (
          SELECT * FROM (
              (SELECT 1 AS place, j.queue, j.required_version, j.priority, j.created_at
                 FROM workflow_node_jobs j
                WHERE j.status = 'queued' AND j.blocked_reason IS NULL AND j.queue = line.queue
                  AND (j.required_version, j.priority) > (line.required_version, line.priority)
                ORDER BY j.required_version, j.priority, j.seq LIMIT 1)
              UNION ALL
              (SELECT 2, j.queue, j.required_version, j.priority, j.created_at
                 FROM workflow_node_jobs j
                WHERE j.status = 'queued' AND j.blocked_reason IS NULL AND j.queue = line.queue
                  AND j.required_version IS NULL
                  AND j.priority > CASE WHEN line.required_version IS NULL THEN line.priority ELSE -32769 END
                ORDER BY j.required_version, j.priority, j.seq LIMIT 1)
              UNION ALL
              (SELECT 3, j.queue, j.required_version, j.priority, j.created_at
                 FROM workflow_node_jobs j
                WHERE j.status = 'queued' AND j.blocked_reason IS NULL AND j.queue > line.queue
                ORDER BY j.queue, j.required_version, j.priority, j.seq LIMIT 1)) next
           ORDER BY place LIMIT 1) n
     WHERE line.step < 1000)
SELECT queue::text, extract(epoch FROM now())::float8
       - extract(epoch FROM min(created_at))::float8 AS age_s
  FROM line
 GROUP BY queue;

-- name: oldest_ingest many
-- Return for each queue the age of the oldest ingest job that is not blocked. It reads one job for
-- each priority of a queue, however many jobs wait.
WITH RECURSIVE line AS (
    (SELECT queue, priority, created_at, 1 AS step
       FROM ingest_jobs
      WHERE status = 'queued' AND blocked_reason IS NULL
      ORDER BY queue, priority, seq LIMIT 1)
    UNION ALL
    SELECT n.*, line.step + 1
      FROM line
     CROSS JOIN LATERAL (
          SELECT j.queue, j.priority, j.created_at
            FROM ingest_jobs j
           WHERE j.status = 'queued' AND j.blocked_reason IS NULL
             AND (j.queue, j.priority) > (line.queue, line.priority)
           ORDER BY j.queue, j.priority, j.seq LIMIT 1) n
     WHERE line.step < 1000)
SELECT queue::text, extract(epoch FROM now())::float8
       - extract(epoch FROM min(created_at))::float8 AS age_s
  FROM line
 GROUP BY queue;

-- name: running many
-- tables: ingest_jobs workflow_node_jobs
-- Count the running jobs of each queue, and those whose lease has lapsed.
SELECT queue::text, count(*) AS n,
       count(*) FILTER (WHERE lease_expires_at IS NULL OR lease_expires_at < now()) AS lapsed
  FROM ingest_jobs
 WHERE status = 'running'
 GROUP BY queue;

-- name: awaiting many
-- Count the nodes that wait for an answer, by queue.
SELECT queue::text, count(*) AS n
  FROM workflow_node_jobs
 WHERE status = 'awaiting_input' AND child_run_id IS NULL
 GROUP BY queue;

-- name: runs many
-- Count the runs that the engine has not ended, by status.
SELECT status::text, count(*) AS n
  FROM workflow_runs
 WHERE status IN ('queued', 'running') AND mode = 'node'
 GROUP BY status;

-- name: workers many
-- Count the workers of each queue by state, with their slots: for each as many as its host reported
-- last for its queue. One that was not seen for `stale_s` seconds is dead. Stopped ones are left
-- out, and dead ones after a day.
SELECT w.queue,
       CASE WHEN w.state <> 'dead' AND w.last_seen < now() - %(stale_s)s * interval '1 second'
            THEN 'dead' ELSE w.state END AS state,
       count(*) AS n, coalesce(sum(greatest(least(h.concurrency, 100000), 1)), 0)::bigint AS slots
  FROM workers w
  LEFT JOIN worker_heartbeats h ON h.host_label = w.host_label AND h.queue = w.queue
 WHERE w.state <> 'stopped' AND w.last_seen > now() - interval '1 day'
 GROUP BY 1, 2;

-- name: schedules many
-- Return the schedules that fire, the latest first: for how long each is overdue, whether an error
-- keeps it from firing, and when it last fired.
SELECT name, coalesce(extract(epoch FROM now())::float8 - extract(epoch FROM wake_at)::float8, 0)
       AS late_s, error IS NOT NULL AS has_error,
       extract(epoch FROM last_fire_at)::float8 AS last_fire
  FROM schedules
 WHERE NOT paused AND NOT ended AND gone_at IS NULL
 ORDER BY wake_at, name
 LIMIT %(limit)s;

-- name: machines many
-- Return the last hardware sample of each host, unless it is over a minute old. A ring holds one
-- sample in each slot, so only the slots of the last minute are read.
WITH RECURSIVE host AS (
    (SELECT host_label, 1 AS step FROM hw_samples ORDER BY host_label LIMIT 1)
    UNION ALL
    SELECT (SELECT s.host_label FROM hw_samples s WHERE s.host_label > host.host_label
             ORDER BY s.host_label LIMIT 1), host.step + 1
      FROM host
     WHERE host.host_label IS NOT NULL AND host.step < %(limit)s)
SELECT host.host_label, last.sample
  FROM host
 CROSS JOIN LATERAL (
      SELECT s.sample
        FROM hw_samples s
       WHERE s.host_label = host.host_label AND s.every_s = 2
         AND s.slot = ANY (ARRAY(
             SELECT mod(floor(extract(epoch FROM now()) / 2)::bigint - back, 1800)::smallint
               FROM generate_series(0, 30) back))
         AND s.sampled_at > now() - interval '1 minute'
       ORDER BY s.sampled_at DESC
       LIMIT 1) last;
