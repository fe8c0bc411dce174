-- What a job's definition asks for: attempts, waits and time-outs in its row, one job at a time per lock
-- key, and input nodes that wait no longer than they are told to.

-- Of the jobs of a key one is let in: it runs, or is the one that may be claimed. All others wait with
-- blocked_reason 'locked', outside the claim's index. This index is the guarantee; a job without a key is
-- not in it.
CREATE UNIQUE INDEX workflow_node_jobs_lock_idx ON workflow_node_jobs (lock_key)
    WHERE lock_key IS NOT NULL
      AND (status = 'running' OR (status = 'queued' AND blocked_reason IS NULL));
CREATE UNIQUE INDEX ingest_jobs_lock_idx ON ingest_jobs (lock_key)
    WHERE lock_key IS NOT NULL
      AND (status = 'running' OR (status = 'queued' AND blocked_reason IS NULL));
CREATE INDEX workflow_node_jobs_line_idx ON workflow_node_jobs (lock_key, priority, seq)
    WHERE lock_key IS NOT NULL AND status = 'queued' AND blocked_reason = 'locked';
CREATE INDEX ingest_jobs_line_idx ON ingest_jobs (lock_key, priority, seq)
    WHERE lock_key IS NOT NULL AND status = 'queued' AND blocked_reason = 'locked';

-- The keys whose line has to be looked at before their transaction commits. Empty but for transactions
-- under way, so that its loss in a crash loses nothing.
CREATE UNLOGGED TABLE IF NOT EXISTS lock_turns (
    id       bigserial PRIMARY KEY,
    xid      xid8 NOT NULL DEFAULT pg_current_xact_id(),
    jobs     text NOT NULL,
    lock_key text NOT NULL
);
CREATE INDEX IF NOT EXISTS lock_turns_xid_idx ON lock_turns (xid);

