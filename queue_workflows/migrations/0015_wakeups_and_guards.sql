-- Wake-ups: one notification per statement and queue on INSERT, per row on UPDATE (equal ones fold).
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
CREATE TRIGGER node_job_ready_notify AFTER UPDATE ON workflow_node_jobs FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.blocked_reason IS NULL
          AND (OLD.status IS DISTINCT FROM NEW.status OR OLD.blocked_reason IS NOT NULL))
    EXECUTE FUNCTION notify_node_job_ready();

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
CREATE TRIGGER ingest_job_ready_notify AFTER UPDATE ON ingest_jobs FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.blocked_reason IS NULL
          AND (OLD.status IS DISTINCT FROM NEW.status OR OLD.blocked_reason IS NOT NULL))
    EXECUTE FUNCTION notify_ingest_job_ready();

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
CREATE TRIGGER workflow_run_ready_notify AFTER UPDATE ON workflow_runs FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.mode = 'node' AND NEW.available_at IS NULL
          AND (OLD.status IS DISTINCT FROM NEW.status OR OLD.available_at IS NOT NULL))
    EXECUTE FUNCTION notify_orchestrator('run');
DROP TRIGGER IF EXISTS dispatch_event_notify ON workflow_dispatch_events;
CREATE TRIGGER dispatch_event_notify AFTER INSERT ON workflow_dispatch_events
    FOR EACH STATEMENT EXECUTE FUNCTION notify_orchestrator('event');
DROP TRIGGER IF EXISTS input_submission_notify ON workflow_input_submissions;
CREATE TRIGGER input_submission_notify AFTER INSERT ON workflow_input_submissions
    FOR EACH STATEMENT EXECUTE FUNCTION notify_orchestrator('input');

-- What is not yet due is blocked until it is promoted.
CREATE OR REPLACE FUNCTION queue_workflows_hold_until_due() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.available_at > now() THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS workflow_node_jobs_hold ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_hold BEFORE INSERT ON workflow_node_jobs FOR EACH ROW
    WHEN (NEW.available_at IS NOT NULL AND NEW.blocked_reason IS NULL)
    EXECUTE FUNCTION queue_workflows_hold_until_due();
DROP TRIGGER IF EXISTS ingest_jobs_hold ON ingest_jobs;
CREATE TRIGGER ingest_jobs_hold BEFORE INSERT ON ingest_jobs FOR EACH ROW
    WHEN (NEW.available_at IS NOT NULL AND NEW.blocked_reason IS NULL)
    EXECUTE FUNCTION queue_workflows_hold_until_due();

-- A terminal job stays what it is within its generation; a claim made by a plain UPDATE gets an identity;
-- whoever leaves `running` leaves the claim behind.
CREATE OR REPLACE FUNCTION queue_workflows_guard_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.status IN ('completed', 'failed', 'cancelled', 'skipped')
       AND NEW.status <> OLD.status AND NEW.generation <= OLD.generation THEN
        RAISE EXCEPTION 'job % is % and stays so; retry_job() or retry_run() reopens it', OLD.id, OLD.status
            USING ERRCODE = 'QW002';
    END IF;
    IF NEW.status = 'running' AND OLD.status <> 'running' AND NEW.claim_no = OLD.claim_no THEN
        NEW.claim_no := OLD.claim_no + 1;
        NEW.worker_id := 'legacy:' || coalesce(NEW.claimed_by, 'unknown');
        NEW.lease_expires_at := coalesce(NEW.lease_expires_at, now() + interval '600 seconds');
    ELSIF NEW.status <> 'running' THEN
        NEW.worker_id := NULL;
        NEW.lease_expires_at := NULL;
        IF NEW.status = 'queued' AND NEW.available_at > now() THEN
            NEW.blocked_reason := 'not_due';
        END IF;
    END IF;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS workflow_node_jobs_guard ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_guard BEFORE UPDATE ON workflow_node_jobs FOR EACH ROW WHEN (
    (OLD.status IN ('completed', 'failed', 'cancelled', 'skipped') AND NEW.status <> OLD.status)
    OR (NEW.status = 'running' AND OLD.status <> 'running' AND NEW.claim_no = OLD.claim_no)
    OR (NEW.status <> 'running' AND (NEW.worker_id IS NOT NULL OR NEW.lease_expires_at IS NOT NULL))
    OR (NEW.status = 'queued' AND NEW.blocked_reason IS NULL AND NEW.available_at > now()))
    EXECUTE FUNCTION queue_workflows_guard_job();
DROP TRIGGER IF EXISTS ingest_jobs_guard ON ingest_jobs;
CREATE TRIGGER ingest_jobs_guard BEFORE UPDATE ON ingest_jobs FOR EACH ROW WHEN (
    (OLD.status IN ('completed', 'failed', 'cancelled') AND NEW.status <> OLD.status)
    OR (NEW.status = 'running' AND OLD.status <> 'running' AND NEW.claim_no = OLD.claim_no)
    OR (NEW.status <> 'running' AND (NEW.worker_id IS NOT NULL OR NEW.lease_expires_at IS NOT NULL))
    OR (NEW.status = 'queued' AND NEW.blocked_reason IS NULL AND NEW.available_at > now()))
    EXECUTE FUNCTION queue_workflows_guard_job();

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
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'run % is % and stays so; retry_run() reopens it', OLD.id, OLD.status
        USING ERRCODE = 'QW002';
END $$;
DROP TRIGGER IF EXISTS workflow_runs_guard ON workflow_runs;
CREATE TRIGGER workflow_runs_guard BEFORE UPDATE ON workflow_runs FOR EACH ROW
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
    SELECT run_id, node_id, id, attempts, 'cancelled', queue, claim_no,
           jsonb_build_object('reason', 'run ' || NEW.status)
      FROM closed;
    PERFORM pg_notify('job_cancel', left(NEW.id, 1000))
      WHERE EXISTS (SELECT FROM workflow_node_jobs WHERE run_id = NEW.id AND status = 'running');
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS workflow_runs_close ON workflow_runs;
CREATE TRIGGER workflow_runs_close AFTER UPDATE ON workflow_runs FOR EACH ROW
    WHEN (NEW.mode = 'node' AND NEW.status IN ('completed', 'failed', 'cancelled')
          AND OLD.status IS DISTINCT FROM NEW.status)
    EXECUTE FUNCTION queue_workflows_close_run();

-- A running job whose end is asked for hears of it at once.
CREATE OR REPLACE FUNCTION notify_job_cancel() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('job_cancel', left(NEW.id, 1000));
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS workflow_node_jobs_cancel_notify ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_cancel_notify AFTER UPDATE ON workflow_node_jobs FOR EACH ROW
    WHEN (NEW.status = 'running' AND NEW.cancel_requested_at IS NOT NULL AND OLD.cancel_requested_at IS NULL)
    EXECUTE FUNCTION notify_job_cancel();
DROP TRIGGER IF EXISTS ingest_jobs_cancel_notify ON ingest_jobs;
CREATE TRIGGER ingest_jobs_cancel_notify AFTER UPDATE ON ingest_jobs FOR EACH ROW
    WHEN (NEW.status = 'running' AND NEW.cancel_requested_at IS NOT NULL AND OLD.cancel_requested_at IS NULL)
    EXECUTE FUNCTION notify_job_cancel();
