-- The gpu job that a worker claims.

-- Lock the job to claim of a model ('' stands for jobs without one) and return its id, or NULL: the first of the
-- best priority, the newest of priority `p_band`, or the oldest up to `p_seq`.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_take(
    p_model text, p_how text, p_band smallint, p_seq bigint, p_versions text[] DEFAULT NULL)
RETURNS text LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    v_id text;
BEGIN
    IF p_how = 'oldest' AND p_model = '' THEN
        {gpu_job(j.required_model IS NULL AND j.seq <= p_seq, j.required_model, j.seq)}
    ELSIF p_how = 'oldest' THEN
        {gpu_job(j.required_model BETWEEN p_model AND p_model AND j.seq <= p_seq, j.required_model, j.seq)}
    ELSIF p_how = 'newest' AND p_model = '' THEN
        {gpu_job(j.required_model IS NULL AND j.priority BETWEEN p_band AND p_band, j.required_model DESC, j.priority DESC, j.seq DESC)}
    ELSIF p_how = 'newest' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE {for_gpu(j)}
           AND (j.required_model, j.priority) >= (p_model, p_band) AND (j.required_model, j.priority) <= (p_model, p_band)
         ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_model = '' THEN
        {gpu_job(j.required_model IS NULL, j.required_model, j.priority, j.seq)}
    ELSE
        {gpu_job(j.required_model BETWEEN p_model AND p_model, j.required_model, j.priority, j.seq)}
    END IF;
    RETURN v_id;
END $$;

-- Lock the gpu job to claim and return its id, or NULL. `p_models` is NULL if the caller registers no model. A worker
-- that registers none leaves each model to the workers that know it; a caller without a row in `workers` takes any model.
CREATE OR REPLACE FUNCTION queue_workflows_pick_gpu(
    p_worker text, p_host text, p_model text, p_models text[], p_newest boolean,
    p_policy text, p_grace_s double precision, p_bound_s double precision, p_versions text[] DEFAULT NULL)
RETURNS text LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    v_vram   integer;
    v_models text[];
    v_band   smallint;
    v_choice text;
    v_seq    bigint;
    v_how    text;
    v_id     text;
BEGIN
    SELECT w.vram_total_mb INTO v_vram FROM workers w WHERE w.worker_id = p_worker;
    v_models := array_append(CASE WHEN p_models IS NULL AND NOT FOUND
                                  THEN ARRAY(SELECT queue_workflows_gpu_queued())
                                  ELSE queue_workflows_gpu_can(p_host, p_models, v_vram) END, '');
    WHILE cardinality(v_models) > 0 LOOP
        SELECT n.model, n.how, n.band, n.seq INTO v_choice, v_how, v_band, v_seq
          FROM queue_workflows_gpu_next(
                   p_worker, p_host, p_model, v_models, p_newest, p_policy, p_grace_s, p_bound_s,
                   p_versions) n;
        IF v_choice IS NULL THEN
            RETURN NULL;
        END IF;
        v_id := queue_workflows_gpu_take(v_choice, v_how, v_band, v_seq, p_versions);
        IF v_id IS NULL AND v_how = 'newest' THEN
            v_id := queue_workflows_gpu_take(v_choice, 'first', NULL, NULL, p_versions);
        END IF;
        IF v_id IS NOT NULL THEN
            RETURN v_id;
        END IF;
        -- Other transactions have locked all jobs of this model.
        v_models := array_remove(v_models, v_choice);
    END LOOP;
    RETURN NULL;
END $$;