-- As its owner (see the end), here and at commit: whoever may only insert jobs may give them a key.
CREATE OR REPLACE FUNCTION queue_workflows_ask_turn(p_jobs name, p_key text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_key IS NOT NULL AND p_jobs IN ('workflow_node_jobs', 'ingest_jobs') AND NOT EXISTS (
        SELECT FROM lock_turns WHERE xid = pg_current_xact_id() AND jobs = p_jobs AND lock_key = p_key) THEN
        INSERT INTO lock_turns (jobs, lock_key) VALUES (p_jobs, p_key);
    END IF;
END $$;

-- Give the next turn of these keys, ascending: the first in line is let in when nobody is, or before one
-- that is let in, not claimed, and further back. The caller holds the keys' advisory locks; no row is
-- waited for. How many were let in.
CREATE OR REPLACE FUNCTION queue_workflows_give_turns(p_jobs text, p_keys text[]) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_count bigint;
BEGIN
    EXECUTE format($q$
        WITH behind AS MATERIALIZED (
            SELECT j.id FROM unnest($1) AS k (key) JOIN %1$I j ON j.lock_key = k.key
             WHERE j.lock_key IS NOT NULL AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND EXISTS (SELECT FROM %1$I w
                            WHERE w.lock_key IS NOT NULL AND w.lock_key = k.key AND w.status = 'queued'
                              AND w.blocked_reason = 'locked'
                              AND (w.priority, w.seq) < (j.priority, j.seq))
               FOR UPDATE OF j SKIP LOCKED)
        UPDATE %1$I j SET blocked_reason = 'taken_back' FROM behind WHERE j.id = behind.id
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
        UPDATE %1$I j SET blocked_reason = 'let_in' FROM heads WHERE j.id = heads.id
        $q$, p_jobs) USING p_keys;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- One of 256, so that a bulk insert of many keys does not fill the server's table of locks; always taken
-- in ascending order, so that no two commits wait for each other.
CREATE OR REPLACE FUNCTION queue_workflows_lock_keys(p_jobs text, p_keys text[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_place bigint;
BEGIN
    FOR v_place IN SELECT DISTINCT hashtextextended('queue_workflows.lock.' || p_jobs || '.' || key, 0) & 255
                     FROM unnest(p_keys) AS k (key) ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(hashtext('queue_workflows.lock.' || p_jobs), v_place::integer);
    END LOOP;
END $$;

-- Runs at commit, when every row is what it will be: the first of a transaction's turns sees to all.
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
DROP TRIGGER IF EXISTS lock_turns_take ON lock_turns;
CREATE CONSTRAINT TRIGGER lock_turns_take AFTER INSERT ON lock_turns DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_take_turns();

-- A job that is deleted leaves its turn to the next.
CREATE OR REPLACE FUNCTION queue_workflows_jobs_gone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, k.lock_key)
       FROM (SELECT DISTINCT lock_key FROM gone WHERE lock_key IS NOT NULL) k;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS workflow_node_jobs_gone ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_gone AFTER DELETE ON workflow_node_jobs
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_jobs_gone();
DROP TRIGGER IF EXISTS ingest_jobs_gone ON ingest_jobs;
CREATE TRIGGER ingest_jobs_gone AFTER DELETE ON ingest_jobs
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_jobs_gone();

-- The safety net under turns: keys with a line and nobody let in, whose head was locked by somebody when
-- its turn came. Walks from key to key, however long the lines are. How many were let in.
CREATE OR REPLACE FUNCTION queue_workflows_mend_turns(p_jobs text) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_keys text[];
BEGIN
    EXECUTE format($q$
        WITH RECURSIVE line (key) AS (
            (SELECT lock_key FROM %1$I WHERE lock_key IS NOT NULL AND status = 'queued'
                AND blocked_reason = 'locked' ORDER BY lock_key LIMIT 1)
            UNION ALL
            SELECT (SELECT w.lock_key FROM %1$I w WHERE w.lock_key IS NOT NULL AND w.status = 'queued'
                       AND w.blocked_reason = 'locked' AND w.lock_key > line.key
                     ORDER BY w.lock_key LIMIT 1)
              FROM line WHERE line.key IS NOT NULL)
        SELECT array_agg(key) FROM line
         WHERE key IS NOT NULL AND NOT EXISTS (
               SELECT FROM %1$I j WHERE j.lock_key IS NOT NULL AND j.lock_key = line.key
                  AND (j.status = 'running' OR (j.status = 'queued' AND j.blocked_reason IS NULL)))
        $q$, p_jobs) INTO v_keys;
    IF v_keys IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM queue_workflows_lock_keys(p_jobs, v_keys);
    BEGIN
        RETURN queue_workflows_give_turns(p_jobs, v_keys);
    EXCEPTION WHEN OTHERS THEN
        RETURN queue_workflows_give_turns_singly(p_jobs, v_keys);  -- of 0023
    END;
END $$;

-- Until when input nodes wait for a person, for those that do not wait for ever.
CREATE TABLE IF NOT EXISTS workflow_input_timeouts (
    job_id   text PRIMARY KEY,
    claim_no bigint NOT NULL,
    due_at   timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS workflow_input_timeouts_due_idx ON workflow_input_timeouts (due_at);

-- As in 0015, and a job with a key waits for its turn, and an input node's wait begins.
CREATE OR REPLACE FUNCTION queue_workflows_hold_until_due() RETURNS trigger LANGUAGE plpgsql AS $$
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
    RETURN NEW;
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
DROP TRIGGER IF EXISTS workflow_node_jobs_changed ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at, lock_key, claim_no,
        worker_id, lease_expires_at, heartbeat_at, started_at, finished_at, seconds ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('node_job_ready');
DROP TRIGGER IF EXISTS ingest_jobs_changed ON ingest_jobs;
CREATE TRIGGER ingest_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at, lock_key ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('ingest_job_ready');

-- As in 0016, with what a node's policy sets.
CREATE OR REPLACE FUNCTION queue_workflows_insert_nodes(p_run text, p_rows jsonb) RETURNS bigint
LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_count bigint;
BEGIN
    INSERT INTO workflow_node_jobs AS j
           (run_id, node_id, node_module, queue, required_model, status, priority, pipeline_name, inputs,
            input_template, ref_heads, generation, finished_at, max_attempts, timeout_s, policy, lock_key)
    SELECT r.id, n.node_id, n.node_module, n.queue, n.required_model, n.status,
           coalesce(n.priority, r.priority),
           n.pipeline_name, n.inputs, n.input_template, n.ref_heads, r.generation,
           CASE n.status WHEN 'skipped' THEN now() END, coalesce(n.max_attempts, 1), n.timeout_s,
           n.policy, n.lock_key
      FROM workflow_runs r, jsonb_to_recordset(p_rows) AS n (
           node_id text, node_module text, queue text, required_model text, status text,
           pipeline_name text, inputs jsonb, input_template jsonb, ref_heads text[],
           priority smallint, max_attempts integer, timeout_s double precision, policy jsonb,
           lock_key text)
     WHERE r.id = p_run
        ON CONFLICT (run_id, node_id) DO UPDATE SET
           status = EXCLUDED.status, inputs = EXCLUDED.inputs, input_template = EXCLUDED.input_template,
           ref_heads = EXCLUDED.ref_heads, node_module = EXCLUDED.node_module, queue = EXCLUDED.queue,
           required_model = EXCLUDED.required_model, priority = EXCLUDED.priority,
           generation = EXCLUDED.generation, finished_at = EXCLUDED.finished_at, seq = EXCLUDED.seq,
           max_attempts = EXCLUDED.max_attempts, timeout_s = EXCLUDED.timeout_s,
           policy = EXCLUDED.policy, lock_key = EXCLUDED.lock_key,
           error = NULL, attempts = 0, crash_count = 0, watchdog_retries = 0, resolved_inputs = NULL,
           seconds = NULL, vm_rss_mb_peak = NULL, input_spec = NULL, context_delta = '{}',
           blocked_reason = NULL, available_at = NULL, cancel_requested_at = NULL, progress = NULL,
           created_at = now(), started_at = NULL
     WHERE j.generation < EXCLUDED.generation AND j.status IN ('failed', 'cancelled');
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOREACH v_function IN ARRAY
        ARRAY['queue_workflows_ask_turn(name, text)', 'queue_workflows_take_turns()']::regprocedure[]
    LOOP
        -- A session's temporary tables come first where they are not named.
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp',
                       v_function, current_schema());
    END LOOP;
END $$;
-- A trigger fires without it; whoever has it hangs the function on a table of his own.
REVOKE ALL ON FUNCTION queue_workflows_take_turns() FROM PUBLIC;
