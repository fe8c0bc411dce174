-- One call of a worker: record what it finished, then claim what is next, in one transaction and round trip.
-- Finishing comes first: a single statement that did both could hold the rows that its claim part rejected
-- while it waits for the row that it finishes. The planner settings hold the claim to its index, whatever
-- the statistics said when the plan was made.

-- How the worker of a host and queue is to stop, NULL while it is ON; a row of queue 'all' is for every queue.
CREATE OR REPLACE FUNCTION queue_workflows_off_policy(p_host text, p_queue text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT stop_policy FROM worker_controls
     WHERE host_label = p_host AND queue IN (p_queue, 'all') AND desired_state = 'off'
       AND (until_at IS NULL OR until_at > now())
     ORDER BY stop_policy <> 'hard', queue = 'all' LIMIT 1
$$;

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

-- The rows of a plan, with the run's priority and generation; how many are new. An existing row is left
-- alone, but one that failed or was cancelled in an earlier generation is opened again.
CREATE OR REPLACE FUNCTION queue_workflows_insert_nodes(p_run text, p_rows jsonb) RETURNS bigint
LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_count bigint;
BEGIN
    INSERT INTO workflow_node_jobs AS j
           (run_id, node_id, node_module, queue, required_model, status, priority, pipeline_name, inputs,
            input_template, ref_heads, generation, finished_at)
    SELECT r.id, n.node_id, n.node_module, n.queue, n.required_model, n.status, r.priority,
           n.pipeline_name, n.inputs, n.input_template, n.ref_heads, r.generation,
           CASE n.status WHEN 'skipped' THEN now() END
      FROM workflow_runs r, jsonb_to_recordset(p_rows) AS n (
           node_id text, node_module text, queue text, required_model text, status text,
           pipeline_name text, inputs jsonb, input_template jsonb, ref_heads text[])
     WHERE r.id = p_run
        ON CONFLICT (run_id, node_id) DO UPDATE SET
           status = EXCLUDED.status, inputs = EXCLUDED.inputs, input_template = EXCLUDED.input_template,
           ref_heads = EXCLUDED.ref_heads, node_module = EXCLUDED.node_module, queue = EXCLUDED.queue,
           required_model = EXCLUDED.required_model, priority = EXCLUDED.priority,
           generation = EXCLUDED.generation, finished_at = EXCLUDED.finished_at, seq = EXCLUDED.seq,
           error = NULL, attempts = 0, crash_count = 0, watchdog_retries = 0, resolved_inputs = NULL,
           seconds = NULL, vm_rss_mb_peak = NULL, input_spec = NULL, context_delta = '{}',
           blocked_reason = NULL, available_at = NULL, cancel_requested_at = NULL, progress = NULL,
           created_at = now(), started_at = NULL
     WHERE j.generation < EXCLUDED.generation AND j.status IN ('failed', 'cancelled');
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- When a run was created, in microseconds since the epoch, or the nearest bigint: a cast that raises for a time that
-- is infinite would stop the look-up for every other run. STABLE, as extract() is: only so the planner inlines it.
CREATE OR REPLACE FUNCTION queue_workflows_born(p_at timestamptz) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT least(greatest(extract(epoch FROM p_at) * 1000000, -9223372036854775808), 9223372036854775807)::bigint
$$;

-- The start of a run that has neither a definition nor a node yet, with no more than one look: its
-- definition frozen, its first nodes queued; how many. NULL, and nothing written, for any other run, and for
-- one that somebody else holds.
CREATE OR REPLACE FUNCTION queue_workflows_start_run(
    p_run text, p_generation integer, p_born bigint, p_definition jsonb, p_hash text, p_rows jsonb,
    p_out_dir text)
RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
BEGIN
    PERFORM FROM workflow_runs r
      WHERE r.id = p_run AND r.status = 'queued' AND r.mode = 'node' AND r.generation = p_generation
        AND queue_workflows_born(r.created_at) = p_born AND r.definition IS NULL
        FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND OR EXISTS (SELECT FROM workflow_node_jobs WHERE run_id = p_run) THEN
        RETURN NULL;
    END IF;
    UPDATE workflow_runs
       SET definition = p_definition, definition_hash = p_hash, status = 'running',
           out_dir = coalesce(out_dir, p_out_dir),
           started_at = coalesce(started_at, now()), error = NULL, available_at = NULL, updated_at = now()
     WHERE id = p_run;
    RETURN queue_workflows_insert_nodes(p_run, p_rows);
END $$;

-- What a worker has to know of the node that it claimed. run: its id, out_dir, workflow_name, generation,
-- and born, in microseconds since the epoch.
CREATE TYPE queue_workflows_claimed_node AS (
    id text, run_id text, node_id text, node_module text, queue text, required_model text,
    status text, pipeline_name text, priority smallint, seq bigint, claim_no bigint, worker_id text,
    claimed_by text, generation integer, attempts integer, max_attempts integer, crash_count integer,
    watchdog_retries integer, timeout_s double precision, inputs jsonb, input_template jsonb,
    ref_heads text[], run json, context jsonb);

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

-- The same for the ingest family, for any number of jobs at once. p_done: a JSON array of {id, claim_no,
-- result, seconds}, or NULL. Rows: the claimed jobs in claim order.
CREATE OR REPLACE FUNCTION queue_workflows_ingest_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim integer, p_obey boolean, p_promote boolean, p_done jsonb)
RETURNS TABLE (
    id text, task_name text, queue text, reason text, priority smallint, seq bigint, args jsonb,
    claim_no bigint, worker_id text, claimed_by text, attempts integer, max_attempts integer,
    crash_count integer, timeout_s double precision, headers jsonb, partition_key text, lock_key text)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_count bigint;
    v_row   ingest_jobs;
