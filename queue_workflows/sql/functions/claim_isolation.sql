-- A claim that one row makes fail would stop its whole queue. These functions find that row and move it out of
-- the way. They run only after a claim has raised, so that an ordinary claim costs nothing more.

-- Return whether an error is not about the row: connection, transaction, rights, missing objects,
-- resources, locks, shutdown, storage, internal errors. No job is ended for one of these.
CREATE OR REPLACE FUNCTION queue_workflows_is_systemic(p_state text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT left(p_state, 2) IN ('08', '25', '28', '2D', '3B', '3D', '3F', '40', '42', '53', '55', '57', '58', '72',
                                'F0', 'HV', 'XX')
$$;

-- Return whether the error means that the row itself cannot be computed with or stored. Any other error may be a
-- trigger's passing condition.
CREATE OR REPLACE FUNCTION queue_workflows_is_about_data(p_state text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT left(p_state, 2) IN ('0A', '21', '22', '23', '54')
$$;

-- End a job that the database itself refuses to run. Return 'failed' (with its event and outbox row), else
-- 'set_aside' (blocked, so that no claim finds it), else NULL: the row cannot be written at all. `p_worker` and
-- `p_claim_no` name the claim that holds it; NULL: the job is queued.
CREATE OR REPLACE FUNCTION queue_workflows_set_aside(
    p_jobs text, p_id text, p_error text, p_worker text DEFAULT NULL, p_claim_no bigint DEFAULT NULL)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    c_this CONSTANT text := ' WHERE id = $1 AND CASE WHEN $2::text IS NULL THEN status = ''queued'''
                            ' ELSE status = ''running'' AND worker_id = $2 AND claim_no = $3 END';
    v_node   workflow_node_jobs;
    v_ingest ingest_jobs;
    v_count  bigint;
    v_state  text;
BEGIN
    BEGIN
        IF p_jobs = 'workflow_node_jobs' THEN
            EXECUTE 'UPDATE workflow_node_jobs SET status = ''failed'', error = $4, finished_at = now(),'
                    ' blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL' || c_this || ' RETURNING *'
               INTO v_node USING p_id, p_worker, p_claim_no, p_error;
            IF v_node.id IS NULL THEN
                RETURN NULL;
            END IF;
            INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no, generation)
            VALUES (v_node.run_id, v_node.node_id, 'failed', p_id, v_node.claim_no, v_node.generation);
            INSERT INTO workflow_node_events
                   (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, worker_id, claim_no,
                    error, detail)
            VALUES (v_node.run_id, v_node.node_id, p_id, greatest(0, least(v_node.attempts, 32767)), 'failed', v_node.claimed_by,
                    v_node.queue, v_node.required_model, p_worker, v_node.claim_no, p_error,
                    '{"by": "database"}');
        ELSE
            EXECUTE 'UPDATE ingest_jobs SET status = ''failed'', error = $4, finished_at = now(),'
                    ' blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL' || c_this || ' RETURNING *'
               INTO v_ingest USING p_id, p_worker, p_claim_no, p_error;
            IF v_ingest.id IS NULL THEN
                RETURN NULL;
            END IF;
            IF p_worker IS NOT NULL THEN  -- a trigger records the end of a queued job
                INSERT INTO ingest_job_events
                       (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, error, detail)
                VALUES (p_id, v_ingest.attempts, 'failed', v_ingest.claim_no, p_worker, v_ingest.claimed_by,
                        v_ingest.queue, p_error, '{"by": "database"}');
            END IF;
        END IF;
        RETURN 'failed';
    EXCEPTION WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS v_state = RETURNED_SQLSTATE;
        IF queue_workflows_is_systemic(v_state) THEN
            RAISE;
        END IF;
    END;
    BEGIN
        EXECUTE format('UPDATE %I SET status = ''queued'', blocked_reason = ''set_aside'', available_at = NULL,'
                       ' worker_id = NULL, lease_expires_at = NULL', p_jobs) || c_this
          USING p_id, p_worker, p_claim_no;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        RETURN CASE WHEN v_count > 0 THEN 'set_aside' END;
    EXCEPTION WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS v_state = RETURNED_SQLSTATE;
        IF queue_workflows_is_systemic(v_state) THEN
            RAISE;
        END IF;
    END;
    RETURN NULL;
END $$;

-- Claim one job of a queue after the ordinary claim has raised. The first 100 jobs are tried in claim order,
-- each in its own subtransaction, and those that raise are moved out of the way. job_id: the job that is claimed
-- now, or NULL. aside: of each job that raised its id, its run, its outcome ('failed', 'set_aside', 'postponed',
-- 'skipped') and the error. A row whose error may be a trigger's passing condition is ended only if another job
-- could be claimed; else it is tried again in a minute, as the reason may concern all jobs and pass.
CREATE OR REPLACE FUNCTION queue_workflows_claim_apart(
    p_jobs text, p_worker text, p_host text, p_queue text, p_lease_s double precision, p_obey boolean,
    p_promote boolean, p_models text[] DEFAULT NULL, p_lane smallint DEFAULT NULL,
    p_versions text[] DEFAULT NULL, OUT job_id text, OUT aside jsonb)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    c_window CONSTANT integer := 100;
    v_nodes   boolean := p_jobs = 'workflow_node_jobs';
    v_limited boolean := NOT v_nodes AND EXISTS (SELECT FROM queue_settings s WHERE s.queue = p_queue);
    v_vram    integer;
    v_id      text;
    v_status  text;
    v_state   text;
    v_message text;
    v_ids     text[] := '{}';
    v_states  text[] := '{}';
    v_messages text[] := '{}';
    v_became  text;
    v_locked  text;
BEGIN
    aside := '[]';
    IF (p_obey AND EXISTS (
            SELECT FROM worker_controls c WHERE c.host_label = p_host AND c.queue IN (p_queue, 'all')
               AND queue_workflows_is_off(c.desired_state, c.until_at)))
       OR EXISTS (SELECT FROM queue_settings s
                   WHERE s.queue = p_queue AND queue_workflows_is_paused(s.paused_at, s.paused_until)) THEN
        RETURN;
    END IF;
    -- Jobs that are due, or kept for the host, may have made the claim fail: anyone may claim them from now on.
    FOR v_id IN EXECUTE format(
        'SELECT l.id FROM %I l WHERE l.id = ANY (ARRAY(SELECT j.id FROM %I j WHERE $1 AND j.status = ''queued'''
        ' AND j.blocked_reason IS NOT NULL AND j.available_at <= now() AND j.blocked_reason = ''not_due'''
        ' AND j.queue = $2 ORDER BY j.available_at LIMIT $3)'
        ' || ARRAY(SELECT k.id FROM %I k WHERE k.resume_host = $4 AND k.queue = $2 AND k.resume_at <= now()'
        ' AND k.status = ''queued'' AND k.blocked_reason = ''not_due'' AND k.resume_until = k.available_at'
        ' AND k.lock_key IS NULL ORDER BY k.resume_host, k.queue, k.resume_at LIMIT $3))'
        ' AND (l.status = ''queued'' AND l.blocked_reason = ''not_due'') IS TRUE FOR UPDATE SKIP LOCKED',
        p_jobs, p_jobs, p_jobs) USING p_promote, p_queue, c_window, p_host
    LOOP
        BEGIN
            EXECUTE format('UPDATE %I SET blocked_reason = NULL, available_at = NULL WHERE id = $1', p_jobs)
              USING v_id;
        EXCEPTION WHEN OTHERS THEN
            GET STACKED DIAGNOSTICS v_state = RETURNED_SQLSTATE, v_message = MESSAGE_TEXT;
            IF queue_workflows_is_systemic(v_state) THEN
                RAISE;
            END IF;
            v_ids := v_ids || v_id;
            v_states := v_states || v_state;
            v_messages := v_messages || v_message;
        END;
    END LOOP;
    IF v_limited AND (SELECT r.room < 1 FROM queue_workflows_queue_room(p_queue, 1) r) THEN
        RETURN;
    END IF;
    IF p_queue = 'gpu' THEN
        SELECT w.vram_total_mb INTO v_vram FROM workers w WHERE w.worker_id = p_worker;
    END IF;
    FOR v_id IN EXECUTE CASE
        WHEN NOT v_nodes THEN
            'SELECT j.id FROM ingest_jobs j WHERE j.queue = $1 AND j.status = ''queued'''
            ' AND j.blocked_reason IS NULL ORDER BY j.priority, j.seq LIMIT $2'
        ELSE
            'SELECT q.id FROM (SELECT j.id, j.run_id, j.required_model FROM workflow_node_jobs j'
            ' WHERE j.queue = $1 AND j.status = ''queued'' AND j.blocked_reason IS NULL'
            ' AND (j.required_version IS NULL OR j.required_version = ANY ($6))'
            ' ORDER BY j.priority, j.seq LIMIT 10 * $2) q'
            ' WHERE EXISTS (SELECT FROM workflow_runs r WHERE r.id = q.run_id'
            ' AND r.status NOT IN (''completed'', ''failed'', ''cancelled'') OFFSET 0)'
            ' AND ($1 <> ''gpu'' OR queue_workflows_gpu_misfit($3, $4, $5, q.required_model) IS NULL) LIMIT $2'
        END USING p_queue, c_window, p_host, p_models, v_vram, p_versions
    LOOP
        -- Outside of the subtransaction: a row that raises stays locked until it is moved out of the way.
        EXECUTE format('SELECT id FROM %I WHERE id = $1 AND status = ''queued'' AND blocked_reason IS NULL'
                       ' FOR UPDATE SKIP LOCKED', p_jobs) INTO v_locked USING v_id;
        CONTINUE WHEN v_locked IS NULL;
        BEGIN
            IF v_nodes THEN
                UPDATE workflow_node_jobs j
                   SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
                       host_label = p_host, worker_lane = coalesce(p_lane, j.worker_lane),
                       lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
                       started_at = now(), available_at = NULL, error = NULL, progress = NULL,
                       resolved_inputs = CASE WHEN j.ref_heads = '{}' THEN j.inputs ELSE j.resolved_inputs END
                 WHERE j.id = v_id RETURNING j.status INTO v_status;
                INSERT INTO workflow_node_events
                       (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, worker_id,
                        claim_no)
                SELECT j.run_id, j.node_id, j.id, greatest(0, least(j.attempts, 32767)), 'claimed', p_host, j.queue, j.required_model,
                       p_worker, j.claim_no FROM workflow_node_jobs j WHERE j.id = v_id AND v_status = 'running';
            ELSE
                UPDATE ingest_jobs j
                   SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
                       lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
                       started_at = now(), available_at = NULL, error = NULL, progress = NULL
                 WHERE j.id = v_id RETURNING j.status INTO v_status;
                INSERT INTO ingest_job_events
                       (job_id, attempt, event_type, claim_no, worker_id, host_label, queue)
                SELECT j.id, j.attempts, 'claimed', j.claim_no, p_worker, p_host, j.queue
                  FROM ingest_jobs j WHERE j.id = v_id AND v_status = 'running';
            END IF;
        EXCEPTION WHEN OTHERS THEN
            GET STACKED DIAGNOSTICS v_state = RETURNED_SQLSTATE, v_message = MESSAGE_TEXT;
            IF queue_workflows_is_systemic(v_state) THEN
                RAISE;
            END IF;
            v_ids := v_ids || v_id;
            v_states := v_states || v_state;
            v_messages := v_messages || v_message;
            v_status := NULL;
        END;
        IF v_status = 'running' THEN
            job_id := v_id;
            EXIT;
        END IF;  -- else it raised, or its partition's limits have blocked it
    END LOOP;
    IF v_limited AND job_id IS NOT NULL THEN
        PERFORM queue_workflows_note_starts(p_queue, 1);
    END IF;
    FOR v_at IN 1..cardinality(v_ids) LOOP
        IF job_id IS NOT NULL OR queue_workflows_is_about_data(v_states[v_at]) THEN
            v_became := queue_workflows_set_aside(
                p_jobs, v_ids[v_at], left('the database refuses its claim: ' || v_messages[v_at], 8000));
        ELSE
            BEGIN
                EXECUTE format('UPDATE %I SET blocked_reason = ''not_due'','
                               ' available_at = now() + interval ''1 minute'' WHERE id = $1', p_jobs)
                  USING v_ids[v_at];
                v_became := 'postponed';
            EXCEPTION WHEN OTHERS THEN
                v_became := NULL;
            END;
        END IF;
        aside := aside || jsonb_build_array(jsonb_build_object(
            'id', v_ids[v_at], 'became', coalesce(v_became, 'skipped'), 'error', left(v_messages[v_at], 1000),
            'run_id', CASE WHEN v_nodes THEN (
                SELECT j.run_id FROM workflow_node_jobs j WHERE j.id = v_ids[v_at]) END));
    END LOOP;
END $$;
