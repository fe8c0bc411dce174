-- Count the history of jobs into totals, and read what `queue-workflows metrics` shows.

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
-- Return what is counted so far.
SELECT metric, name, label, bucket, n, seconds
  FROM metric_totals
 ORDER BY metric, name, label, bucket
 LIMIT %(limit)s;

-- name: by_index none
-- Keep the planner to indexes for this transaction: without statistics it takes a scan of all
-- finished jobs for cheaper (decision 0019).
SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true);

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
