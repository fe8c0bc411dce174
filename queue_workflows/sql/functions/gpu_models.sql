-- Find which models gpu workers can load, how long models take, and which models wait.

-- Return the seconds since a time: 0 for a time in the future, and for an infinite one, which PostgreSQL 16
-- cannot subtract.
CREATE OR REPLACE FUNCTION queue_workflows_age_s(p_at timestamptz) RETURNS double precision LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN isfinite(p_at) THEN greatest(0, extract(epoch FROM now() - p_at))::float8
                WHEN p_at IS NOT NULL THEN 0 END
$$;

-- Add a measured load or run of a model to its moving averages, which follow the last ten or so. A row that
-- another transaction has locked is skipped: one lost measurement costs less than a wait inside a claim.
-- Durations are bounded to 366 days, since one NaN would make every later average NaN.
CREATE OR REPLACE FUNCTION queue_workflows_learn(
    p_host text, p_model text, p_load_s double precision, p_run_s double precision)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_host IS NULL OR p_model IS NULL THEN
        RETURN;
    END IF;
    p_load_s := CASE WHEN p_load_s IS NOT NULL THEN least(greatest(p_load_s, 0), 31622400) END;
    p_run_s := CASE WHEN p_run_s IS NOT NULL THEN least(greatest(p_run_s, 0), 31622400) END;
    UPDATE gpu_models g
       SET load_s = CASE WHEN p_load_s IS NULL THEN g.load_s
                         ELSE coalesce(g.load_s, 0)
                              + (p_load_s - coalesce(g.load_s, 0)) / (least(g.loads, 9) + 1) END,
           loads = least(g.loads, 1000000000) + (p_load_s IS NOT NULL)::integer,
           run_s = CASE WHEN p_run_s IS NULL THEN g.run_s
                        ELSE coalesce(g.run_s, 0)
                             + (p_run_s - coalesce(g.run_s, 0)) / (least(g.runs, 9) + 1) END,
           runs = least(g.runs, 1000000000) + (p_run_s IS NOT NULL)::integer,
           updated_at = now()
     WHERE (g.model, g.host_label) = (
           SELECT o.model, o.host_label FROM gpu_models o
            WHERE o.model = p_model AND o.host_label = p_host FOR UPDATE SKIP LOCKED);
    IF NOT FOUND AND NOT EXISTS (
        SELECT FROM gpu_models WHERE model = p_model AND host_label = p_host) THEN
        INSERT INTO gpu_models (model, host_label, load_s, loads, run_s, runs)
        VALUES (p_model, p_host, p_load_s, (p_load_s IS NOT NULL)::integer,
                p_run_s, (p_run_s IS NOT NULL)::integer)
            ON CONFLICT DO NOTHING;
    END IF;
END $$;

-- Return how long a model loads and runs on a host: measured there, else the average of other hosts, else a
-- minute each.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_times(
    p_host text, p_model text, OUT load_s double precision, OUT run_s double precision)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(g.load_s) FILTER (WHERE g.host_label = p_host), avg(g.load_s), 60),
           coalesce(max(g.run_s) FILTER (WHERE g.host_label = p_host), avg(g.run_s), 60)
      FROM gpu_models g WHERE g.model = p_model
$$;

-- Return the size of a model in GB as its host registered it, else the largest that any host registered; NULL or
-- 0: unknown.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_needs(p_host text, p_model text) RETURNS double precision
LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(g.est_vram_gb) FILTER (WHERE g.host_label = p_host), max(g.est_vram_gb))
      FROM gpu_models g WHERE g.model = p_model
$$;

-- Return the live gpu workers. known_models is NULL if a worker registers none. is_serving is false if it is
-- switched off. A host counts as a worker if its last sign of life is a heartbeat (of a worker of 0.3.0).
CREATE OR REPLACE FUNCTION queue_workflows_gpu_live()
RETURNS TABLE (host_label text, known_models text[], vram_total_mb integer, is_serving boolean)
LANGUAGE sql STABLE AS $$
    SELECT w.host_label, w.known_models, w.vram_total_mb, {takes_jobs(w)}
      FROM workers w
     WHERE w.queue = 'gpu' AND {is_live(w, 30)}
    UNION ALL
    SELECT h.host_label, nullif(h.known_models, '{}'), h.vram_total_mb, true
      FROM worker_heartbeats h
     WHERE h.queue = 'gpu' AND h.last_seen > now() - interval '30 seconds'
       AND NOT EXISTS (SELECT FROM workers w
                        WHERE w.host_label = h.host_label AND w.queue = 'gpu'
                          AND (w.last_seen >= h.last_seen OR {is_live(w, 30)}))
$$;

