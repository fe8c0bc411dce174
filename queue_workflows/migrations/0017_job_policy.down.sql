DROP INDEX IF EXISTS workflow_node_jobs_lock_idx, ingest_jobs_lock_idx, workflow_node_jobs_line_idx,
    ingest_jobs_line_idx;
CREATE OR REPLACE FUNCTION queue_workflows_hold_until_due() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE FUNCTION queue_workflows_job_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.status = OLD.status THEN
        IF NEW.status = 'queued' THEN
            IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
                NEW.blocked_reason := 'not_due';
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
        RETURN NEW;
    END IF;
    IF OLD.status IN ('completed', 'failed', 'cancelled', 'skipped')
       AND NEW.generation <= OLD.generation THEN
        RAISE EXCEPTION 'job % is % and stays so; retry_job() or retry_run() reopens it', OLD.id, OLD.status
            USING ERRCODE = 'QW002';
    END IF;
    IF NEW.status = 'running' THEN
        IF NEW.claim_no = OLD.claim_no THEN
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
    IF NEW.status = 'queued' THEN
        IF NEW.available_at > now() THEN
            NEW.blocked_reason := 'not_due';
        ELSIF NEW.blocked_reason IS NULL THEN
            PERFORM pg_notify(TG_ARGV[0], NEW.queue);
        END IF;
    END IF;
    RETURN NEW;
END $$;
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
DROP TRIGGER IF EXISTS workflow_node_jobs_changed ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('node_job_ready');
DROP TRIGGER IF EXISTS ingest_jobs_changed ON ingest_jobs;
CREATE TRIGGER ingest_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('ingest_job_ready');
UPDATE workflow_node_jobs SET blocked_reason = NULL WHERE status = 'queued' AND blocked_reason = 'locked';
UPDATE ingest_jobs SET blocked_reason = NULL WHERE status = 'queued' AND blocked_reason = 'locked';
DROP TABLE IF EXISTS workflow_input_timeouts;
DROP FUNCTION IF EXISTS queue_workflows_mend_turns(text);
DROP TRIGGER IF EXISTS ingest_jobs_gone ON ingest_jobs;
DROP TRIGGER IF EXISTS workflow_node_jobs_gone ON workflow_node_jobs;
DROP FUNCTION IF EXISTS queue_workflows_jobs_gone();
DROP TABLE IF EXISTS lock_turns;
DROP FUNCTION IF EXISTS queue_workflows_take_turns();
DROP FUNCTION IF EXISTS queue_workflows_lock_keys(text, text[]);
DROP FUNCTION IF EXISTS queue_workflows_give_turns(text, text[]);
DROP FUNCTION IF EXISTS queue_workflows_ask_turn(name, text);
