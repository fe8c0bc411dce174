-- Whoever waits for a partition's limits waits no longer.
DROP TRIGGER IF EXISTS queue_partitions_set ON queue_partitions;
DROP TRIGGER IF EXISTS queue_settings_set ON queue_settings;
DROP TRIGGER IF EXISTS partition_turns_take ON partition_turns;
DROP TRIGGER IF EXISTS ingest_jobs_changed ON ingest_jobs;
CREATE OR REPLACE FUNCTION queue_workflows_hold_ingest() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    IF NEW.lock_key IS NOT NULL AND NEW.status = 'queued' THEN
        IF NEW.blocked_reason IS NULL THEN
            NEW.blocked_reason := 'locked';
        END IF;
        PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
    END IF;
    IF NEW.idempotency_key IS NOT NULL AND NOT NEW.idempotency_released THEN
        IF NOT coalesce(NEW.idempotency_window_s, 0) BETWEEN 0 AND 31622400 THEN
            RAISE EXCEPTION 'idempotency_window_s must be 0 to 31622400 (366 days), not %',
                NEW.idempotency_window_s USING ERRCODE = 'check_violation';
        END IF;
        PERFORM queue_workflows_release_key(NEW.idempotency_key);
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE FUNCTION queue_workflows_take_turns() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_turn record;
BEGIN
    FOR v_turn IN
        WITH mine AS (DELETE FROM lock_turns WHERE xid = pg_current_xact_id() RETURNING jobs, lock_key)
        SELECT jobs, array_agg(DISTINCT lock_key) AS keys FROM mine GROUP BY jobs ORDER BY jobs
    LOOP
        PERFORM queue_workflows_lock_keys(v_turn.jobs, v_turn.keys);
        BEGIN
            PERFORM queue_workflows_give_turns(v_turn.jobs, v_turn.keys);
        EXCEPTION WHEN unique_violation THEN
            -- Of a snapshot older than who was let in meanwhile: the net under turns sees to the line.
            NULL;
        END;
    END LOOP;
    RETURN NULL;
END $$;
CREATE OR REPLACE FUNCTION queue_workflows_jobs_gone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, k.lock_key)
       FROM (SELECT DISTINCT lock_key FROM gone WHERE lock_key IS NOT NULL) k;
    RETURN NULL;
