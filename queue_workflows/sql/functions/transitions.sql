-- Every change of a job's state by an UPDATE, of both families.

-- Check and complete an UPDATE of a job. The trigger's first argument names the channel to notify; with a second one
-- the table counts lapses, which a downgrade takes away. A terminal job keeps its status within its generation
-- (SQLSTATE QW002). A claim by a plain UPDATE gets a claim number, a worker and a lease. A job that leaves `running`
-- loses its claim. Limits and lock keys decide whether a queued job is claimable. Jobs that become claimable and jobs
-- to cancel are notified. It records every change of state of an ingest job, except by statements that end or make a
-- claim, which record it themselves (decision 0025). It runs as its owner, because a role that may change a job may
-- not write its history.
CREATE OR REPLACE FUNCTION queue_workflows_job_changed() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    v_admits boolean := false;  -- whether this is the admission, which gives the lock key to the job or takes it back
BEGIN
    -- Ranges of the columns that every claim writes. queue_workflows_bound_job checks the other columns.
    IF NEW.claim_no NOT BETWEEN 0 AND 1000000000 OR NEW.seconds NOT BETWEEN -1e12 AND 1e12
       OR greatest(NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at, NEW.finished_at, NEW.available_at,
                   NEW.cancel_requested_at) > '9999-12-31+00'
       OR least(NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at, NEW.finished_at, NEW.available_at,
                NEW.cancel_requested_at) < '2000-01-01+00' THEN
        PERFORM queue_workflows_refuse(TG_TABLE_NAME::text, to_jsonb(OLD), to_jsonb(NEW));
    END IF;
    IF NEW.lock_key = OLD.lock_key AND NEW.status = 'queued' AND OLD.status = 'queued'
       AND (NEW.blocked_reason IS NULL) <> (OLD.blocked_reason IS NULL)
       AND 'locked' IN (NEW.blocked_reason, OLD.blocked_reason) THEN
        v_admits := EXISTS (SELECT FROM lock_turns t WHERE t.xid = pg_current_xact_id() AND t.admits
                               AND t.jobs = TG_TABLE_NAME AND t.lock_key = NEW.lock_key);
        IF v_admits AND NEW.blocked_reason = 'locked' THEN
            RETURN NEW;
        END IF;
    END IF;
    IF (NEW.partition_key IS NOT NULL OR OLD.partition_key IS NOT NULL) AND NOT v_admits THEN
        IF TG_TABLE_NAME = 'ingest_jobs' THEN
            IF coalesce(OLD.admitted_at, NEW.admitted_at) IS NOT NULL OR NEW.blocked_reason = 'limited'
               OR EXISTS (SELECT FROM queue_partition_limits l WHERE l.queue IN (OLD.queue, NEW.queue)) THEN
                DECLARE
                    v_passed ingest_jobs;  -- declared here: each call of the declaring block allocates a row
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
    -- The step functions write complete rows.
    IF NEW.lock_key IS NULL AND OLD.lock_key IS NULL
       AND (OLD.status = 'queued' AND NEW.status = 'running' AND NEW.claim_no > OLD.claim_no
            OR OLD.status = 'running' AND NEW.status = 'completed'
               AND NEW.worker_id IS NULL AND NEW.lease_expires_at IS NULL) THEN
        IF TG_NARGS > 1 THEN
            IF NEW.lapse_count > 0 AND NEW.status = 'completed' THEN
                NEW.lapse_count := 0;
            END IF;
        END IF;
        RETURN NEW;
    END IF;
    IF NEW.status = OLD.status THEN
        IF NEW.status = 'queued' THEN
            IF NEW.available_at > now() AND coalesce(NEW.blocked_reason, 'locked') = 'locked' THEN
                NEW.blocked_reason := 'not_due';
            ELSIF NEW.lock_key IS NOT NULL AND NOT v_admits AND (
                      NEW.blocked_reason IS NULL
                      AND (OLD.blocked_reason IS NOT NULL OR NEW.lock_key IS DISTINCT FROM OLD.lock_key)
                      OR NEW.available_at IS NULL AND NEW.blocked_reason = 'not_due') THEN
                NEW.blocked_reason := 'locked';
            ELSIF NEW.lock_key IS NULL AND OLD.lock_key IS NOT NULL
                  AND NEW.blocked_reason IN ('locked', 'unserved') THEN
                -- Without its key no other statement would admit it.
                NEW.blocked_reason := CASE WHEN NEW.available_at > now() THEN 'not_due' END;
                IF NEW.blocked_reason IS NULL THEN
                    PERFORM pg_notify(TG_ARGV[0], NEW.queue);
                END IF;
            ELSIF NEW.available_at IS NULL AND NEW.blocked_reason = 'not_due' THEN
                NEW.blocked_reason := NULL;
                PERFORM pg_notify(TG_ARGV[0], NEW.queue);
            ELSIF NEW.blocked_reason IS NULL AND OLD.blocked_reason IS NOT NULL THEN
                PERFORM pg_notify(TG_ARGV[0], NEW.queue);
            END IF;
        ELSIF NEW.status = 'running' AND NEW.cancel_requested_at IS NOT NULL
              AND OLD.cancel_requested_at IS NULL THEN
            IF TG_TABLE_NAME = 'ingest_jobs' THEN
                PERFORM queue_workflows_audit(NEW, 'cancel_requested');
            END IF;
            PERFORM pg_notify('job_cancel', left(NEW.id, 1000));
        END IF;
        IF NOT v_admits AND (OLD.lock_key IS NOT NULL OR NEW.lock_key IS NOT NULL)
           AND (NEW.lock_key IS DISTINCT FROM OLD.lock_key
                OR NEW.blocked_reason IS DISTINCT FROM OLD.blocked_reason) THEN
            PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, OLD.lock_key);
            PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
        END IF;
        RETURN NEW;
    END IF;
    IF queue_workflows_is_terminal_job(OLD.status)
       AND NEW.generation <= OLD.generation THEN
        RAISE EXCEPTION 'job % is % and stays so; retry_job() or retry_run() reopens it', OLD.id, OLD.status
            USING ERRCODE = 'QW002';
    END IF;
    IF OLD.status = 'completed' THEN
        PERFORM queue_workflows_forget_steps(TG_TABLE_NAME, ARRAY[OLD.id]);  -- it begins again
    END IF;
    IF NEW.status = 'running' THEN
        IF NEW.claim_no = OLD.claim_no THEN
            IF OLD.blocked_reason IN ('locked', 'limited', 'unserved', 'items') OR EXISTS (
                SELECT FROM queue_settings s
                 WHERE s.queue = OLD.queue
                   AND (queue_workflows_is_paused(s.paused_at, s.paused_until)
                        OR s.max_running IS NOT NULL OR s.rate_limit IS NOT NULL)) THEN
                RETURN NULL;  -- a statement of 0.3.0, which knows no lock keys and limits, finds no job
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
    IF OLD.status = 'running' AND NEW.crash_count > OLD.crash_count THEN
        DECLARE
            v_steps CONSTANT text := queue_workflows_charge_steps(TG_TABLE_NAME, OLD.id, OLD.claim_no);
        BEGIN
            IF NEW.status = 'failed' THEN
                NEW.error := left(NEW.error || coalesce('; in step ' || v_steps, ''), 8000);
            END IF;
        END;
    END IF;
    IF TG_NARGS > 1 THEN
        IF OLD.status = 'running' AND NEW.lapse_count = OLD.lapse_count THEN
            NEW.lapse_count := 0;  -- its end was recorded
        END IF;
    END IF;
    -- A statement that ends a claim clears worker_id and records the end itself; a plain UPDATE leaves it.
    IF TG_TABLE_NAME = 'ingest_jobs' AND (OLD.status <> 'running' OR NEW.worker_id IS NOT NULL) THEN
        PERFORM queue_workflows_audit(NEW, CASE WHEN NEW.status <> 'queued' THEN NEW.status::text
                                                WHEN OLD.status = 'running' THEN 'requeued' ELSE 'retried' END);
    END IF;
    -- The engine's own statements clear worker_id. A plain UPDATE, which knows no claim, leaves it set.
    IF OLD.status = 'running' AND NEW.worker_id = OLD.worker_id
       AND NEW.status IN ('completed', 'failed', 'awaiting_input')
       AND NOT starts_with(OLD.worker_id, 'legacy:') THEN
        RAISE EXCEPTION 'claim % of job % is held by %; to end it manually, call mark_completed() or mark_failed()',
            OLD.claim_no, OLD.id, OLD.worker_id USING ERRCODE = 'QW001';
    END IF;
    IF NEW.status = 'failed' AND TG_TABLE_NAME = 'ingest_jobs' THEN
        PERFORM queue_workflows_alert('job', NEW.id, NEW.generation::text, NEW.task_name, 'failed', NEW.error,
                                      NEW.queue, NEW.headers ->> 'schedule');
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
    -- Only a number counts: a policy written by plain SQL may hold any value under the key.
    IF NEW.status = 'awaiting_input' AND jsonb_typeof(NEW.policy -> 'timeout_s') = 'number' THEN
        INSERT INTO workflow_input_timeouts AS t (job_id, claim_no, due_at)
        VALUES (NEW.id, NEW.claim_no, now() + interval '1 second'
                * least(greatest((NEW.policy -> 'timeout_s')::numeric, 0), 31622400)::float8)
            ON CONFLICT (job_id) DO UPDATE SET claim_no = EXCLUDED.claim_no, due_at = EXCLUDED.due_at;
    END IF;
    IF NEW.status = 'queued' THEN
        -- Apps query `claimed_by IS NULL`, and a worker of 0.3.0 stops only when it is cleared.
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

-- tables: ingest_jobs workflow_node_jobs
-- Return whether a job that leaves its claim must end as cancelled: its cancellation was requested, or its run is over.
CREATE OR REPLACE FUNCTION queue_workflows_must_end(job ingest_jobs) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN job.cancel_requested_at IS NOT NULL;  -- ingest only
    RETURN job.cancel_requested_at IS NOT NULL OR EXISTS (  -- nodes only
        SELECT FROM workflow_runs r WHERE r.id = job.run_id AND queue_workflows_is_terminal_run(r.status));  -- nodes only
END $$;
