-- Finish and claim node jobs: one call of a worker is one transaction and one round trip. Planner settings hold
-- each query to its index, whatever the statistics say (decision 0019).

-- Record the completed node `p_job` (NULL: none), then claim one node; return it as JSON, whose `context` holds
-- the outputs that its template names, or NULL if nothing is claimable. SQLSTATE QW001: the finished claim was
-- lost, and nothing was written. `p_next` and `p_end` are what the worker knows to follow from its node: rows of
-- a plan, the end of the run. They are applied only if the run is live, in generation `p_generation`, and not
-- locked by another transaction; then the outbox event is inserted as processed. A completed gpu node also
-- updates the average run time of its model.
CREATE OR REPLACE FUNCTION queue_workflows_node_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim boolean, p_obey boolean, p_promote boolean, p_newest boolean,
    p_model text, p_models text[], p_lane smallint,
    p_job text, p_claim_no bigint, p_delta jsonb, p_seconds double precision, p_rss integer,
    p_resolved jsonb, p_generation integer, p_next jsonb, p_end boolean,
    p_policy text DEFAULT 'strict', p_grace_s double precision DEFAULT 300,
    p_bound_s double precision DEFAULT 2400)
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
               finished_at = now(), worker_id = NULL, lease_expires_at = NULL,
               progress = CASE WHEN jsonb_typeof(progress) IN ('object', 'string') THEN progress ELSE '1' END
         WHERE id = p_job AND (worker_id IS NOT DISTINCT FROM p_worker AND claim_no = p_claim_no
                               AND status = 'running') IS TRUE
        RETURNING run_id, node_id, generation, attempts, claimed_by, queue, required_model, started_at
          INTO v_old;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'claim % of job % is no longer held', p_claim_no, p_job
                USING ERRCODE = 'QW001';
        END IF;
        IF v_old.required_model IS NOT NULL THEN
            PERFORM queue_workflows_learn(v_old.claimed_by, v_old.required_model, NULL, greatest(0, p_seconds - (
                SELECT coalesce(sum(e.elapsed_s), 0) FROM workflow_node_events e
                 WHERE e.run_id = v_old.run_id AND e.node_id = v_old.node_id AND e.job_id = p_job
                   AND e.event_type = 'model_load_done' AND e.created_at >= v_old.started_at)));
        END IF;
        IF p_generation IS NOT NULL THEN
            PERFORM FROM workflow_runs
              WHERE id = v_old.run_id AND generation = p_generation AND mode = 'node'
                AND status <> 'queued' AND NOT queue_workflows_is_terminal_run(status)
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
             WHERE j.id = ANY (ARRAY(SELECT d.id FROM due d));
        END IF;
        IF p_queue = 'gpu' THEN
            v_id := queue_workflows_pick_gpu(p_worker, p_host, p_model, p_models, p_newest,
                                             p_policy, p_grace_s, p_bound_s);
        ELSIF p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND j.priority = (SELECT k.priority FROM workflow_node_jobs k
                                  WHERE k.queue = p_queue AND queue_workflows_is_claimable(k.status, k.blocked_reason)
                                  ORDER BY k.priority, k.seq LIMIT 1)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
             ORDER BY j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        -- An overflow host finds no job of its priority if all are locked or belong to ended runs.
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
                                   AND queue_workflows_is_off(c.desired_state, c.until_at)) THEN NULL
                           WHEN v_id IS NOT NULL OR p_queue = 'gpu' THEN v_id
                           ELSE (SELECT q.id FROM workflow_node_jobs q
                                  WHERE q.queue = p_queue AND queue_workflows_is_claimable(q.status, q.blocked_reason)
                                    AND EXISTS (SELECT FROM workflow_runs o WHERE o.id = q.run_id
                                                AND NOT queue_workflows_is_terminal_run(o.status) OFFSET 0)
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
        VALUES (v_old.run_id, v_old.node_id, p_job, greatest(0, least(v_old.attempts, 32767)), 'completed', v_old.claimed_by,
                v_old.queue, v_old.required_model, p_seconds, p_worker, p_claim_no);
    END IF;
    IF v_new.id IS NULL THEN
        RETURN NULL;
    END IF;
    INSERT INTO workflow_node_events
           (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, worker_id, claim_no)
    VALUES (v_new.run_id, v_new.node_id, v_new.id, greatest(0, least(v_new.attempts, 32767)), 'claimed', p_host, v_new.queue,
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

-- Do for several nodes of one worker what queue_workflows_node_step() does for one: record the completed nodes
-- `p_done`, then claim up to `p_claim` nodes of a cpu queue; return one JSON document for each of these.
CREATE OR REPLACE FUNCTION queue_workflows_nodes_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim integer, p_obey boolean, p_promote boolean, p_newest boolean, p_done jsonb)
RETURNS SETOF json LANGUAGE plpgsql AS $$
DECLARE
    v_done record;
    v_job  json;
BEGIN
    FOR v_done IN
        SELECT * FROM jsonb_to_recordset(p_done) AS d (
            id text, claim_no bigint, result jsonb, seconds float8, rss_mb integer, received jsonb,
            generation integer, rows jsonb, complete boolean)
    LOOP
        PERFORM queue_workflows_node_step(
            p_worker, p_host, p_queue, p_lease_s, false, p_obey, false, p_newest, NULL, NULL, NULL,
            v_done.id, v_done.claim_no, v_done.result, v_done.seconds, v_done.rss_mb, v_done.received,
            v_done.generation, v_done.rows, v_done.complete);
    END LOOP;
    FOR v_number IN 1 .. p_claim LOOP
        v_job := queue_workflows_node_step(
            p_worker, p_host, p_queue, p_lease_s, true, p_obey, p_promote AND v_number = 1, p_newest,
            NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
        EXIT WHEN v_job IS NULL;
        RETURN NEXT v_job;
    END LOOP;
END $$;
