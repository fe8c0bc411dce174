-- Mends of the gpu claim: a job left of a run that is over stands for its line no more; a worker that registers
-- no model leaves each model to those that know it; an empty model is none.

-- The gpu workers that live. known_models NULL: it registers none. is_serving: it is not switched off. A host
-- whose last sign of life is a heartbeat of its own, as a worker of 0.3.0 gives it, counts as one.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_live()
RETURNS TABLE (host_label text, known_models text[], vram_total_mb integer, is_serving boolean)
LANGUAGE sql STABLE AS $$
    SELECT w.host_label, w.known_models, w.vram_total_mb, w.state IN ('idle', 'busy', 'throttled')
      FROM workers w
     WHERE w.queue = 'gpu' AND w.state NOT IN ('stopped', 'dead')
       AND w.last_seen > now() - interval '30 seconds'
    UNION ALL
    SELECT h.host_label, nullif(h.known_models, '{}'), h.vram_total_mb, true
      FROM worker_heartbeats h
     WHERE h.queue = 'gpu' AND h.last_seen > now() - interval '30 seconds'
       AND NOT EXISTS (SELECT FROM workers w
                        WHERE w.host_label = h.host_label AND w.queue = 'gpu'
                          AND (w.last_seen >= h.last_seen
                               OR w.last_seen > now() - interval '30 seconds'
                                  AND w.state NOT IN ('stopped', 'dead')))
$$;

-- Why a worker cannot take jobs of a model: 'model' (it does not know it, or registers none and another live
-- worker knows it), 'vram' (its card is too small); NULL: it can. A GB counts 1000 MB, so that what needs 24 GB
-- fits the card that is sold as one of 24.
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

-- As in 0020, here and above in a language that keeps its plans.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_queued() RETURNS SETOF text
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
BEGIN
    RETURN QUERY WITH RECURSIVE line (model) AS (
        (SELECT j.required_model FROM workflow_node_jobs j
          WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
            AND j.required_model IS NOT NULL
          ORDER BY j.required_model LIMIT 1)
        UNION ALL
        SELECT (SELECT j.required_model FROM workflow_node_jobs j
                 WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
                   AND j.required_model > line.model
                 ORDER BY j.required_model LIMIT 1)
          FROM line WHERE line.model IS NOT NULL)
    SELECT line.model FROM line WHERE line.model IS NOT NULL;
END $$;

-- As in 0020, and what no live worker knows for one that registers none.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_can(p_host text, p_models text[], p_vram_mb integer)
RETURNS text[] LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_models text[] := p_models;
    v_known  text[];
BEGIN
    IF p_models IS NULL THEN  -- what misfit() says of each, found at once
        v_known := ARRAY(SELECT unnest(l.known_models) FROM queue_workflows_gpu_live() l);
        v_models := ARRAY(SELECT q.model FROM queue_workflows_gpu_queued() AS q (model)
                           WHERE (q.model = ANY (v_known)) IS NOT TRUE);
    END IF;
    RETURN ARRAY(SELECT m.model FROM unnest(v_models) AS m (model)
                  WHERE queue_workflows_gpu_misfit(p_host, v_models, p_vram_mb, m.model) IS NULL);
END $$;

-- The line of a model, or of the jobs that name none (''), of runs that are not over; no row when nothing waits.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_line(p_model text)
RETURNS SETOF queue_workflows_gpu_line LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_incremental_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_priority smallint;
    v_seq      bigint;
    v_at       timestamptz;
    v_oldest   bigint;
    v_since    timestamptz;