BEGIN
    IF p_done IS NOT NULL THEN
        WITH done AS (
            UPDATE ingest_jobs j
               SET status = 'completed', result = f.result, error = NULL, seconds = f.seconds,
                   finished_at = now(), worker_id = NULL, lease_expires_at = NULL
              FROM jsonb_to_recordset(p_done) AS f (id text, claim_no bigint, result jsonb, seconds float8)
             WHERE j.id = f.id AND j.worker_id IS NOT DISTINCT FROM p_worker
               AND j.claim_no = f.claim_no AND j.status = 'running'
            RETURNING j.id, j.claim_no, j.attempts, j.queue, j.seconds, j.claimed_by)
        INSERT INTO ingest_job_events
               (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s)
        SELECT id, attempts, 'completed', claim_no, p_worker, claimed_by, queue, seconds FROM done;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count <> jsonb_array_length(p_done) THEN
            RAISE EXCEPTION '% of % claims are no longer held', jsonb_array_length(p_done) - v_count,
                jsonb_array_length(p_done) USING ERRCODE = 'QW001';
        END IF;
    END IF;
    IF p_claim < 1 OR (p_obey AND EXISTS (
        SELECT FROM worker_controls c WHERE c.host_label = p_host AND c.queue IN (p_queue, 'all')
           AND c.desired_state = 'off' AND (c.until_at IS NULL OR c.until_at > now()))) THEN
        RETURN;
    END IF;
    IF p_promote THEN
        WITH due AS MATERIALIZED (
            SELECT j.id FROM ingest_jobs j
             WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL AND j.available_at <= now()
               AND j.blocked_reason = 'not_due' AND j.queue = p_queue
             ORDER BY j.available_at LIMIT 100 FOR UPDATE SKIP LOCKED)
        UPDATE ingest_jobs j SET blocked_reason = NULL, available_at = NULL
          FROM due WHERE j.id = due.id;
    END IF;
    -- What may have killed its worker is claimed alone, so that it takes no neighbours with it.
    IF p_claim = 1 OR (SELECT q.crash_count > 0 FROM ingest_jobs q
                        WHERE q.queue = p_queue AND q.status = 'queued' AND q.blocked_reason IS NULL
                        ORDER BY q.priority, q.seq LIMIT 1) THEN
        UPDATE ingest_jobs j
           SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
               lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
               started_at = now(), available_at = NULL, error = NULL, progress = NULL
         WHERE j.id = (SELECT q.id FROM ingest_jobs q
                        WHERE q.queue = p_queue AND q.status = 'queued' AND q.blocked_reason IS NULL
                        ORDER BY q.priority, q.seq LIMIT 1 FOR UPDATE SKIP LOCKED)
        RETURNING * INTO v_row;
        IF FOUND THEN
            INSERT INTO ingest_job_events
                   (job_id, attempt, event_type, claim_no, worker_id, host_label, queue)
            VALUES (v_row.id, v_row.attempts, 'claimed', v_row.claim_no, p_worker, p_host, v_row.queue);
            RETURN QUERY SELECT v_row.id, v_row.task_name, v_row.queue::text, v_row.reason, v_row.priority,
                v_row.seq, v_row.args, v_row.claim_no, v_row.worker_id, v_row.claimed_by,
                v_row.attempts, v_row.max_attempts, v_row.crash_count, v_row.timeout_s,
                v_row.headers, v_row.partition_key, v_row.lock_key;
        END IF;
        RETURN;
    END IF;
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT j.id FROM ingest_jobs j
         WHERE j.queue = p_queue AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.crash_count = 0
         ORDER BY j.priority, j.seq LIMIT p_claim FOR UPDATE SKIP LOCKED),
    claimed AS (
        UPDATE ingest_jobs j
           SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
               lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
               started_at = now(), available_at = NULL, error = NULL, progress = NULL
          FROM picked WHERE j.id = picked.id
        RETURNING j.id, j.task_name, j.queue::text, j.reason, j.priority, j.seq, j.args, j.claim_no,
                  j.worker_id, j.claimed_by, j.attempts, j.max_attempts, j.crash_count,
                  j.timeout_s, j.headers, j.partition_key, j.lock_key),
    logged AS (
        INSERT INTO ingest_job_events
               (job_id, attempt, event_type, claim_no, worker_id, host_label, queue)
        SELECT d.id, d.attempts, 'claimed', d.claim_no, p_worker, p_host, d.queue FROM claimed d)
    SELECT * FROM claimed;
END $$;
