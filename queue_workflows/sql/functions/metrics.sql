-- Counters of jobs: sums over their history, which is complete, since each transition writes its event.

-- Return the upper bounds of the buckets of histograms, in seconds. A value that equals a bound is below it.
CREATE OR REPLACE FUNCTION queue_workflows_metric_bounds() RETURNS double precision[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT '{0.01,0.05,0.1,0.25,0.5,1,2.5,5,10,30,60,300,900,3600,14400}'::double precision[]
$$;

-- Return the events that `p_new` sees, `p_old` does not, and whose transaction is from `p_low` to before `p_high`.
-- `wait_s`: how long a claimed job waited since it was inserted or last returned to the queue, and `why` it was there.
-- `cause`: why a job left its claim without an outcome. `is_crash`: a process was seen to die.
-- Long names are cut, so that no event can make the count fail.
CREATE OR REPLACE FUNCTION queue_workflows_uncounted_events(
    p_low bigint, p_high bigint, p_old pg_snapshot, p_new pg_snapshot, p_since timestamptz)
RETURNS TABLE (event_type text, queue text, model text, by_worker boolean, elapsed_s double precision,
               wait_s double precision, why text, cause text, is_crash boolean)
LANGUAGE sql STABLE AS $$
    WITH events AS (
        -- both:
        SELECT
               'node' AS family, e.run_id, e.node_id, e.model,  -- nodes only
               'ingest' AS family, NULL AS run_id, NULL AS node_id, NULL AS model,  -- ingest only
               e.id, e.job_id, e.event_type::text, e.queue, e.worker_id, e.claim_no, e.elapsed_s, e.error, e.created_at,
               CASE WHEN e.event_type = 'requeued' THEN e.detail END AS detail
          FROM ingest_job_events e
         WHERE e.xid >= p_low AND e.xid < p_high AND e.created_at >= p_since
           AND CASE WHEN e.xid > 0 THEN pg_visible_in_snapshot(e.xid::text::xid8, p_new)
                                    AND NOT pg_visible_in_snapshot(e.xid::text::xid8, p_old) END
        -- end
    )
    SELECT e.event_type, left(coalesce(e.queue, ''), 200), left(coalesce(e.model, ''), 200),
           e.worker_id IS NOT NULL, least(greatest(e.elapsed_s, 0), 1e9),
           least(greatest(extract(epoch FROM e.created_at)::float8
                          - extract(epoch FROM coalesce(b.created_at, j.created_at))::float8, 0), 1e9),
           CASE b.event_type WHEN 'retried' THEN 'retry' WHEN 'reclaimed' THEN 'crash'
                             WHEN 'requeued' THEN 'handed_back' ELSE 'new' END,
           c.cause, e.event_type IN ('reclaimed', 'failed') AND c.cause = 'process_died'
      FROM events e
      LEFT JOIN LATERAL (
           SELECT i.created_at, i.error, i.claim_no FROM ingest_jobs i
            WHERE e.family = 'ingest' AND e.event_type IN ('claimed', 'failed') AND i.id = e.job_id
           UNION ALL
           SELECT n.created_at, n.error, n.claim_no FROM workflow_node_jobs n
            WHERE e.family = 'node' AND e.event_type IN ('claimed', 'failed') AND n.id = e.job_id) j ON true
      LEFT JOIN LATERAL (
           (SELECT p.event_type, p.created_at FROM ingest_job_events p
             WHERE e.family = 'ingest' AND e.event_type = 'claimed' AND p.job_id = e.job_id AND p.id < e.id
               AND p.event_type IN ('retried', 'reclaimed', 'requeued') ORDER BY p.id DESC LIMIT 1)
           UNION ALL
           (SELECT p.event_type::text, p.created_at FROM workflow_node_events p
             WHERE e.family = 'node' AND e.event_type = 'claimed' AND p.run_id = e.run_id
               AND p.node_id = e.node_id AND p.id < e.id
               AND p.event_type IN ('retried', 'reclaimed', 'requeued') ORDER BY p.created_at DESC, p.id DESC
             LIMIT 1)) b ON true
      CROSS JOIN LATERAL (
           SELECT CASE WHEN e.event_type = 'retried'
                       THEN CASE WHEN e.worker_id IS NULL THEN 'operator' ELSE 'failure' END
                       WHEN e.event_type = 'requeued'
                       THEN CASE WHEN e.detail ->> 'reason' = 'its lease lapsed while the database was away'
                                 THEN 'database_away' WHEN e.error IS NOT NULL THEN 'watchdog' ELSE 'handed_back' END
                       WHEN e.event_type = 'reclaimed' OR e.event_type = 'failed' AND j.claim_no = e.claim_no
                            AND (starts_with(j.error, 'poison: took down ') OR starts_with(j.error, 'poison: its lease '))
                       THEN CASE WHEN starts_with(e.error, 'its session is gone') THEN 'session_gone'
                                 WHEN e.error IS NULL OR starts_with(e.error, 'poison: ') THEN 'lease_lapsed'
                                 ELSE 'process_died' END END AS cause) c
     WHERE e.event_type IN ('claimed', 'completed', 'failed', 'cancelled', 'retried', 'reclaimed',
                            'requeued', 'model_load_done', 'stall_trip', 'gpu_health_trip', 'budget_trip')
$$;

-- Add the events that are not counted yet to metric_totals: the events of the next `p_most` transactions at most.
-- Return whether more are left, or NULL while another transaction counts. Every event is counted once, whenever its
-- transaction commits: `counted` is a snapshot, and events that it does not see are counted later. A transaction
-- that stays open therefore makes the scan longer, but delays no count. From the 101st queue, or model, on they are
-- counted together as `(other)`.
CREATE OR REPLACE FUNCTION queue_workflows_count_events(p_most bigint) RETURNS boolean
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = on SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off AS $$
DECLARE
    v_old   pg_snapshot;
    v_new   pg_snapshot;
    v_since timestamptz;
    v_low   bigint;
    v_high  bigint;
    v_more  boolean := false;
BEGIN
    -- An advisory lock, since a row lock would write, and most calls find no event to count.
    IF NOT pg_try_advisory_xact_lock(hashtextextended('queue_workflows.metrics', 0)) THEN
        RETURN NULL;
    END IF;
    SELECT p.counted, p.since INTO v_old, v_since FROM metric_position p;
    IF NOT FOUND THEN
        v_low := coalesce(least((SELECT min(e.xid) FROM workflow_node_events e WHERE e.xid > 0),
                                (SELECT min(e.xid) FROM ingest_job_events e WHERE e.xid > 0)),
                          pg_snapshot_xmin(pg_current_snapshot())::text::bigint);
        v_old := format('%s:%s:', v_low, v_low)::pg_snapshot;
        INSERT INTO metric_position (counted) VALUES (v_old) RETURNING since INTO v_since;
    END IF;
    v_new := pg_current_snapshot();
    IF pg_snapshot_xmax(v_new) < pg_snapshot_xmax(v_old) THEN
        -- A dump was restored into a server that has made fewer transactions.
        UPDATE metric_position SET counted = v_new, counted_at = now(), since = now();
        RETURN false;
    END IF;
    v_low := pg_snapshot_xmin(v_old)::text::bigint;
    v_high := v_low + p_most;
    IF v_high % 4294967296 < 3 THEN
        v_high := v_high + 3;  -- these are numbers of no transaction
    END IF;
    IF pg_snapshot_xmin(v_new)::text::bigint > v_high THEN
        -- All transactions below have ended.
        v_new := format('%s:%s:', v_high, v_high)::pg_snapshot;
        v_more := true;
    END IF;
    WITH one AS MATERIALIZED (
        SELECT * FROM queue_workflows_uncounted_events(
                 v_low, pg_snapshot_xmax(v_new)::text::bigint, v_old, v_new, v_since)),
    seen (metric, name, label, seconds) AS (
        SELECT 'jobs', queue, event_type, NULL::float8 FROM one
         WHERE event_type IN ('completed', 'failed', 'cancelled')
        UNION ALL SELECT 'run', queue, '', elapsed_s FROM one
         WHERE event_type IN ('completed', 'failed', 'retried') AND by_worker AND elapsed_s IS NOT NULL
        UNION ALL SELECT 'claims', queue, '', NULL FROM one WHERE event_type = 'claimed'
        UNION ALL SELECT 'wait', queue, why, wait_s FROM one WHERE event_type = 'claimed' AND wait_s IS NOT NULL
        UNION ALL SELECT 'retries', queue, cause, NULL FROM one WHERE event_type = 'retried'
        UNION ALL SELECT 'reclaims', queue, cause, NULL FROM one
         WHERE event_type IN ('reclaimed', 'failed') AND cause IS NOT NULL OR cause = 'database_away'
        UNION ALL SELECT 'requeues', queue, cause, NULL FROM one
         WHERE event_type = 'requeued' AND cause <> 'database_away'
        UNION ALL SELECT 'crashes', queue, '', NULL FROM one WHERE is_crash
        UNION ALL SELECT 'watchdog', queue, event_type, NULL FROM one
         WHERE event_type IN ('stall_trip', 'gpu_health_trip', 'budget_trip')
        UNION ALL SELECT 'model_load', model, '', coalesce(elapsed_s, 0) FROM one
         WHERE event_type = 'model_load_done'),
    added AS MATERIALIZED (
        SELECT metric, name, label, count(*) AS n, coalesce(sum(seconds), 0) AS seconds,
               (cardinality(b.bounds) - width_bucket(-seconds, b.below))::smallint AS bucket
          FROM seen
         CROSS JOIN (SELECT bounds, ARRAY(SELECT -u FROM unnest(bounds) u ORDER BY u DESC) AS below
                       FROM queue_workflows_metric_bounds() bounds) b
         GROUP BY metric, name, label, bucket),
    kept AS (
        SELECT f.name, f.of_model
          FROM (SELECT a.name, a.metric = 'model_load' AS of_model,
                       row_number() OVER (PARTITION BY a.metric = 'model_load' ORDER BY bool_and(k.name IS NULL), a.name)
                           AS place, bool_or(k.name IS NOT NULL) AS is_known
                  FROM added a
                  LEFT JOIN (SELECT DISTINCT t.name, t.metric = 'model_load' AS of_model FROM metric_totals t) k
                    ON k.name = a.name AND k.of_model = (a.metric = 'model_load')
                 GROUP BY a.name, a.metric = 'model_load') f
         WHERE f.is_known
            OR f.place <= 100 - (SELECT count(DISTINCT t.name) FROM metric_totals t
                                  WHERE (t.metric = 'model_load') = f.of_model
                                    AND NOT EXISTS (SELECT FROM added a WHERE a.name = t.name
                                                      AND (a.metric = 'model_load') = f.of_model)))
    INSERT INTO metric_totals AS t (metric, name, label, bucket, n, seconds)
    SELECT a.metric, coalesce(k.name, '(other)'), coalesce(a.label, ''), coalesce(a.bucket, 0), sum(a.n),
           least(sum(a.seconds), 1e15)
      FROM added a
      LEFT JOIN kept k ON k.name = a.name AND k.of_model = (a.metric = 'model_load')
     GROUP BY 1, 2, 3, 4
        ON CONFLICT (metric, name, label, bucket) DO UPDATE
       SET n = least(t.n + EXCLUDED.n, 1000000000000000000), seconds = least(t.seconds + EXCLUDED.seconds, 1e15);
    -- Store the snapshot from time to time even without events, so that the same range is not searched again and again.
    IF FOUND OR v_more OR pg_snapshot_xmin(v_new)::text::bigint > v_low + 1000 THEN
        UPDATE metric_position SET counted = v_new, counted_at = now();
    END IF;
    RETURN v_more;
END $$;
