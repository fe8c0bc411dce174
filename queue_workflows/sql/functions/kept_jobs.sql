-- Jobs that are kept for a host: their handlers have begun a wait there, and it is over. Until `resume_until`, which is their
-- `available_at`, only workers of that host claim them. Then they are due for everybody, as any delayed job.

-- tables: ingest_jobs workflow_node_jobs
-- Lock up to `p_most` jobs that are kept for a host and that this worker can run; return their ids, the best priority first.
-- `p_other`: the id of the job that it would claim instead; NULL stands for the first job of the queue (of node jobs, the
-- first without a version). Jobs that wait behind a better priority than that job's stay where they are. A job that may have
-- killed its worker is returned only alone.
CREATE OR REPLACE FUNCTION queue_workflows_ingest_kept(
    p_worker text, p_host text, p_queue text, p_other text, p_models text[], p_versions text[], p_most integer)
RETURNS text[] LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    v_any  boolean := true;  -- whether a model matters
    v_vram integer;
    v_band smallint;
    v_id   text;
    v_ids  text[] := '{}';
    v_job  record;
BEGIN
    IF p_other IS NOT NULL THEN
        SELECT j.priority INTO v_band FROM ingest_jobs j WHERE j.id = p_other;
    ELSIF p_queue <> 'gpu' THEN
        SELECT j.priority INTO v_band FROM ingest_jobs j
         WHERE {claimable(j)}
         {first(j)};
    END IF;
    IF p_queue = 'gpu' THEN
        SELECT w.vram_total_mb INTO v_vram FROM workers w WHERE w.worker_id = p_worker;
        v_any := NOT FOUND AND p_models IS NULL;
    END IF;
    FOR v_job IN
        SELECT k.*, {may_kill(k)} AS is_alone
          FROM (SELECT i.* FROM ingest_jobs i
                 WHERE {kept(i)} AND i.resume_at <= now()
                 ORDER BY i.resume_host, i.queue, i.resume_at LIMIT 100) k
         WHERE k.priority <= coalesce(v_band, k.priority)
           AND (k.partition_key IS NULL OR NOT EXISTS (  -- ingest only
                SELECT FROM queue_partition_limits l WHERE l.queue = p_queue OFFSET 0))  -- ingest only
           AND (k.required_version IS NULL OR k.required_version = ANY (p_versions)) AND {live(k)}  -- nodes only
         ORDER BY k.priority, k.seq
    LOOP
        CONTINUE WHEN v_job.is_alone AND v_ids <> '{}';
        CONTINUE WHEN p_queue = 'gpu' AND NOT v_any  -- nodes only
                  AND queue_workflows_gpu_misfit(p_host, p_models, v_vram, v_job.required_model) IS NOT NULL;  -- nodes only
        SELECT j.id INTO v_id FROM ingest_jobs j
         WHERE j.id = v_job.id AND ({kept(j)} AND j.resume_at <= now()) IS TRUE
           FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        v_ids := v_ids || v_id;
        EXIT WHEN cardinality(v_ids) >= p_most OR v_job.is_alone;
    END LOOP;
    RETURN v_ids;
END $$;
