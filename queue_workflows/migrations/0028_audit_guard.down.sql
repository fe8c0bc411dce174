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
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION queue_workflows_audit(ingest_jobs, text) SECURITY DEFINER'
                   ' SET search_path = %I, pg_temp', current_schema());
END $$;