BEGIN
    IF p_model = '' THEN
        SELECT j.priority, j.seq, j.created_at INTO v_priority, v_seq, v_at FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model IS NULL
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1;
        SELECT j.seq, j.created_at INTO v_oldest, v_since FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model IS NULL
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.required_model, j.seq LIMIT 1;
    ELSE
        SELECT j.priority, j.seq, j.created_at INTO v_priority, v_seq, v_at FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model BETWEEN p_model AND p_model
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1;
        SELECT j.seq, j.created_at INTO v_oldest, v_since FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model BETWEEN p_model AND p_model
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.required_model, j.seq LIMIT 1;
    END IF;
    IF v_seq IS NOT NULL THEN
        RETURN QUERY SELECT p_model, v_priority, v_seq,
            queue_workflows_age_s(v_at), v_oldest,
            queue_workflows_age_s(v_since);
    END IF;
END $$;

-- As in 0020, of runs that are not over.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_weigh(
    p_fleet queue_workflows_gpu_holder[], p_host text, p_model text,
    OUT jobs integer, OUT waited_s double precision, OUT load_s double precision,
    OUT run_s double precision, OUT reach_s double precision, OUT is_left boolean)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_incremental_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_jobs   integer;
    v_waited float8;
BEGIN
    SELECT count(*), coalesce(sum(queue_workflows_age_s(w.created_at)), 0)
      INTO v_jobs, v_waited
      FROM (SELECT j.created_at FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.required_model BETWEEN p_model AND p_model
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
             ORDER BY j.required_model, j.priority, j.seq LIMIT 16) w;
    jobs := v_jobs;
    waited_s := v_waited;
    SELECT t.load_s, t.run_s INTO load_s, run_s FROM queue_workflows_gpu_times(p_host, p_model) t;
    reach_s := queue_workflows_gpu_reach(p_fleet, p_model, jobs);
    is_left := jobs < 16 AND coalesce(reach_s <= 3 * load_s, false);
END $$;

-- As in 0020, of runs that are not over.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_next(
    p_worker text, p_host text, p_model text, p_models text[], p_newest boolean,
    p_policy text, p_grace_s double precision, p_bound_s double precision,
    OUT model text, OUT how text, OUT band smallint, OUT seq bigint, OUT why text)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_incremental_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_choice text;
    v_band   smallint;
    v_place  bigint;
BEGIN
    how := CASE WHEN p_newest THEN 'newest' ELSE 'first' END;
    IF p_policy = 'balanced' THEN
        SELECT c.model, c.seq, c.why INTO model, seq, why
          FROM queue_workflows_gpu_choose(
                   p_worker, p_host, p_model, p_models, p_newest, p_grace_s, p_bound_s) c;
        IF why = 'overdue' THEN
            how := 'oldest';
        ELSIF p_newest THEN
            SELECT l.priority INTO band FROM queue_workflows_gpu_line(model) l;
        END IF;
        RETURN;
    END IF;
    -- Heads of each line, best first.
    SELECT head.model, head.priority, head.place INTO v_choice, v_band, v_place
      FROM (SELECT m.model, j.priority,
                   CASE WHEN NOT p_newest THEN j.seq
                        WHEN m.model <> '' THEN -(
                            SELECT k.seq FROM workflow_node_jobs k
                             WHERE (k.required_model, k.priority) >= (m.model, j.priority)
                               AND (k.required_model, k.priority) <= (m.model, j.priority)
                               AND k.queue = 'gpu' AND k.status = 'queued'
                               AND k.blocked_reason IS NULL
                               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = k.run_id
                                           AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
                             ORDER BY k.required_model DESC, k.priority DESC, k.seq DESC LIMIT 1)
                        ELSE -(
                            SELECT k.seq FROM workflow_node_jobs k
                             WHERE k.required_model IS NULL AND k.priority BETWEEN j.priority AND j.priority
                               AND k.queue = 'gpu' AND k.status = 'queued'
                               AND k.blocked_reason IS NULL
                               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = k.run_id
                                           AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
                             ORDER BY k.required_model DESC, k.priority DESC, k.seq DESC LIMIT 1) END AS place
              FROM unnest(p_models) AS m(model)
             CROSS JOIN LATERAL (
                   (SELECT k.priority, k.seq FROM workflow_node_jobs k
                     WHERE m.model <> '' AND k.required_model BETWEEN m.model AND m.model
                       AND k.queue = 'gpu' AND k.status = 'queued' AND k.blocked_reason IS NULL
                       AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = k.run_id
                                   AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
                     ORDER BY k.required_model, k.priority, k.seq LIMIT 1)
                   UNION ALL
                   (SELECT k.priority, k.seq FROM workflow_node_jobs k
                     WHERE m.model = '' AND k.required_model IS NULL AND k.queue = 'gpu'
                       AND k.status = 'queued' AND k.blocked_reason IS NULL
                       AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = k.run_id
                                   AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
                     ORDER BY k.required_model, k.priority, k.seq LIMIT 1)) j) head
     ORDER BY head.priority, (head.model <> coalesce(p_model, '')), head.place LIMIT 1;
    model := v_choice;
    band := v_band;
    seq := abs(v_place);
    why := CASE WHEN v_choice = p_model THEN 'warm' ELSE 'first' END;
