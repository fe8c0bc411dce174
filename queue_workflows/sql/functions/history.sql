-- The history of ingest jobs, which nobody changes afterwards.

-- Return who makes a change: the setting queue_workflows.actor, else the login and its application_name.
CREATE OR REPLACE FUNCTION queue_workflows_actor() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT left(coalesce(nullif(current_setting('queue_workflows.actor', true), ''),
                         session_user || coalesce(' (' || nullif(current_setting('application_name'), '') || ')', '')),
                200)
$$;

-- Insert one row of an ingest job's history. The triggers that call it run as their owner; a role that calls it
-- by name needs the right to insert the row itself.
CREATE OR REPLACE FUNCTION queue_workflows_audit(p_job ingest_jobs, p_event text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ingest_job_events
           (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, error, actor)
    VALUES (p_job.id, p_job.attempts, p_event, p_job.claim_no, p_job.worker_id, p_job.claimed_by, p_job.queue,
            CASE WHEN p_job.status IN ('completed', 'failed', 'cancelled') THEN p_job.seconds END,
            p_job.error, queue_workflows_actor());
END $$;

-- Record that the cancellation of a running ingest job was requested.
CREATE OR REPLACE FUNCTION queue_workflows_audit_cancel() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF NEW.status = 'running' AND OLD.status = 'running'
       AND NEW.cancel_requested_at IS NOT NULL AND OLD.cancel_requested_at IS NULL THEN
        PERFORM queue_workflows_audit(NEW, 'cancel_requested');
    END IF;
    RETURN NEW;
END $$;

-- Record what a deleted ingest job was. Retention sets queue_workflows.retention, and its deletions are not
-- recorded.
CREATE OR REPLACE FUNCTION queue_workflows_audit_gone() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
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

-- Refuse UPDATE and DELETE of the history (SQLSTATE QW004), except that retention deletes old rows.
CREATE OR REPLACE FUNCTION queue_workflows_keep_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('queue_workflows.retention', true) = 'on' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION '% is append-only: % is refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'QW004',
              HINT = 'NODE_EVENT_RETENTION_DAYS says when old rows go; queue_workflows.retention.prune() does it.';
END $$;
