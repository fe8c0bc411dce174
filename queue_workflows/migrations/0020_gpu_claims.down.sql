DROP FUNCTION IF EXISTS queue_workflows_node_step(
    text, text, text, double precision, boolean, boolean, boolean, boolean, text, text[], smallint, text,
    bigint, jsonb, double precision, integer, jsonb, integer, jsonb, boolean,
    text, double precision, double precision);
DROP FUNCTION IF EXISTS queue_workflows_pick_gpu(
    text, text, text, text[], boolean, text, double precision, double precision);
DELETE FROM workflow_node_events WHERE event_type IN ('unassignable', 'assignable');
ALTER DOMAIN queue_workflows_node_event DROP CONSTRAINT queue_workflows_node_event_check;
ALTER DOMAIN queue_workflows_node_event ADD CONSTRAINT queue_workflows_node_event_check CHECK (VALUE IN (
    'claimed', 'model_load_start', 'model_load_done', 'progress_beat', 'stall_suspected',
    'stall_trip', 'gpu_health_trip', 'budget_trip', 'requeued', 'reassigned', 'lease_renew',
    'completed', 'failed', 'cancelled', 'error',
    'parked', 'reclaimed', 'retried', 'skipped', 'death'));
DROP TABLE IF EXISTS gpu_unassignable;
DROP FUNCTION IF EXISTS queue_workflows_gpu_unserved();
DROP FUNCTION IF EXISTS queue_workflows_gpu_take(text, text, smallint, bigint);
DROP FUNCTION IF EXISTS queue_workflows_gpu_next(
    text, text, text, text[], boolean, text, double precision, double precision);
DROP FUNCTION IF EXISTS queue_workflows_gpu_choose(
    text, text, text, text[], boolean, double precision, double precision);
DROP FUNCTION IF EXISTS queue_workflows_gpu_is_held(queue_workflows_gpu_holder[], text, text, double precision);
DROP FUNCTION IF EXISTS queue_workflows_gpu_weigh(queue_workflows_gpu_holder[], text, text);
DROP FUNCTION IF EXISTS queue_workflows_gpu_line(text);
DROP TYPE IF EXISTS queue_workflows_gpu_line;
DROP FUNCTION IF EXISTS queue_workflows_gpu_reach(queue_workflows_gpu_holder[], text, integer);
DROP FUNCTION IF EXISTS queue_workflows_gpu_fleet(text);
DROP TYPE IF EXISTS queue_workflows_gpu_holder;
DROP FUNCTION IF EXISTS queue_workflows_gpu_can(text, text[], integer);
DROP FUNCTION IF EXISTS queue_workflows_gpu_queued();
DROP FUNCTION IF EXISTS queue_workflows_gpu_misfit(text, text[], integer, text);
DROP FUNCTION IF EXISTS queue_workflows_gpu_needs(text, text);
DROP FUNCTION IF EXISTS queue_workflows_gpu_times(text, text);
DROP FUNCTION IF EXISTS queue_workflows_learn(text, text, double precision, double precision);
DROP FUNCTION IF EXISTS queue_workflows_age_s(timestamptz);
-- The gpu job to claim, locked, or NULL. Best priority band first; inside it the warm model, then age
-- (an overflow host: newest first). p_models NULL: whatever model.
CREATE OR REPLACE FUNCTION queue_workflows_pick_gpu(p_model text, p_models text[], p_newest boolean)
RETURNS text LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_models text[] := p_models;
    v_band   smallint;
    v_choice text;
    v_found  boolean;
    v_id     text;
