-- Tables that were emptied and filled since are planned as one row until autovacuum counts them, and then a plan
-- that reads all of a table, or of the wrong index, seems to cost no more than the right one. So rows that were
-- picked are met again by id = ANY (ARRAY(...)) or row by row, never by a join; IS TRUE around what else they must
-- be hides that a partial index would do; OFFSET 0 keeps EXISTS from becoming a join; and where two indexes begin
-- alike no part of an order may come from a sort. See docs/decisions/0019.

-- As in 0017.
CREATE OR REPLACE FUNCTION queue_workflows_give_turns(p_jobs text, p_keys text[]) RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_incremental_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_count bigint;
BEGIN
    EXECUTE format($q$
        WITH behind AS MATERIALIZED (
            SELECT b.id FROM unnest($1) AS k (key) CROSS JOIN LATERAL (
                SELECT j.id FROM %1$I j
                 WHERE j.lock_key IS NOT NULL AND j.lock_key = k.key AND j.status = 'queued'
                   AND j.blocked_reason IS NULL
                   -- The first in line only: whether one is before it may be looked for among all that wait.
                   AND EXISTS (SELECT FROM (
                       SELECT w.priority, w.seq FROM %1$I w
                        WHERE w.lock_key IS NOT NULL AND w.lock_key = k.key AND w.status = 'queued'
                          AND w.blocked_reason = 'locked'
                        ORDER BY w.priority, w.seq LIMIT 1) f WHERE (f.priority, f.seq) < (j.priority, j.seq))
                   FOR UPDATE OF j SKIP LOCKED) b)
        UPDATE %1$I j SET blocked_reason = 'taken_back' WHERE j.id = ANY (ARRAY(SELECT b.id FROM behind b))
        $q$, p_jobs) USING p_keys;
    EXECUTE format($q$
        WITH heads AS MATERIALIZED (
            SELECT h.id FROM unnest($1) AS k (key) CROSS JOIN LATERAL (
                SELECT w.id FROM %1$I w
                 WHERE w.lock_key IS NOT NULL AND w.lock_key = k.key AND w.status = 'queued'
                   AND w.blocked_reason = 'locked'
                 ORDER BY w.priority, w.seq LIMIT 1 FOR UPDATE SKIP LOCKED) h
             WHERE NOT EXISTS (SELECT FROM %1$I j WHERE j.lock_key IS NOT NULL AND j.lock_key = k.key
                      AND (j.status = 'running' OR (j.status = 'queued' AND j.blocked_reason IS NULL))))
        UPDATE %1$I j SET blocked_reason = 'let_in' WHERE j.id = ANY (ARRAY(SELECT h.id FROM heads h))
        $q$, p_jobs) USING p_keys;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- As in 0022.
CREATE OR REPLACE FUNCTION queue_workflows_put_jobs(p_prefix text, p_jobs jsonb)
RETURNS TABLE (place bigint, id text, same boolean) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_seq    regclass := pg_get_serial_sequence('ingest_jobs', 'seq');
    v_places bigint[];
    v_ids    text[];
    v_same   boolean[];
    v_lost   bigint;
