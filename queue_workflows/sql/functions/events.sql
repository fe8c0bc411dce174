-- Wake the jobs that wait for an event.

-- Make the jobs claimable whose handlers wait for a new event, in the transaction that inserts it. The steps come before
-- the jobs, as in queue_workflows_wake_waiting(): a job that is about to be queued again holds its step until then.
CREATE OR REPLACE FUNCTION queue_workflows_event_sent() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    v_steps bigint[];
BEGIN
    WITH arrived AS (
        UPDATE job_steps s SET state = 'running' FROM added e
         WHERE s.kind = 'event' AND s.state = 'waiting' AND s.name = e.name AND s.key = e.key
     RETURNING s.id)
    SELECT array_agg(a.id) INTO v_steps FROM arrived a;
    IF v_steps IS NOT NULL THEN
        PERFORM queue_workflows_wake_jobs(v_steps);
    END IF;
    RETURN NULL;
END $$;

-- Make the jobs of these steps claimable, if they are queued since these steps wait. Those that are kept for a host are
-- so from now on, for as long as they would have been at the end of the wait, at most a day.
CREATE OR REPLACE FUNCTION queue_workflows_wake_jobs(p_steps bigint[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_queues text[];
BEGIN
    WITH woken AS (
        UPDATE ingest_jobs j
           SET (available_at, resume_at, resume_until) = (
                   SELECT u.at, CASE WHEN u.at IS NOT NULL THEN now() END, u.at
                     FROM queue_workflows_kept_until(j.available_at, j.resume_at, j.resume_until) AS u (at))
          FROM job_steps s
         WHERE s.id = ANY (p_steps) AND s.job_table = 'ingest_jobs' AND j.id = s.job_id AND j.claim_no = s.claim_no
           AND j.status = 'queued' AND j.blocked_reason = 'not_due'
           AND (j.resume_until = j.available_at AND j.resume_at <= now()) IS NOT TRUE
     RETURNING j.queue, j.available_at)
    SELECT array_agg(DISTINCT w.queue) INTO v_queues FROM woken w WHERE w.available_at IS NOT NULL;
    PERFORM pg_notify('ingest_job_ready', q) FROM unnest(v_queues) q;
    WITH woken AS (
        UPDATE workflow_node_jobs j
           SET (available_at, resume_at, resume_until) = (
                   SELECT u.at, CASE WHEN u.at IS NOT NULL THEN now() END, u.at
                     FROM queue_workflows_kept_until(j.available_at, j.resume_at, j.resume_until) AS u (at))
          FROM job_steps s
         WHERE s.id = ANY (p_steps) AND s.job_table = 'workflow_node_jobs' AND j.id = s.job_id
           AND j.claim_no = s.claim_no AND j.status = 'queued' AND j.blocked_reason = 'not_due'
           AND (j.resume_until = j.available_at AND j.resume_at <= now()) IS NOT TRUE
     RETURNING j.queue, j.available_at)
    SELECT array_agg(DISTINCT w.queue) INTO v_queues FROM woken w WHERE w.available_at IS NOT NULL;
    PERFORM pg_notify('node_job_ready', q) FROM unnest(v_queues) q;
END $$;

-- Wake up to 1,000 jobs whose event is there although they wait: its transaction began to wait for them before theirs
-- was committed, or saw an older snapshot. Return how many steps were woken. Rows that are locked come later.
CREATE OR REPLACE FUNCTION queue_workflows_wake_waiting() RETURNS integer LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    v_steps bigint[];
BEGIN
    PERFORM queue_workflows_demand('UPDATE', 'ingest_jobs', 'status');
    WITH missed AS MATERIALIZED (
        SELECT s.id
          FROM job_steps s
         WHERE s.kind = 'event' AND s.state = 'waiting'
           AND EXISTS (SELECT FROM events e WHERE e.name = s.name AND e.key = s.key OFFSET 0)
         LIMIT 1000 FOR UPDATE SKIP LOCKED),
    woken AS (
        UPDATE job_steps s SET state = 'running' FROM missed m WHERE s.id = m.id RETURNING s.id)
    SELECT array_agg(w.id) INTO v_steps FROM woken w;
    IF v_steps IS NOT NULL THEN
        PERFORM queue_workflows_wake_jobs(v_steps);
    END IF;
    RETURN coalesce(cardinality(v_steps), 0);
END $$;
