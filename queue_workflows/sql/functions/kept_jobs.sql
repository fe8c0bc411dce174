-- Jobs that are kept for a host: their handlers have begun a wait there, and it is over. Until `resume_until`, which is their
-- `available_at`, only workers of that host claim them. Then they are due for everybody, as any delayed job.

-- Return until when a job is kept whose wait ends now, or NULL if it is not kept.
CREATE OR REPLACE FUNCTION queue_workflows_kept_until(
    p_available_at timestamptz, p_resume_at timestamptz, p_resume_until timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN p_resume_until = p_available_at AND p_resume_at < p_resume_until
                THEN now() + least(p_resume_until - p_resume_at, interval '1 day') END
$$;

-- Lock up to `p_most` ingest jobs that are kept for a host and return their ids, the best priority first. Jobs that wait
-- behind a better priority stay where they are. A job that may have killed its worker is returned only alone.
CREATE OR REPLACE FUNCTION queue_workflows_kept_jobs(p_host text, p_queue text, p_most integer) RETURNS text[]
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_band smallint;
    v_id   text;
    v_ids  text[] := '{}';
    v_job  record;
BEGIN
    SELECT j.priority INTO v_band FROM ingest_jobs j
     WHERE j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
     ORDER BY j.priority, j.seq LIMIT 1;
    FOR v_job IN
        SELECT k.id, k.crash_count
          FROM (SELECT i.id, i.priority, i.seq, greatest(i.crash_count, i.lapse_count) AS crash_count, i.partition_key FROM ingest_jobs i
                 WHERE i.resume_host = p_host AND i.queue = p_queue AND i.resume_at <= now()
                   AND i.status = 'queued' AND i.blocked_reason = 'not_due' AND i.resume_until = i.available_at
                   AND i.lock_key IS NULL
                 ORDER BY i.resume_host, i.queue, i.resume_at LIMIT 100) k
         WHERE k.priority <= coalesce(v_band, k.priority)
           AND (k.partition_key IS NULL OR NOT EXISTS (
                SELECT FROM queue_partition_limits l WHERE l.queue = p_queue OFFSET 0))
         ORDER BY k.priority, k.seq
    LOOP
        CONTINUE WHEN v_job.crash_count > 0 AND v_ids <> '{}';
        SELECT j.id INTO v_id FROM ingest_jobs j
         WHERE j.id = v_job.id
           AND (j.status = 'queued' AND j.blocked_reason = 'not_due' AND j.resume_until = j.available_at
                AND j.resume_host = p_host AND j.queue = p_queue AND j.resume_at <= now()
                AND j.lock_key IS NULL) IS TRUE
           FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        v_ids := v_ids || v_id;
        EXIT WHEN cardinality(v_ids) >= p_most OR v_job.crash_count > 0;
    END LOOP;
    RETURN v_ids;
END $$;

-- Do the same for nodes that this worker can run. `p_other`: the id of the job that it would claim instead; NULL: the first
-- of those without a version. Jobs that wait behind a better priority than that job's stay where they are.
CREATE OR REPLACE FUNCTION queue_workflows_kept_nodes(
    p_worker text, p_host text, p_queue text, p_other text, p_models text[], p_versions text[], p_most integer)
RETURNS text[] LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_any  boolean := true;  -- whether a model matters
    v_vram integer;
    v_band smallint;
    v_id   text;
    v_ids  text[] := '{}';
    v_job  record;
BEGIN
    IF p_other IS NOT NULL THEN
        SELECT j.priority INTO v_band FROM workflow_node_jobs j WHERE j.id = p_other;
    ELSIF p_queue <> 'gpu' THEN
        SELECT j.priority INTO v_band FROM workflow_node_jobs j
         WHERE j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND j.required_version IS NULL
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_version, j.priority, j.seq LIMIT 1;
    END IF;
    IF p_queue = 'gpu' THEN
        SELECT w.vram_total_mb INTO v_vram FROM workers w WHERE w.worker_id = p_worker;
        v_any := NOT FOUND AND p_models IS NULL;
    END IF;
    FOR v_job IN
        SELECT k.id, k.required_model, k.crash_count
          FROM (SELECT i.id, i.priority, i.seq, i.run_id, i.required_model, i.required_version, greatest(i.crash_count, i.lapse_count) AS crash_count
                  FROM workflow_node_jobs i
                 WHERE i.resume_host = p_host AND i.queue = p_queue AND i.resume_at <= now()
                   AND i.status = 'queued' AND i.blocked_reason = 'not_due' AND i.resume_until = i.available_at
                   AND i.lock_key IS NULL
                 ORDER BY i.resume_host, i.queue, i.resume_at LIMIT 100) k
         WHERE k.priority <= coalesce(v_band, k.priority)
           AND (k.required_version IS NULL OR k.required_version = ANY (p_versions))
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = k.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY k.priority, k.seq
    LOOP
        CONTINUE WHEN v_job.crash_count > 0 AND v_ids <> '{}';
        CONTINUE WHEN p_queue = 'gpu' AND NOT v_any
                  AND queue_workflows_gpu_misfit(p_host, p_models, v_vram, v_job.required_model) IS NOT NULL;
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.id = v_job.id
           AND (j.status = 'queued' AND j.blocked_reason = 'not_due' AND j.resume_until = j.available_at
                AND j.resume_host = p_host AND j.queue = p_queue AND j.resume_at <= now()
                AND j.lock_key IS NULL) IS TRUE
           FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        v_ids := v_ids || v_id;
        EXIT WHEN cardinality(v_ids) >= p_most OR v_job.crash_count > 0;
    END LOOP;
    RETURN v_ids;
END $$;