-- Return why a worker cannot take jobs of a model: 'model' (it does not know the model, or registers none while
-- another live worker knows it), 'vram' (its GPU memory is too small), or NULL if it can. A GB counts 1000 MB,
-- so that a model of 24 GB fits a GPU that is sold with 24 GB.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_misfit(
    p_host text, p_models text[], p_vram_mb integer, p_model text) RETURNS text
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF coalesce(p_model, '') = '' THEN
        RETURN NULL;
    ELSIF p_model <> ALL (p_models) THEN
        RETURN 'model';
    ELSIF p_models IS NULL AND EXISTS (
        SELECT FROM queue_workflows_gpu_live() l WHERE p_model = ANY (l.known_models)) THEN
        RETURN 'model';
    ELSIF p_vram_mb < 1000 * queue_workflows_gpu_needs(p_host, p_model) THEN
        RETURN 'vram';
    END IF;
    RETURN NULL;
END $$;

-- Return the models that have claimable jobs. Each is found by one step in the index, however many jobs wait.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_queued() RETURNS SETOF text
LANGUAGE plpgsql STABLE
{by_index()} AS $$
BEGIN
    RETURN QUERY WITH RECURSIVE line (model) AS (
        (SELECT j.required_model FROM workflow_node_jobs j
          WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
            AND j.required_model IS NOT NULL
          ORDER BY j.required_model LIMIT 1)
        UNION ALL
        SELECT (SELECT j.required_model FROM workflow_node_jobs j
                 WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
                   AND j.required_model > line.model
                 ORDER BY j.required_model LIMIT 1)
          FROM line WHERE line.model IS NOT NULL)
    SELECT line.model FROM line WHERE line.model IS NOT NULL;
END $$;

-- Return the models of which a worker can take jobs: the models that it knows. For a worker that registers
-- none: the models that wait and that no live worker knows.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_can(p_host text, p_models text[], p_vram_mb integer)
RETURNS text[] LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_models text[] := p_models;
    v_known  text[];
BEGIN
    IF p_models IS NULL THEN  -- the answer of gpu_misfit() for each, found at once
        v_known := ARRAY(SELECT unnest(l.known_models) FROM queue_workflows_gpu_live() l);
        v_models := ARRAY(SELECT q.model FROM queue_workflows_gpu_queued() AS q (model)
                           WHERE (q.model = ANY (v_known)) IS NOT TRUE);
    END IF;
    RETURN ARRAY(SELECT m.model FROM unnest(v_models) AS m (model)
                  WHERE queue_workflows_gpu_misfit(p_host, v_models, p_vram_mb, m.model) IS NULL);
END $$;

-- Return the models that wait and that no live worker takes: the model ('' stands for jobs without one), the
-- reason in a word (no_worker, off, vram, model), and in a sentence, which names the largest GPU of the
-- workers that know the model.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_unserved()
RETURNS TABLE (model text, reason text, detail text) LANGUAGE sql STABLE AS $$
    WITH live AS MATERIALIZED (SELECT * FROM queue_workflows_gpu_live()),
    waiting AS MATERIALIZED (
        SELECT l.model FROM queue_workflows_gpu_queued() AS q (model)
         CROSS JOIN LATERAL queue_workflows_gpu_line(q.model) l
        UNION ALL SELECT l.model FROM queue_workflows_gpu_line('') l),
    judged AS (
        SELECT w.model, l.host_label, l.vram_total_mb, l.is_serving,
               queue_workflows_gpu_misfit(l.host_label, l.known_models, l.vram_total_mb, w.model) AS misfit,
               queue_workflows_gpu_needs(l.host_label, w.model) AS needs_gb
          FROM waiting w LEFT JOIN live l ON true),
    reported AS (
        SELECT j.model, count(j.host_label) AS alive,
               max(j.vram_total_mb) FILTER (WHERE j.misfit = 'vram') AS vram_mb,
               max(j.needs_gb) FILTER (WHERE j.misfit = 'vram') AS needs_gb,
               bool_or(j.misfit IS NULL AND j.is_serving) AS is_served,
               string_agg(DISTINCT j.host_label, ', ' ORDER BY j.host_label)
                   FILTER (WHERE j.misfit IS NULL) AS off,
               bool_or(j.misfit = 'vram') AS is_large
          FROM judged j GROUP BY j.model)
    SELECT t.model,
           CASE WHEN t.alive = 0 THEN 'no_worker' WHEN t.off IS NOT NULL THEN 'off'
                WHEN t.is_large THEN 'vram' ELSE 'model' END,
           CASE WHEN t.alive = 0 THEN 'no gpu worker is alive'
                WHEN t.off IS NOT NULL THEN 'every machine that can take it is off: ' || t.off
                WHEN t.is_large THEN format('it needs %s GB, and the largest GPU that may load it has %s GB',
                                            t.needs_gb, t.vram_mb / 1000)
                ELSE 'no live gpu worker knows the model' END
      FROM reported t WHERE t.is_served IS NOT TRUE
$$;
