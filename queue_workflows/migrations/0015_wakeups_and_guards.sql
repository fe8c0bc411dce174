-- Wake-ups on INSERT: one notification per statement and queue.
CREATE OR REPLACE FUNCTION notify_node_jobs_inserted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('node_job_ready', queue) FROM added
      WHERE status = 'queued' AND blocked_reason IS NULL GROUP BY queue;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS node_job_ready_notify ON workflow_node_jobs;
DROP TRIGGER IF EXISTS node_job_ready_notify_insert ON workflow_node_jobs;
CREATE TRIGGER node_job_ready_notify_insert AFTER INSERT ON workflow_node_jobs
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION notify_node_jobs_inserted();

CREATE OR REPLACE FUNCTION notify_ingest_jobs_inserted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('ingest_job_ready', queue) FROM added
      WHERE status = 'queued' AND blocked_reason IS NULL GROUP BY queue;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS ingest_job_ready_notify ON ingest_jobs;
DROP TRIGGER IF EXISTS ingest_job_ready_notify_insert ON ingest_jobs;
CREATE TRIGGER ingest_job_ready_notify_insert AFTER INSERT ON ingest_jobs
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION notify_ingest_jobs_inserted();

-- The orchestrator's own channel: payload names the kind of work.
CREATE OR REPLACE FUNCTION notify_orchestrator() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('orchestrator_work', TG_ARGV[0]);
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS workflow_run_ready_notify_insert ON workflow_runs;
CREATE TRIGGER workflow_run_ready_notify_insert AFTER INSERT ON workflow_runs FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.mode = 'node') EXECUTE FUNCTION notify_orchestrator('run');
DROP TRIGGER IF EXISTS workflow_run_ready_notify ON workflow_runs;
CREATE TRIGGER workflow_run_ready_notify AFTER UPDATE OF status, available_at ON workflow_runs FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.mode = 'node' AND NEW.available_at IS NULL
          AND (OLD.status IS DISTINCT FROM NEW.status OR OLD.available_at IS NOT NULL))
    EXECUTE FUNCTION notify_orchestrator('run');
-- An event that its worker has dispatched already comes in closed, and wakes nobody; nor does one that
-- follows close on an open one of its run, which has done so: every notification locks out all other
-- commits and wakes every listener. The orchestrator looks again after it has dispatched.
CREATE OR REPLACE FUNCTION notify_dispatch_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.processed_at IS NULL AND NOT EXISTS (
        SELECT FROM workflow_dispatch_events e
         WHERE e.run_id = NEW.run_id AND e.id BETWEEN NEW.id - 20 AND NEW.id - 1
           AND e.processed_at IS NULL AND e.available_at IS NULL) THEN
        PERFORM pg_notify('orchestrator_work', 'event');
    END IF;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS dispatch_event_notify ON workflow_dispatch_events;
CREATE TRIGGER dispatch_event_notify AFTER INSERT ON workflow_dispatch_events
    FOR EACH ROW EXECUTE FUNCTION notify_dispatch_event();
DROP TRIGGER IF EXISTS input_submission_notify ON workflow_input_submissions;
CREATE TRIGGER input_submission_notify AFTER INSERT ON workflow_input_submissions
    FOR EACH STATEMENT EXECUTE FUNCTION notify_orchestrator('input');

-- What is not yet due is blocked until it is promoted. No WHEN, here and below: the text of one is parsed
-- anew by every statement (20 us each here), which costs more than the function does for a row.
CREATE OR REPLACE FUNCTION queue_workflows_hold_until_due() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS workflow_node_jobs_hold ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_hold BEFORE INSERT ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_hold_until_due();
DROP TRIGGER IF EXISTS ingest_jobs_hold ON ingest_jobs;
CREATE TRIGGER ingest_jobs_hold BEFORE INSERT ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_hold_until_due();

-- One trigger for every change of a job's state.
-- A terminal job stays what it is within its generation; a claim made by a plain UPDATE gets an identity;
-- whoever leaves `running` leaves the claim behind; what becomes claimable, and what is to be cancelled,
-- is notified.
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
DROP TRIGGER IF EXISTS workflow_node_jobs_changed ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('node_job_ready');
DROP TRIGGER IF EXISTS ingest_jobs_changed ON ingest_jobs;
CREATE TRIGGER ingest_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('ingest_job_ready');

-- A run: `failed|cancelled -> queued` reopens it in a new generation; nothing else leaves a terminal state.
CREATE OR REPLACE FUNCTION queue_workflows_guard_run() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.generation > OLD.generation THEN
        RETURN NEW;
    END IF;
    IF NEW.status = 'queued' AND OLD.status IN ('failed', 'cancelled') THEN
        NEW.generation := OLD.generation + 1;
        NEW.finished_at := NULL;
        NEW.error := NULL;
        NEW.start_attempts := 0;
        NEW.available_at := NULL;
        NEW.queued_at := now();
        UPDATE workflow_node_jobs SET cancel_requested_at = NULL
         WHERE run_id = NEW.id AND status = 'running' AND cancel_requested_at IS NOT NULL;
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'run % is % and stays so; retry_run() reopens it', OLD.id, OLD.status
        USING ERRCODE = 'QW002';
END $$;
DROP TRIGGER IF EXISTS workflow_runs_guard ON workflow_runs;
CREATE TRIGGER workflow_runs_guard BEFORE UPDATE OF status ON workflow_runs FOR EACH ROW
    WHEN (OLD.mode = 'node' AND OLD.status IN ('completed', 'failed', 'cancelled')
          AND NEW.status IS DISTINCT FROM OLD.status)
    EXECUTE FUNCTION queue_workflows_guard_run();

-- A run that ends takes its waiting nodes with it, in the transaction that ends it.
CREATE OR REPLACE FUNCTION queue_workflows_close_run() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    WITH closed AS (
        UPDATE workflow_node_jobs
           SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
         WHERE run_id = NEW.id AND status IN ('queued', 'awaiting_input')
        RETURNING id, run_id, node_id, queue, attempts, claim_no)
    INSERT INTO workflow_node_events (run_id, node_id, job_id, attempt, event_type, queue, claim_no, detail)
    SELECT run_id, node_id, id, least(greatest(attempts, 0), 32767), 'cancelled', queue, claim_no,
           jsonb_build_object('reason', 'run ' || NEW.status)
      FROM closed;
    PERFORM pg_notify('job_cancel', left(NEW.id, 1000))
      WHERE EXISTS (SELECT FROM workflow_node_jobs WHERE run_id = NEW.id AND status = 'running');
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS workflow_runs_close ON workflow_runs;
CREATE TRIGGER workflow_runs_close AFTER UPDATE OF status ON workflow_runs FOR EACH ROW
    WHEN (NEW.mode = 'node' AND NEW.status IN ('completed', 'failed', 'cancelled')
          AND OLD.status IS DISTINCT FROM NEW.status)
    EXECUTE FUNCTION queue_workflows_close_run();