END $$;

-- As in 0020, and the heads are of runs that are not over, an overflow host takes the newest of its warm line,
-- and a worker that registers no model leaves to others what they know.
CREATE OR REPLACE FUNCTION queue_workflows_pick_gpu(
    p_worker text, p_host text, p_model text, p_models text[], p_newest boolean,
    p_policy text, p_grace_s double precision, p_bound_s double precision)
RETURNS text LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_incremental_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_vram   integer;
    v_told   boolean;
    v_models text[];
    v_band   smallint;
    v_choice text;
    v_seq    bigint;
    v_how    text;
    v_id     text;
BEGIN
    SELECT w.vram_total_mb INTO v_vram FROM workers w WHERE w.worker_id = p_worker;
    v_told := FOUND;
    IF p_policy <> 'balanced' AND p_models IS NULL AND v_vram IS NULL
       AND NOT (v_told AND EXISTS (SELECT FROM queue_workflows_gpu_live() l
                                    WHERE l.known_models IS NOT NULL)) THEN
        SELECT j.priority INTO v_band FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.priority, j.seq LIMIT 1;
        IF v_band IS NULL THEN
            RETURN NULL;
        END IF;
        IF p_model IS NOT NULL AND p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND (j.required_model, j.priority) >= (p_model, v_band)
               AND (j.required_model, j.priority) <= (p_model, v_band)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
             ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        ELSIF p_model IS NOT NULL THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND (j.required_model, j.priority) >= (p_model, v_band)
               AND (j.required_model, j.priority) <= (p_model, v_band)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
             ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        ELSIF p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.required_model IS NULL AND j.priority BETWEEN v_band AND v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
             ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        ELSE
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.required_model IS NULL AND j.priority BETWEEN v_band AND v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
             ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NULL AND p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.priority = v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
             ORDER BY j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NULL THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
             ORDER BY j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        RETURN v_id;
    END IF;

    -- A host that claims by itself and names no models takes any; nothing else is known of it.
    v_models := array_append(CASE WHEN p_models IS NULL AND NOT v_told
                                  THEN ARRAY(SELECT queue_workflows_gpu_queued())
                                  ELSE queue_workflows_gpu_can(p_host, p_models, v_vram) END, '');
    WHILE cardinality(v_models) > 0 LOOP
        SELECT n.model, n.how, n.band, n.seq INTO v_choice, v_how, v_band, v_seq
          FROM queue_workflows_gpu_next(
                   p_worker, p_host, p_model, v_models, p_newest, p_policy, p_grace_s, p_bound_s) n;
        IF v_choice IS NULL THEN
            RETURN NULL;
        END IF;
        v_id := queue_workflows_gpu_take(v_choice, v_how, v_band, v_seq);
        IF v_id IS NULL AND v_how = 'newest' THEN
            v_id := queue_workflows_gpu_take(v_choice, 'first', NULL, NULL);
        END IF;
        IF v_id IS NOT NULL THEN
            RETURN v_id;
        END IF;
        -- Others have locked all of it.
        v_models := array_remove(v_models, v_choice);
    END LOOP;
    RETURN NULL;