BEGIN
    IF v_models IS NULL THEN
        SELECT j.priority INTO v_band FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
         ORDER BY j.priority, j.seq LIMIT 1;
        IF v_band IS NULL THEN
            RETURN NULL;
        END IF;
        IF p_model IS NOT NULL THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.required_model = p_model AND j.priority = v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NULL AND p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.priority = v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NULL THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        RETURN v_id;
    END IF;

    -- Heads of each line this worker can serve ('' stands for jobs without a model), best first.
    v_models := array_append(v_models, '');
    WHILE cardinality(v_models) > 0 LOOP
        v_found := false;
        SELECT true, head.model, head.priority INTO v_found, v_choice, v_band
          FROM (SELECT m.model, j.priority,
                       CASE WHEN NOT p_newest THEN j.seq
                            WHEN m.model <> '' THEN -(
                                SELECT k.seq FROM workflow_node_jobs k
                                 WHERE k.required_model = m.model AND k.priority = j.priority
                                   AND k.queue = 'gpu' AND k.status = 'queued'
                                   AND k.blocked_reason IS NULL
                                 ORDER BY k.seq DESC LIMIT 1)
                            ELSE -(
                                SELECT k.seq FROM workflow_node_jobs k
                                 WHERE k.required_model IS NULL AND k.priority = j.priority
                                   AND k.queue = 'gpu' AND k.status = 'queued'
                                   AND k.blocked_reason IS NULL
                                 ORDER BY k.seq DESC LIMIT 1) END AS place
                  FROM unnest(v_models) AS m(model)
                 CROSS JOIN LATERAL (
                       (SELECT k.priority, k.seq FROM workflow_node_jobs k
                         WHERE m.model <> '' AND k.required_model = m.model AND k.queue = 'gpu'
                           AND k.status = 'queued' AND k.blocked_reason IS NULL
                         ORDER BY k.priority, k.seq LIMIT 1)
                       UNION ALL
                       (SELECT k.priority, k.seq FROM workflow_node_jobs k
                         WHERE m.model = '' AND k.required_model IS NULL AND k.queue = 'gpu'
                           AND k.status = 'queued' AND k.blocked_reason IS NULL
                         ORDER BY k.priority, k.seq LIMIT 1)) j) head
         ORDER BY head.priority, (head.model IS DISTINCT FROM p_model), head.place LIMIT 1;
        IF v_found IS NOT TRUE THEN
            RETURN NULL;
        END IF;
        IF p_newest AND v_choice = '' THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.required_model IS NULL AND j.priority = v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        ELSIF p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.required_model = v_choice AND j.priority = v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NULL AND v_choice <> '' THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.required_model = v_choice
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        ELSIF v_id IS NULL THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.required_model IS NULL
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NOT NULL THEN
            RETURN v_id;
        END IF;
        v_models := array_remove(v_models, v_choice);
    END LOOP;
    RETURN NULL;
END $$;

-- Returns the claimed job as JSON; its `context` holds what the ref_heads of its template name.
-- NULL: nothing to claim. SQLSTATE QW001: the finished claim was lost, nothing was written.
-- p_job NULL: nothing to finish. p_next and p_end: what the worker knows to follow from its node (rows of
-- a plan, the end of the run); taken only if nobody else holds the run, which is live and in
-- p_generation, and then its event is closed at once.
CREATE OR REPLACE FUNCTION queue_workflows_node_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim boolean, p_obey boolean, p_promote boolean, p_newest boolean,
    p_model text, p_models text[], p_lane smallint,
    p_job text, p_claim_no bigint, p_delta jsonb, p_seconds double precision, p_rss integer,
    p_resolved jsonb, p_generation integer, p_next jsonb, p_end boolean)
RETURNS json LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_id  text;
    v_old record;
    v_new queue_workflows_claimed_node;
    v_ahead boolean := false;
