DROP TRIGGER IF EXISTS ingest_job_events_keep ON ingest_job_events;
DROP FUNCTION IF EXISTS queue_workflows_keep_events();
DROP TRIGGER IF EXISTS ingest_jobs_audit_gone ON ingest_jobs;
DROP FUNCTION IF EXISTS queue_workflows_audit_gone();
DROP TRIGGER IF EXISTS ingest_jobs_cancel_asked ON ingest_jobs;
DROP FUNCTION IF EXISTS queue_workflows_audit_cancel();
CREATE OR REPLACE FUNCTION queue_workflows_job_changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_let_in boolean := false;
BEGIN
    IF NEW.partition_key IS NOT NULL OR OLD.partition_key IS NOT NULL THEN
        IF TG_TABLE_NAME = 'ingest_jobs' THEN
            IF OLD.admitted_at IS NOT NULL OR NEW.blocked_reason IN ('limited', 'admitted', 'held_back')
               OR EXISTS (SELECT FROM queue_partition_limits l WHERE l.queue IN (OLD.queue, NEW.queue)) THEN
                DECLARE
                    v_passed ingest_jobs;  -- here, as each call of its block makes room for a row
                BEGIN
                    v_passed := queue_workflows_limit_gate(OLD, NEW);
                    IF v_passed.id IS NULL THEN
                        RETURN NULL;
                    END IF;
                    NEW := v_passed;
                END;
            END IF;
        END IF;
    END IF;
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
            IF OLD.blocked_reason IN ('locked', 'limited') OR EXISTS (
                SELECT FROM queue_settings s
                 WHERE s.queue = OLD.queue
                   AND (s.paused_at IS NOT NULL AND (s.paused_until IS NULL OR s.paused_until > now())
                        OR s.max_running IS NOT NULL OR s.rate_limit IS NOT NULL)) THEN
                RETURN NULL;  -- who knows no lock keys and no limits finds no job
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
    IF OLD.status = 'running' AND TG_TABLE_NAME = 'ingest_jobs' THEN
        PERFORM pg_notify(TG_ARGV[0], s.queue) FROM queue_settings s
          WHERE s.queue = OLD.queue AND s.max_running IS NOT NULL;
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
DROP FUNCTION IF EXISTS queue_workflows_audit(ingest_jobs, text);
DROP FUNCTION IF EXISTS queue_workflows_actor();
ALTER TABLE ingest_job_events DROP COLUMN IF EXISTS actor;
