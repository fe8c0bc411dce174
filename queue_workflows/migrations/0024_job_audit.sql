-- Every change of an ingest job's state leaves a row that nobody changes afterwards, and says who made it.

-- Who, where no worker did it by itself: a person, a host's plain SQL, a sweep.
ALTER TABLE ingest_job_events ADD COLUMN IF NOT EXISTS actor text;

-- What a session calls itself (SET queue_workflows.actor), else its login and its application.
CREATE OR REPLACE FUNCTION queue_workflows_actor() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT left(coalesce(nullif(current_setting('queue_workflows.actor', true), ''),
                         session_user || coalesce(' (' || nullif(current_setting('application_name'), '') || ')', '')),
                200)
$$;

-- A row of a job's history. The triggers that call it run as its owner; who calls it by name has no more than
-- his own rights.
CREATE OR REPLACE FUNCTION queue_workflows_audit(p_job ingest_jobs, p_event text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ingest_job_events
           (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, error, actor)
    VALUES (p_job.id, p_job.attempts, p_event, p_job.claim_no, p_job.worker_id, p_job.claimed_by, p_job.queue,
            CASE WHEN p_job.status IN ('completed', 'failed', 'cancelled') THEN p_job.seconds END,
            p_job.error, queue_workflows_actor());
END $$;

-- The statements of a claim (take, complete, fail, hand back, reclaim) log what they do. What is left is said
-- here: a claim and an end by a plain UPDATE, and whatever becomes of a job that does not run. As in 0023 but
-- for that.
CREATE OR REPLACE FUNCTION queue_workflows_job_changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_let_in boolean := false;
BEGIN
    -- Ranges of what every claim writes; 0031 has those of the other columns, and says which one it was.
    IF NEW.claim_no NOT BETWEEN 0 AND 1000000000 OR NEW.seconds NOT BETWEEN -1e12 AND 1e12
       OR greatest(NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at, NEW.finished_at, NEW.available_at,
                   NEW.cancel_requested_at) > '9999-12-31+00'
       OR least(NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at, NEW.finished_at, NEW.available_at,
                NEW.cancel_requested_at) < '2000-01-01+00' THEN
        PERFORM queue_workflows_refuse(TG_TABLE_NAME::text, to_jsonb(OLD), to_jsonb(NEW));
    END IF;
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
            IF OLD.blocked_reason IN ('locked', 'limited', 'unserved') OR EXISTS (
                SELECT FROM queue_settings s
                 WHERE s.queue = OLD.queue
                   AND (s.paused_at IS NOT NULL AND (s.paused_until IS NULL OR s.paused_until > now())
                        OR s.max_running IS NOT NULL OR s.rate_limit IS NOT NULL)) THEN
                RETURN NULL;  -- who knows no lock keys and no limits finds no job
            END IF;
            NEW.claim_no := OLD.claim_no + 1;
            NEW.worker_id := 'legacy:' || coalesce(NEW.claimed_by, 'unknown');
            IF TG_TABLE_NAME = 'ingest_jobs' THEN
                PERFORM queue_workflows_audit(NEW, 'claimed');
            END IF;
            NEW.lease_expires_at := coalesce(NEW.lease_expires_at, now() + interval '600 seconds');
            NEW.blocked_reason := NULL;
            NEW.available_at := NULL;
        END IF;
        RETURN NEW;
    END IF;
    IF NEW.status = 'queued' THEN
        NEW.claimed_by := OLD.claimed_by;  -- for the history; cleared below
    END IF;
    IF TG_TABLE_NAME = 'ingest_jobs' AND (OLD.status <> 'running' OR NEW.worker_id IS NOT NULL) THEN
        PERFORM queue_workflows_audit(NEW, CASE WHEN NEW.status <> 'queued' THEN NEW.status::text
                                                WHEN OLD.status = 'running' THEN 'requeued' ELSE 'retried' END);
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
    -- As a number, since a policy that plain SQL wrote may hold anything under the key.
    IF NEW.status = 'awaiting_input' AND jsonb_typeof(NEW.policy -> 'timeout_s') = 'number' THEN
        INSERT INTO workflow_input_timeouts AS t (job_id, claim_no, due_at)
        VALUES (NEW.id, NEW.claim_no, now() + interval '1 second'
                * least(greatest((NEW.policy -> 'timeout_s')::numeric, 0), 31622400)::float8)
            ON CONFLICT (job_id) DO UPDATE SET claim_no = EXCLUDED.claim_no, due_at = EXCLUDED.due_at;
    END IF;
    IF NEW.status = 'queued' THEN
        -- Apps ask for `claimed_by IS NULL`, and a worker of 0.3.0 stops only when it is cleared.
        NEW.claimed_by := NULL;
        NEW.started_at := NULL;
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

-- A running job's end is asked for, by whatever means.
CREATE OR REPLACE FUNCTION queue_workflows_audit_cancel() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.status = 'running' AND OLD.status = 'running'
       AND NEW.cancel_requested_at IS NOT NULL AND OLD.cancel_requested_at IS NULL THEN
        PERFORM queue_workflows_audit(NEW, 'cancel_requested');
    END IF;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS ingest_jobs_cancel_asked ON ingest_jobs;
CREATE TRIGGER ingest_jobs_cancel_asked BEFORE UPDATE OF cancel_requested_at ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_audit_cancel();

-- A job deleted by hand leaves what it was; what goes by its age leaves its rows to age.
CREATE OR REPLACE FUNCTION queue_workflows_audit_gone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(current_setting('queue_workflows.retention', true), '') <> 'on' THEN
        INSERT INTO ingest_job_events
               (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, error, detail, actor)
        SELECT id, attempts, 'deleted', claim_no, worker_id, claimed_by, queue, error,
               jsonb_strip_nulls(jsonb_build_object('task_name', task_name, 'status', status, 'reason', reason,
                   'created_at', created_at, 'idempotency_key', idempotency_key, 'lock_key', lock_key,
                   'partition_key', partition_key)),
               queue_workflows_actor()
          FROM gone;
    END IF;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS ingest_jobs_audit_gone ON ingest_jobs;
CREATE TRIGGER ingest_jobs_audit_gone AFTER DELETE ON ingest_jobs
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_audit_gone();

-- Append-only, but for retention, which says that it is it.
CREATE OR REPLACE FUNCTION queue_workflows_keep_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('queue_workflows.retention', true) = 'on' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION '% is append-only: % is refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'QW004',
              HINT = 'NODE_EVENT_RETENTION_DAYS says when old rows go; queue_workflows.retention.prune() does it.';
END $$;
DROP TRIGGER IF EXISTS ingest_job_events_keep ON ingest_job_events;
CREATE TRIGGER ingest_job_events_keep BEFORE UPDATE OR DELETE ON ingest_job_events
    FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_keep_events();

DO $$
DECLARE
    v_function regprocedure;
BEGIN
    -- Whoever may change a job may not write its history.
    FOREACH v_function IN ARRAY ARRAY[
        'queue_workflows_job_changed()', 'queue_workflows_audit_cancel()',
        'queue_workflows_audit_gone()']::regprocedure[]
    LOOP
        -- A session's temporary tables come first where they are not named.
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp',
                       v_function, current_schema());
    END LOOP;
END $$;
-- A trigger fires without it; whoever has it hangs the function on a table of his own.
REVOKE ALL ON FUNCTION queue_workflows_audit_gone() FROM PUBLIC;
