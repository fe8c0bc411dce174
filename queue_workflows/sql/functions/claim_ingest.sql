-- Finish and claim ingest jobs: one call of a worker is one transaction and one round trip. Planner settings
-- hold each query to its index, whatever the statistics say (decision 0019).

-- Record the completed jobs `p_done`, then claim up to `p_claim` jobs of a queue; return the claimed jobs. The
-- jobs are finished first: one statement for both could keep rows locked that its claim rejected. SQLSTATE
-- QW001: a claim was lost, and nothing was written. The queue's pause and limits come before the claim. If
-- `p_look_ahead_s` is given and fewer than `p_claim` jobs were claimed, the last row has no id. Its `wait_s` is the
-- number of seconds after which a limit admits the next job, if nothing was claimed. Its `due_s` is the number of
-- seconds after which the next delayed job is due, if that is within `p_look_ahead_s`. NULL: unknown. `due_s` is also 0 if
-- a job that may have killed its worker was claimed or left: then more jobs may be claimable.
CREATE OR REPLACE FUNCTION queue_workflows_ingest_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim integer, p_obey boolean, p_promote boolean, p_done jsonb, p_look_ahead_s double precision DEFAULT NULL)
RETURNS TABLE (
    id text, task_name text, queue text, reason text, priority smallint, seq bigint, args jsonb,
    claim_no bigint, worker_id text, claimed_by text, attempts integer, max_attempts integer,
    crash_count integer, timeout_s double precision, headers jsonb, partition_key text, lock_key text,
    wait_s double precision, due_s double precision)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_count   bigint;
    v_row     ingest_jobs;
    v_limited boolean := EXISTS (SELECT FROM queue_settings s WHERE s.queue = p_queue);
    v_room    integer := p_claim;
    v_wait_s  double precision;
    v_due_s   double precision;
    v_held    boolean;
    v_past    text;
    v_kept    text[] := '{}';