END $$;

-- As in 0020, and the card that is named is one of a worker that knows the model.
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
    told AS (
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
                WHEN t.off IS NOT NULL THEN 'every box that can take it is off: ' || t.off
                WHEN t.is_large THEN format('it needs %s GB, and the largest card that may load it has %s GB',
                                            t.needs_gb, t.vram_mb / 1000)
                ELSE 'no live gpu worker knows the model' END
      FROM told t WHERE t.is_served IS NOT TRUE
$$;

-- As in 0017, within bounds, and an empty model is none, as for the functions above.
CREATE OR REPLACE FUNCTION queue_workflows_hold_until_due() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.claim_no NOT BETWEEN 0 AND 1000000000 OR NEW.seq NOT BETWEEN 1 AND 1000000000000000
       OR greatest(NEW.attempts, NEW.max_attempts, NEW.crash_count, NEW.watchdog_retries, NEW.generation) > 1000000
       OR least(NEW.attempts, NEW.max_attempts, NEW.crash_count, NEW.watchdog_retries, NEW.generation) < 0
       OR NEW.timeout_s <= 0 OR NEW.timeout_s > 31622400 OR NEW.seconds NOT BETWEEN -1e12 AND 1e12
       OR greatest(NEW.created_at, NEW.available_at, NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at,
                   NEW.finished_at, NEW.cancel_requested_at) > '9999-12-31+00'
       OR least(NEW.created_at, NEW.available_at, NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at,
                NEW.finished_at, NEW.cancel_requested_at) < '2000-01-01+00'
       OR greatest(octet_length(NEW.id), octet_length(NEW.run_id), octet_length(NEW.node_id),
                   octet_length(NEW.node_module), octet_length(NEW.pipeline_name), octet_length(NEW.lock_key),
                   octet_length(NEW.required_model), octet_length(NEW.claimed_by),
                   octet_length(NEW.worker_id)) > 1000 THEN
        PERFORM queue_workflows_refuse(TG_TABLE_NAME::text, NULL, to_jsonb(NEW));
    END IF;
    IF NEW.status = 'running' THEN
        -- As a plain UPDATE to `running` is treated; a lease without an end would keep its lock key for ever.
        IF NEW.lease_expires_at > now() + interval '7 days' THEN
            RAISE EXCEPTION 'workflow_node_jobs.lease_expires_at of a running job is over 7 days ahead'
                USING ERRCODE = 'check_violation', HINT = 'Insert the job as queued; a worker claims it.';
        END IF;
        NEW.claim_no := greatest(NEW.claim_no, 1);
        NEW.worker_id := coalesce(NEW.worker_id, 'legacy:' || coalesce(NEW.claimed_by, 'unknown'));
        NEW.lease_expires_at := coalesce(NEW.lease_expires_at, now() + interval '600 seconds');
    ELSIF coalesce(NEW.worker_id, NEW.lease_expires_at::text) IS NOT NULL THEN
        NEW.worker_id := NULL;
        NEW.lease_expires_at := NULL;
    END IF;
    IF NEW.required_model = '' THEN
        NEW.required_model := NULL;
    END IF;
    IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    IF NEW.lock_key IS NOT NULL AND NEW.status = 'queued' THEN
        IF NEW.blocked_reason IS NULL THEN
            NEW.blocked_reason := 'locked';
        END IF;
        PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
    END IF;
    RETURN NEW;
END $$;

CREATE OR REPLACE FUNCTION queue_workflows_no_empty_model() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.required_model := nullif(NEW.required_model, '');
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS workflow_node_jobs_model ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_model BEFORE UPDATE OF required_model ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_no_empty_model();
UPDATE workflow_node_jobs SET required_model = NULL WHERE required_model = '';