BEGIN
    -- It runs as its owner (0031), as it sets seq, which is nobody else's to set.
    PERFORM queue_workflows_demand('INSERT', 'ingest_jobs', 'args');
    FOR v_try IN 1..10 LOOP
        INSERT INTO ingest_jobs
               (id, seq, task_name, queue, reason, priority, args, idempotency_key, idempotency_window_s,
                lock_key, partition_key, available_at, max_attempts, timeout_s, policy, headers)
        SELECT n.id, n.seq, n.task_name, n.queue, coalesce(n.reason, 'tick'), coalesce(n.priority, 100),
               coalesce(n.args, '{}'), n.idempotency_key, n.idempotency_window_s, n.lock_key,
               n.partition_key, n.available_at, coalesce(n.max_attempts, 1), n.timeout_s, n.policy,
               n.headers
          FROM (SELECT p_prefix || lpad(to_hex(g.ordinality), 12, '0') AS id, nextval(v_seq) AS seq, g.*
                  FROM ROWS FROM (jsonb_to_recordset(p_jobs) AS (
                       task_name text, queue text, reason text, priority smallint, args jsonb,
                       idempotency_key text, idempotency_window_s double precision, lock_key text,
                       partition_key text, available_at timestamptz, max_attempts integer,
                       timeout_s double precision, policy jsonb, headers jsonb)) WITH ORDINALITY AS g
                 WHERE v_try = 1 OR g.idempotency_key IS NOT NULL AND NOT EXISTS (
                       SELECT FROM ingest_jobs o
                        WHERE o.idempotency_key = g.idempotency_key AND NOT o.idempotency_released)) n
         ORDER BY n.idempotency_key
            ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL AND NOT idempotency_released
            DO NOTHING;
        IF v_try = 1 AND NOT jsonb_path_exists(p_jobs, '$[*].idempotency_key') THEN
            RETURN;
        END IF;
        SELECT array_agg(g.ordinality) FILTER (WHERE o.id <> m.id),
               array_agg(o.id) FILTER (WHERE o.id <> m.id),
               array_agg(o.task_name = g.task_name AND o.queue = g.queue
                         AND o.args = coalesce(g.args, '{}')) FILTER (WHERE o.id <> m.id),
               count(*) FILTER (WHERE o.id IS NULL)
          INTO v_places, v_ids, v_same, v_lost
          FROM ROWS FROM (jsonb_to_recordset(p_jobs) AS (
               task_name text, queue text, args jsonb, idempotency_key text)) WITH ORDINALITY AS g
          CROSS JOIN LATERAL (SELECT p_prefix || lpad(to_hex(g.ordinality), 12, '0')) AS m (id)
          LEFT JOIN LATERAL (
               SELECT i.id, i.task_name, i.queue, i.args FROM ingest_jobs i
                WHERE i.idempotency_key = g.idempotency_key AND NOT i.idempotency_released LIMIT 1) o ON true
         WHERE g.idempotency_key IS NOT NULL;
        IF v_lost = 0 THEN
            RETURN QUERY SELECT * FROM unnest(v_places, v_ids, v_same);
            RETURN;
        END IF;
        -- Whoever had such a key has lost it since: try again.
    END LOOP;
    RAISE EXCEPTION 'idempotency keys change hands too fast' USING ERRCODE = 'serialization_failure';
END $$;

-- As in 0020.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_take(p_model text, p_how text, p_band smallint, p_seq bigint)
RETURNS text LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_incremental_sort = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_id text;
BEGIN
    IF p_how = 'oldest' AND p_model = '' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model IS NULL AND j.seq <= p_seq
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.required_model, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_how = 'oldest' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model BETWEEN p_model AND p_model AND j.seq <= p_seq
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.required_model, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_how = 'newest' AND p_model = '' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model IS NULL AND j.priority BETWEEN p_band AND p_band
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_how = 'newest' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND (j.required_model, j.priority) >= (p_model, p_band)
           AND (j.required_model, j.priority) <= (p_model, p_band)
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_model = '' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model IS NULL
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSE
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model BETWEEN p_model AND p_model
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    END IF;
    RETURN v_id;
END $$;

-- As in 0020.
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
             WHERE j.id = ANY (ARRAY(SELECT d.id FROM due d));
        END IF;
        IF p_queue = 'gpu' THEN
            v_id := queue_workflows_pick_gpu(p_worker, p_host, p_model, p_models, p_newest,
                                             p_policy, p_grace_s, p_bound_s);
        ELSIF p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = p_queue AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.priority = (SELECT k.priority FROM workflow_node_jobs k
                                  WHERE k.queue = p_queue AND k.status = 'queued' AND k.blocked_reason IS NULL
                                  ORDER BY k.priority, k.seq LIMIT 1)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
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
                                                AND o.status NOT IN ('completed', 'failed', 'cancelled') OFFSET 0)
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
