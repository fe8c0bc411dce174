-- Record changes of jobs in their history, with the role that made them. No role can edit the history of ingest jobs.

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
            CASE WHEN queue_workflows_is_terminal_job(p_job.status) THEN p_job.seconds END,
            p_job.error, queue_workflows_actor());
END $$;

-- Refuse UPDATE and DELETE of the history (SQLSTATE QW004), except that retention deletes old rows.
CREATE OR REPLACE FUNCTION queue_workflows_keep_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('queue_workflows.retention', true) = 'on' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION '% is append-only: % is refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'QW004',
              HINT = 'NODE_EVENT_RETENTION_DAYS sets when they are deleted; `queue-workflows prune` deletes them now.';
END $$;

-- tables: ingest_jobs workflow_node_jobs
-- Append the event of a transition to the history of its job. If a node ended or waits for an answer, also append it to
-- the outbox, from which the orchestrator advances the run. The statement that makes the transition calls this in
-- RETURNING. `job`: the row as it is now. `event`: the type of the event. `host`: the host label that the job had
-- before, as a queued job has none. `worker`: the worker that held the claim, or NULL if an operator or the engine made
-- the transition. Returns `job`.
CREATE OR REPLACE FUNCTION queue_workflows_record(
    job ingest_jobs, event text, host text DEFAULT NULL, worker text DEFAULT NULL,
    seconds double precision DEFAULT NULL, error text DEFAULT NULL, detail jsonb DEFAULT NULL)
RETURNS ingest_jobs LANGUAGE plpgsql AS $$
BEGIN
    -- An attempt is a smallint in the history of nodes and an integer in a job: no counter may keep a job from its end.
    INSERT INTO ingest_job_events
           (
            run_id, node_id, model,  -- nodes only
            actor,  -- ingest only
            job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, error, detail)
    VALUES (
            job.run_id, job.node_id, job.required_model, job.id, greatest(0, least(job.attempts, 32767)),  -- nodes only
            CASE WHEN worker IS NULL THEN queue_workflows_actor() END, job.id, job.attempts,  -- ingest only
            event, job.claim_no, worker, coalesce(job.claimed_by, host), job.queue, seconds,
            coalesce(error, job.error), coalesce(detail, '{}'));
    IF job.status IN ('completed', 'failed', 'awaiting_input') THEN  -- nodes only
        INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no, generation)  -- nodes only
        VALUES (job.run_id, job.node_id, job.status, job.id, job.claim_no, job.generation);  -- nodes only
    END IF;  -- nodes only
    RETURN job;
END $$;
