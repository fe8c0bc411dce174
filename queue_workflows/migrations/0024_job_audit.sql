-- Every change of an ingest job's state leaves a row that nobody changes afterwards, and says who made it.

-- Who, where no worker did it by itself: a person, a host's plain SQL, a sweep.
ALTER TABLE ingest_job_events ADD COLUMN IF NOT EXISTS actor text;

-- What a session calls itself (SET queue_workflows.actor), else its login and its application.
CREATE OR REPLACE FUNCTION queue_workflows_actor() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT left(coalesce(nullif(current_setting('queue_workflows.actor', true), ''),
                         session_user || coalesce(' (' || nullif(current_setting('application_name'), '') || ')', '')),
                200)
$$;

-- As its owner (see the end), here and below: whoever may change a job may not write its history.
CREATE OR REPLACE FUNCTION queue_workflows_audit(p_job ingest_jobs, p_event text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF pg_trigger_depth() = 0 THEN
        RAISE EXCEPTION 'only triggers write the history of jobs' USING ERRCODE = 'insufficient_privilege';
    END IF;
    INSERT INTO ingest_job_events
           (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, error, actor)
    VALUES (p_job.id, p_job.attempts, p_event, p_job.claim_no, p_job.worker_id, p_job.claimed_by, p_job.queue,
            CASE WHEN p_job.status IN ('completed', 'failed', 'cancelled') THEN p_job.seconds END,
            p_job.error, queue_workflows_actor());
END $$;

-- The statements of a claim (take, complete, fail, hand back, reclaim) log what they do. What is left is said
-- here: a claim and an end by a plain UPDATE, and whatever becomes of a job that does not run. Two lines into
-- the function as the migrations before this one leave it; where they are not found nothing is migrated.
DO $patch$
DECLARE
    v_source text := pg_get_functiondef('queue_workflows_job_changed()'::regprocedure);
    v_lines  text[] := ARRAY[
        $$            NEW.worker_id := 'legacy:' || coalesce(NEW.claimed_by, 'unknown');$$,
        $$    -- Our own statements take the worker off; what leaves it on is a plain UPDATE, which knows no claim.$$];
    v_added  text[] := ARRAY[
        v_lines[1] || $$
            IF TG_TABLE_NAME = 'ingest_jobs' THEN
                PERFORM queue_workflows_audit(NEW, 'claimed');
            END IF;$$,
        $$    IF TG_TABLE_NAME = 'ingest_jobs' AND (OLD.status <> 'running' OR NEW.worker_id IS NOT NULL) THEN
        PERFORM queue_workflows_audit(NEW, CASE WHEN NEW.status <> 'queued' THEN NEW.status::text
                                                WHEN OLD.status = 'running' THEN 'requeued' ELSE 'retried' END);
    END IF;
$$ || v_lines[2]];
BEGIN
    FOR i IN 1..2 LOOP
        IF (length(v_source) - length(replace(v_source, v_lines[i], ''))) <> length(v_lines[i]) THEN
            RAISE EXCEPTION 'queue_workflows_job_changed() has not once the line "%"', trim(v_lines[i]);
        END IF;
        v_source := replace(v_source, v_lines[i], v_added[i]);
    END LOOP;
    EXECUTE v_source;
END $patch$;

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
    FOREACH v_function IN ARRAY ARRAY[
        'queue_workflows_audit(ingest_jobs, text)', 'queue_workflows_audit_gone()']::regprocedure[]
    LOOP
        -- A session's temporary tables come first where they are not named.
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp',
                       v_function, current_schema());
    END LOOP;
END $$;
-- A trigger fires without it; whoever has it hangs the function on a table of his own.
REVOKE ALL ON FUNCTION queue_workflows_audit_gone() FROM PUBLIC;