BEGIN
    IF p_done IS NOT NULL THEN
        WITH f AS MATERIALIZED (
            SELECT * FROM jsonb_to_recordset(p_done) AS d (
                id text, claim_no bigint, result jsonb, seconds float8)),
        done AS (
            UPDATE ingest_jobs j
               SET status = 'completed', result = f.result, error = NULL, seconds = f.seconds,
                   finished_at = now(), worker_id = NULL, lease_expires_at = NULL,
                   progress = CASE WHEN jsonb_typeof(j.progress) IN ('object', 'string') THEN j.progress
                                   ELSE '1' END
              FROM f
             WHERE j.id = ANY (ARRAY(SELECT i.id FROM f i)) AND j.id = f.id
               AND (j.worker_id IS NOT DISTINCT FROM p_worker
                    AND j.claim_no = f.claim_no AND j.status = 'running') IS TRUE
            RETURNING j.id, j.claim_no, j.attempts, j.queue, j.seconds, j.claimed_by)
        INSERT INTO ingest_job_events
               (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s)
        SELECT id, attempts, 'completed', claim_no, p_worker, claimed_by, queue, seconds FROM done;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count <> jsonb_array_length(p_done) THEN
            RAISE EXCEPTION '% of % claims are no longer held', jsonb_array_length(p_done) - v_count,
                jsonb_array_length(p_done) USING ERRCODE = 'QW001';
        END IF;
        IF v_limited AND p_claim < 1 THEN
            PERFORM pg_notify('ingest_job_ready', p_queue) FROM queue_settings s
              WHERE s.queue = p_queue AND s.max_running IS NOT NULL;
        END IF;
    END IF;
    IF p_claim < 1 OR (p_obey AND EXISTS (
        SELECT FROM worker_controls c WHERE c.host_label = p_host AND c.queue IN (p_queue, 'all')
           AND queue_workflows_is_off(c.desired_state, c.until_at))) THEN
        RETURN;
    END IF;
    IF p_promote THEN
        WITH due AS MATERIALIZED (
            SELECT j.id FROM ingest_jobs j
             WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL AND j.available_at <= now()
               AND j.blocked_reason = 'not_due' AND j.queue = p_queue
             ORDER BY j.available_at LIMIT 100 FOR UPDATE SKIP LOCKED)
        UPDATE ingest_jobs j SET blocked_reason = NULL, available_at = NULL
         WHERE j.id = ANY (ARRAY(SELECT d.id FROM due d));
    END IF;
    IF v_limited THEN
        SELECT r.room, r.wait_s INTO v_room, v_wait_s FROM queue_workflows_queue_room(p_queue, p_claim) r;
    END IF;
    IF v_limited AND v_room > 0 THEN
        SELECT p.held, p.id INTO v_held, v_past FROM queue_workflows_past_lines(p_queue) p;
        IF v_held THEN
            v_wait_s := 0;
            v_room := CASE WHEN v_past IS NULL THEN 0 ELSE 1 END;
        END IF;
    END IF;
    v_count := 0;
    IF v_room > 0 AND v_past IS NULL AND (
        SELECT true FROM ingest_jobs k
         WHERE k.resume_host = p_host AND k.queue = p_queue AND k.resume_at <= now()
           AND k.status = 'queued' AND k.blocked_reason = 'not_due' AND k.resume_until = k.available_at
           AND k.lock_key IS NULL
         ORDER BY k.resume_host, k.queue, k.resume_at LIMIT 1) THEN
        v_kept := queue_workflows_kept_jobs(p_host, p_queue, v_room);
        IF v_room > 1 AND EXISTS (SELECT FROM ingest_jobs k WHERE k.id = v_kept[1] AND (greatest(k.crash_count, k.lapse_count) > 0) IS TRUE) THEN
            v_room := 1;
        END IF;
    END IF;
    -- A job that may have killed its worker is claimed alone, so that no other job dies with it.
    IF v_room = 1 OR (v_room > 1 AND v_kept = '{}' AND (SELECT greatest(q.crash_count, q.lapse_count) > 0 FROM ingest_jobs q
                        WHERE q.queue = p_queue AND queue_workflows_is_claimable(q.status, q.blocked_reason)
                        ORDER BY q.priority, q.seq LIMIT 1)) THEN
        UPDATE ingest_jobs j
           SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
               lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
               started_at = now(), available_at = NULL, blocked_reason = NULL, error = NULL, progress = NULL
         WHERE j.id = coalesce(v_past, v_kept[1], (SELECT q.id FROM ingest_jobs q
                        WHERE q.queue = p_queue AND queue_workflows_is_claimable(q.status, q.blocked_reason)
                        ORDER BY q.priority, q.seq LIMIT 1 FOR UPDATE SKIP LOCKED))
        RETURNING * INTO v_row;
        IF v_row.status = 'running' THEN
            v_count := 1;
            INSERT INTO ingest_job_events
                   (job_id, attempt, event_type, claim_no, worker_id, host_label, queue)
            VALUES (v_row.id, v_row.attempts, 'claimed', v_row.claim_no, p_worker, p_host, v_row.queue);
            RETURN QUERY SELECT v_row.id, v_row.task_name, v_row.queue::text, v_row.reason, v_row.priority,
                v_row.seq, v_row.args, v_row.claim_no, v_row.worker_id, v_row.claimed_by,
                v_row.attempts, v_row.max_attempts, v_row.crash_count, v_row.timeout_s,
                v_row.headers, v_row.partition_key, v_row.lock_key, NULL::float8, NULL::float8;
        ELSIF v_row.id IS NOT NULL THEN
            v_wait_s := 0;  -- its partition has limits by now: the trigger has blocked it
        END IF;
    ELSIF v_room > 1 THEN
        RETURN QUERY
        WITH picked AS MATERIALIZED (
            SELECT j.id FROM ingest_jobs j
             WHERE j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND greatest(j.crash_count, j.lapse_count) <= 0
             ORDER BY j.priority, j.seq LIMIT v_room - cardinality(v_kept) FOR UPDATE SKIP LOCKED),
        changed AS (
            UPDATE ingest_jobs j
               SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
                   lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
                   started_at = now(), available_at = NULL, blocked_reason = NULL, error = NULL, progress = NULL
             WHERE j.id = ANY (v_kept || ARRAY(SELECT p.id FROM picked p))
            RETURNING j.id, j.task_name, j.queue::text, j.reason, j.priority, j.seq, j.args, j.claim_no,
                      j.worker_id, j.claimed_by, j.attempts, j.max_attempts, j.crash_count,
                      j.timeout_s, j.headers, j.partition_key, j.lock_key, j.status),
        claimed AS (SELECT * FROM changed c WHERE c.status = 'running'),
        logged AS (
            INSERT INTO ingest_job_events
                   (job_id, attempt, event_type, claim_no, worker_id, host_label, queue)
            SELECT d.id, d.attempts, 'claimed', d.claim_no, p_worker, p_host, d.queue FROM claimed d)
        SELECT d.id, d.task_name, d.queue, d.reason, d.priority, d.seq, d.args, d.claim_no, d.worker_id,
               d.claimed_by, d.attempts, d.max_attempts, d.crash_count, d.timeout_s, d.headers,
               d.partition_key, d.lock_key, NULL::float8, NULL::float8 FROM claimed d;
        GET DIAGNOSTICS v_count = ROW_COUNT;
    END IF;
    IF v_limited AND v_count > 0 THEN
        PERFORM queue_workflows_note_starts(p_queue, v_count::integer);
    END IF;
    IF p_look_ahead_s IS NULL OR v_count >= p_claim THEN
        RETURN;
    END IF;
    IF v_limited AND v_count = 0 AND v_room > 0 AND v_wait_s IS NULL THEN
        SELECT extract(epoch FROM least(d.due_at, now() + interval '366 days') - now())
          INTO v_wait_s FROM partition_dues d
         WHERE d.queue = p_queue AND isfinite(d.due_at) ORDER BY d.queue, d.due_at LIMIT 1;
    END IF;
    -- What was left for a job that is claimed alone, or such a job itself, can be claimed now.
    IF v_count > 0 AND v_room > 0 AND p_claim > 1 AND (
        greatest(v_row.crash_count, v_row.lapse_count) > 0 OR (SELECT greatest(q.crash_count, q.lapse_count) > 0 FROM ingest_jobs q
                        WHERE q.queue = p_queue AND queue_workflows_is_claimable(q.status, q.blocked_reason)
                        ORDER BY q.priority, q.seq LIMIT 1)) THEN
        v_due_s := 0;
    ELSIF v_count < v_room THEN
        v_due_s := queue_workflows_ingest_due_in(p_host, p_queue, p_look_ahead_s, NOT p_promote);
    END IF;
    IF v_count > 0 THEN
        v_wait_s := NULL;
    END IF;
    IF coalesce(v_wait_s, v_due_s) IS NOT NULL THEN
        RETURN QUERY SELECT NULL, NULL, NULL, NULL, NULL::smallint, NULL::bigint, NULL::jsonb, NULL::bigint,
            NULL, NULL, NULL::integer, NULL::integer, NULL::integer, NULL::float8, NULL::jsonb, NULL, NULL,
            v_wait_s, v_due_s;
    END IF;
END $$;