END $$;
CREATE OR REPLACE FUNCTION queue_workflows_job_changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_let_in boolean := false;
BEGIN
    -- What the steps of 0016 write is whole.
    IF NEW.lock_key IS NULL AND OLD.lock_key IS NULL
       AND (OLD.status = 'queued' AND NEW.status = 'running' AND NEW.claim_no > OLD.claim_no
            OR OLD.status = 'running' AND NEW.status = 'completed'
               AND NEW.worker_id IS NULL AND NEW.lease_expires_at IS NULL) THEN
        RETURN NEW;
    END IF;
    IF OLD.lock_key IS NOT NULL OR NEW.lock_key IS NOT NULL THEN
        -- Two words that are never stored: a turn that was given, and one that was taken away.
        IF NEW.blocked_reason = 'taken_back' THEN
            NEW.blocked_reason := 'locked';
            RETURN NEW;
        END IF;
        IF NEW.blocked_reason = 'let_in' THEN
            NEW.blocked_reason := NULL;
            v_let_in := true;
        END IF;
    END IF;
    IF NEW.status = OLD.status THEN
        IF NEW.status = 'queued' THEN
            IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
                NEW.blocked_reason := 'not_due';
            ELSIF NEW.lock_key IS NOT NULL AND NOT v_let_in AND (
                      NEW.blocked_reason IS NULL
                      AND (OLD.blocked_reason IS NOT NULL OR NEW.lock_key IS DISTINCT FROM OLD.lock_key)
                      OR NEW.available_at IS NULL AND NEW.blocked_reason = 'not_due') THEN
                NEW.blocked_reason := 'locked';
            ELSIF NEW.available_at IS NULL AND NEW.blocked_reason = 'not_due' THEN
                NEW.blocked_reason := NULL;
                PERFORM pg_notify(TG_ARGV[0], NEW.queue);
            ELSIF NEW.blocked_reason IS NULL AND OLD.blocked_reason IS NOT NULL THEN
                PERFORM pg_notify(TG_ARGV[0], NEW.queue);
            END IF;
        ELSIF NEW.status = 'running' AND NEW.cancel_requested_at IS NOT NULL
              AND OLD.cancel_requested_at IS NULL THEN
            PERFORM pg_notify('job_cancel', left(NEW.id, 1000));
        END IF;
        IF NOT v_let_in AND (OLD.lock_key IS NOT NULL OR NEW.lock_key IS NOT NULL)
           AND (NEW.lock_key IS DISTINCT FROM OLD.lock_key
                OR NEW.blocked_reason IS DISTINCT FROM OLD.blocked_reason) THEN
            PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, OLD.lock_key);
            PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
        END IF;
        RETURN NEW;
    END IF;
    IF OLD.status IN ('completed', 'failed', 'cancelled', 'skipped')
       AND NEW.generation <= OLD.generation THEN
        RAISE EXCEPTION 'job % is % and stays so; retry_job() or retry_run() reopens it', OLD.id, OLD.status
            USING ERRCODE = 'QW002';
    END IF;
    IF NEW.status = 'running' THEN
        IF NEW.claim_no = OLD.claim_no THEN
            IF OLD.blocked_reason = 'locked' THEN
                RETURN NULL;  -- who knows no lock keys finds no job
            END IF;
            NEW.claim_no := OLD.claim_no + 1;
            NEW.worker_id := 'legacy:' || coalesce(NEW.claimed_by, 'unknown');
            NEW.lease_expires_at := coalesce(NEW.lease_expires_at, now() + interval '600 seconds');
            NEW.blocked_reason := NULL;
            NEW.available_at := NULL;
        END IF;
        RETURN NEW;
    END IF;
    -- Our own statements take the worker off; what leaves it on is a plain UPDATE, which knows no claim.
    IF OLD.status = 'running' AND NEW.worker_id = OLD.worker_id
       AND NEW.status IN ('completed', 'failed', 'awaiting_input')
       AND NOT starts_with(OLD.worker_id, 'legacy:') THEN
        RAISE EXCEPTION 'claim % of job % is held by %; mark_completed() and mark_failed() end it by hand',
            OLD.claim_no, OLD.id, OLD.worker_id USING ERRCODE = 'QW001';
    END IF;
    NEW.worker_id := NULL;
    NEW.lease_expires_at := NULL;
    IF OLD.lock_key IS NOT NULL OR NEW.lock_key IS NOT NULL THEN
        PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, OLD.lock_key);
        IF NEW.lock_key IS DISTINCT FROM OLD.lock_key THEN
            PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
        END IF;
    END IF;
    IF NEW.status = 'awaiting_input' AND NEW.policy ? 'timeout_s' THEN
        INSERT INTO workflow_input_timeouts AS t (job_id, claim_no, due_at)
        VALUES (NEW.id, NEW.claim_no,
                now() + (NEW.policy ->> 'timeout_s')::float8 * interval '1 second')
            ON CONFLICT (job_id) DO UPDATE SET claim_no = EXCLUDED.claim_no, due_at = EXCLUDED.due_at;
    END IF;
    IF NEW.status = 'queued' THEN
        IF NEW.available_at > now() THEN
            NEW.blocked_reason := 'not_due';
        ELSIF NEW.lock_key IS NOT NULL AND NEW.blocked_reason IS NULL THEN
            NEW.blocked_reason := 'locked';
        ELSIF NEW.blocked_reason IS NULL THEN
            PERFORM pg_notify(TG_ARGV[0], NEW.queue);
        END IF;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER ingest_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at, lock_key ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('ingest_job_ready');
DROP FUNCTION queue_workflows_ingest_step(
    text, text, text, double precision, integer, boolean, boolean, jsonb, boolean);
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
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION queue_workflows_take_turns() SECURITY DEFINER SET search_path = %I, pg_temp',
                   current_schema());
END $$;
DROP INDEX IF EXISTS ingest_jobs_limited_idx, ingest_jobs_partition_idx;
UPDATE ingest_jobs SET blocked_reason = NULL WHERE status = 'queued' AND blocked_reason = 'limited';
DROP FUNCTION queue_workflows_give_turns_singly(text, text[]);
DROP FUNCTION queue_workflows_queue_set();
DROP FUNCTION queue_workflows_mend_lines();
DROP FUNCTION queue_workflows_partitions(text, boolean);
DROP FUNCTION queue_workflows_note_starts(text, integer);
DROP FUNCTION queue_workflows_queue_room(text, integer);
DROP FUNCTION queue_workflows_admit(text, text, integer);
DROP FUNCTION queue_workflows_rate_room(integer, double precision, integer, timestamptz[]);
DROP FUNCTION queue_workflows_limit_gate(ingest_jobs, ingest_jobs);
DROP FUNCTION queue_workflows_ask_partition(text, text, integer);
ALTER TABLE ingest_jobs DROP COLUMN admitted_at;
DROP VIEW queue_partition_limits;
DROP TABLE partition_turns, partition_dues, partition_starts, queue_starts, queue_partitions;
ALTER TABLE queue_settings
    DROP CONSTRAINT queue_settings_rates_check,
    DROP COLUMN paused_at, DROP COLUMN paused_until, DROP COLUMN paused_by,
    DROP COLUMN max_running, DROP COLUMN rate_limit, DROP COLUMN rate_period_s,
    DROP COLUMN partition_max_running, DROP COLUMN partition_rate_limit,
    DROP COLUMN partition_rate_period_s;
