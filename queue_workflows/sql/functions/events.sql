-- Wake the jobs that wait for an event.

-- Let an orchestrator wake the jobs that wait for a new event, once it is committed. The sender writes its own row alone:
-- while its transaction is open, it holds no job and no step.
CREATE OR REPLACE FUNCTION queue_workflows_event_sent() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off AS $$
BEGIN
    IF EXISTS (SELECT FROM added e JOIN job_steps s ON s.name = e.name AND s.key = e.key
                WHERE s.kind = 'event' AND s.state = 'waiting') THEN
        PERFORM pg_notify('orchestrator_work', 'sent');
    END IF;
    RETURN NULL;
END $$;

-- tables: ingest_jobs workflow_node_jobs
-- Wake up to `p_most` jobs of one family, as queue_workflows_wake_waiting() does; return how many steps were woken. Their
-- jobs become claimable, if they are queued since these steps wait. A job that is kept for a host is kept from now on, for
-- the time that was set for the end of the wait, at most a day.
CREATE OR REPLACE FUNCTION queue_workflows_ingest_wake(p_name text, p_key text, p_most integer) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_timeout text := current_setting('lock_timeout');
    v_steps   bigint[];
    v_queues  text[];
BEGIN
    IF p_name IS NOT NULL THEN
        BEGIN
            PERFORM set_config('lock_timeout', '1s', true);
            PERFORM FROM job_steps s JOIN ingest_jobs j ON j.id = s.job_id
              WHERE s.job_table = 'ingest_jobs' AND s.kind = 'event' AND s.state = 'waiting'
                AND (s.name, s.key) = (p_name, p_key) AND j.status = 'running' FOR NO KEY UPDATE OF j;
            PERFORM set_config('lock_timeout', v_timeout, true);
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            NULL;  -- which also sets lock_timeout back
        END;
    END IF;
    WITH found AS MATERIALIZED (
        SELECT s.id
          FROM job_steps s
          JOIN ingest_jobs j ON j.id = s.job_id
         WHERE s.job_table = 'ingest_jobs' AND s.kind = 'event' AND s.state = 'waiting'
           AND (p_name IS NULL OR (s.name, s.key) = (p_name, p_key))
           AND EXISTS (SELECT FROM events e WHERE e.name = s.name AND e.key = s.key OFFSET 0)
         LIMIT p_most FOR UPDATE OF s, j SKIP LOCKED),
    woken AS (
        UPDATE job_steps s SET state = 'running' WHERE s.id = ANY (ARRAY(SELECT id FROM found)) RETURNING s.id)
    SELECT array_agg(w.id) INTO v_steps FROM woken w;
    WITH woken AS (
        UPDATE ingest_jobs j
           SET (available_at, resume_at, resume_until) = (
                   SELECT u.at, CASE WHEN u.at IS NOT NULL THEN now() END, u.at
                     FROM (SELECT CASE WHEN j.resume_until = j.available_at AND j.resume_at < j.resume_until
                                       THEN now() + least(j.resume_until - j.resume_at, interval '1 day') END) AS u (at))
          FROM job_steps s
         WHERE s.id = ANY (v_steps) AND j.id = s.job_id AND j.claim_no = s.claim_no
           AND j.status = 'queued' AND j.blocked_reason = 'not_due'
           AND (j.resume_until = j.available_at AND j.resume_at <= now()) IS NOT TRUE
     RETURNING j.queue, j.available_at)
    SELECT array_agg(DISTINCT w.queue) INTO v_queues FROM woken w WHERE w.available_at IS NOT NULL;
    PERFORM pg_notify('ingest_job_ready', q) FROM unnest(v_queues) q;
    RETURN coalesce(cardinality(v_steps), 0);
END $$;

-- Wake up to `p_most` jobs of each family whose event, of this name and key if they are not NULL, is there although they
-- wait for it. Return how many steps were woken. Locked rows are left for later, since a session of an app may keep one
-- locked. If a name is given, it waits up to a second for running jobs, since a worker that gives one up has perhaps not
-- seen the event. A plan for other names would read every waiting step.
CREATE OR REPLACE FUNCTION queue_workflows_wake_waiting(p_name text, p_key text, p_most integer)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM queue_workflows_demand('UPDATE', 'ingest_jobs', 'status');
    RETURN queue_workflows_ingest_wake(p_name, p_key, p_most) + queue_workflows_node_wake(p_name, p_key, p_most);
END $$;