BEGIN
    IF p_job IS NOT NULL THEN
        UPDATE workflow_node_jobs
           SET status = 'completed', context_delta = p_delta, error = NULL, seconds = p_seconds,
               vm_rss_mb_peak = p_rss, resolved_inputs = coalesce(p_resolved, resolved_inputs),
               finished_at = now(), worker_id = NULL, lease_expires_at = NULL
         WHERE id = p_job AND worker_id IS NOT DISTINCT FROM p_worker AND claim_no = p_claim_no
           AND status = 'running'
        RETURNING run_id, node_id, generation, attempts, claimed_by, queue, required_model INTO v_old;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'claim % of job % is no longer held', p_claim_no, p_job
                USING ERRCODE = 'QW001';
        END IF;
        IF p_generation IS NOT NULL THEN
            PERFORM FROM workflow_runs
              WHERE id = v_old.run_id AND generation = p_generation AND mode = 'node'
                AND status NOT IN ('queued', 'completed', 'failed', 'cancelled')
                FOR NO KEY UPDATE SKIP LOCKED;
            v_ahead := FOUND;
        END IF;
        INSERT INTO workflow_dispatch_events
               (run_id, node_id, kind, job_id, claim_no, generation, processed_at)
        VALUES (v_old.run_id, v_old.node_id, 'completed', p_job, p_claim_no, v_old.generation,
                CASE WHEN v_ahead THEN now() END);
        IF v_ahead AND p_next IS NOT NULL THEN
            PERFORM queue_workflows_insert_nodes(v_old.run_id, p_next);
        END IF;
        IF v_ahead AND p_end THEN
            UPDATE workflow_runs
               SET status = 'completed', finished_at = now(), progress_pct = 100, error = NULL,
                   updated_at = now()
             WHERE id = v_old.run_id;
        END IF;
    END IF;
    IF p_claim THEN
        IF p_promote THEN
            WITH due AS MATERIALIZED (
                SELECT j.id FROM workflow_node_jobs j
                 WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL AND j.available_at <= now()
                   AND j.blocked_reason = 'not_due' AND j.queue = p_queue
                 ORDER BY j.available_at LIMIT 100 FOR UPDATE SKIP LOCKED)
            UPDATE workflow_node_jobs j SET blocked_reason = NULL, available_at = NULL
              FROM due WHERE j.id = due.id;
        END IF;
        IF p_queue = 'gpu' THEN
            v_id := queue_workflows_pick_gpu(p_model, p_models, p_newest);
        ELSIF p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = p_queue AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.priority = (SELECT k.priority FROM workflow_node_jobs k
                                  WHERE k.queue = p_queue AND k.status = 'queued' AND k.blocked_reason IS NULL
                                  ORDER BY k.priority, k.seq LIMIT 1)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        -- An overflow host finds its band empty when what is in it is locked, or left of a run that is over.
        UPDATE workflow_node_jobs j
           SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
               host_label = p_host, worker_lane = coalesce(p_lane, j.worker_lane),
               lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
               started_at = now(), available_at = NULL, error = NULL, progress = NULL,
               resolved_inputs = CASE WHEN j.ref_heads = '{}' THEN j.inputs ELSE j.resolved_inputs END
         WHERE j.id = (
               SELECT CASE WHEN p_obey AND EXISTS (
                                SELECT FROM worker_controls c
                                 WHERE c.host_label = p_host AND c.queue IN (p_queue, 'all')
                                   AND c.desired_state = 'off'
                                   AND (c.until_at IS NULL OR c.until_at > now())) THEN NULL
                           WHEN v_id IS NOT NULL OR p_queue = 'gpu' THEN v_id
                           ELSE (SELECT q.id FROM workflow_node_jobs q
                                  WHERE q.queue = p_queue AND q.status = 'queued' AND q.blocked_reason IS NULL
                                    AND EXISTS (SELECT FROM workflow_runs o WHERE o.id = q.run_id
                                                AND o.status NOT IN ('completed', 'failed', 'cancelled'))
                                  ORDER BY q.priority, q.seq LIMIT 1 FOR UPDATE OF q SKIP LOCKED) END)
        RETURNING j.id, j.run_id, j.node_id, j.node_module, j.queue, j.required_model, j.status,
                  j.pipeline_name, j.priority, j.seq, j.claim_no, j.worker_id, j.claimed_by, j.generation,
                  j.attempts, j.max_attempts, j.crash_count, j.watchdog_retries, j.timeout_s, j.inputs,
                  j.input_template, j.ref_heads,
                  (SELECT json_build_object(
                              'id', r.id, 'out_dir', r.out_dir, 'workflow_name', r.workflow_name,
                              'generation', r.generation,
                              'born', queue_workflows_born(r.created_at))
                     FROM workflow_runs r WHERE r.id = j.run_id),
                  NULL::jsonb
          INTO v_new;
    END IF;
    IF p_job IS NOT NULL THEN
        INSERT INTO workflow_node_events
               (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, elapsed_s,
                worker_id, claim_no)
        VALUES (v_old.run_id, v_old.node_id, p_job, v_old.attempts, 'completed', v_old.claimed_by,
                v_old.queue, v_old.required_model, p_seconds, p_worker, p_claim_no);
    END IF;
    IF v_new.id IS NULL THEN
        RETURN NULL;
    END IF;
    INSERT INTO workflow_node_events
           (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, worker_id, claim_no)
    VALUES (v_new.run_id, v_new.node_id, v_new.id, v_new.attempts, 'claimed', p_host, v_new.queue,
            v_new.required_model, p_worker, v_new.claim_no);
    IF v_new.ref_heads <> '{}' THEN
        SELECT coalesce((SELECT jsonb_object_agg(head, r.context -> head)
                           FROM unnest(v_new.ref_heads) head WHERE r.context ? head), '{}')
            || coalesce((SELECT jsonb_object_agg(d.node_id, d.context_delta)
                           FROM workflow_node_jobs d
                          WHERE d.run_id = v_new.run_id AND d.status = 'completed'
                            AND d.node_id = ANY (v_new.ref_heads)), '{}')
          INTO v_new.context FROM workflow_runs r WHERE r.id = v_new.run_id;
    END IF;
    RETURN row_to_json(v_new);
END $$;
DROP INDEX IF EXISTS workflow_node_jobs_age_idx;
DROP TABLE IF EXISTS gpu_models;
ALTER TABLE workers
    DROP COLUMN IF EXISTS current_model, DROP COLUMN IF EXISTS model_since,
    DROP COLUMN IF EXISTS known_models, DROP COLUMN IF EXISTS vram_total_mb;
