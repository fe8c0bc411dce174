-- Tell an idle worker when to claim again: a claim without a job returns when the next delayed job of its queue is due.

-- tables: ingest_jobs workflow_node_jobs
-- Return in how many seconds the next delayed job of a queue is due, or NULL if none is known to be due within
-- `p_within_s` seconds (at most a day). A job that is kept for `p_host` is due when its wait ends. With `p_overdue`,
-- return 0 if a job is due already, since a claim without promotion does not take it. The index has the delayed jobs of
-- all queues, and only its first 100 are read. The worker's poll finds a job that comes later.
CREATE OR REPLACE FUNCTION queue_workflows_ingest_due_in(
    p_host text, p_queue text, p_within_s double precision, p_overdue boolean) RETURNS double precision
LANGUAGE plpgsql STABLE
{by_index()} AS $$
DECLARE
    v_until timestamptz := now() + greatest(0, least(p_within_s, 86400)) * interval '1 second';
    v_at    timestamptz;
BEGIN
    IF p_overdue AND EXISTS (
        SELECT FROM (SELECT j.queue, j.blocked_reason FROM ingest_jobs j
                      WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL AND j.available_at <= now()
                      ORDER BY j.available_at LIMIT 100) d
         WHERE d.queue = p_queue AND d.blocked_reason = 'not_due') THEN
        RETURN 0;
    END IF;
    SELECT least(
               (SELECT k.resume_at FROM ingest_jobs k
                 WHERE {kept(k)} AND k.resume_at > now() AND k.resume_at <= v_until
                 ORDER BY k.resume_host, k.queue, k.resume_at LIMIT 1),
               (SELECT d.available_at
                  FROM (SELECT j.queue, j.blocked_reason, j.available_at FROM ingest_jobs j
                         WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL
                           AND j.available_at > now() AND j.available_at <= v_until
                         ORDER BY j.available_at LIMIT 100) d
                 WHERE d.queue = p_queue AND d.blocked_reason = 'not_due' ORDER BY d.available_at LIMIT 1))
      INTO v_at;
    -- greatest() ignores NULL.
    RETURN CASE WHEN v_at IS NOT NULL THEN greatest(0, extract(epoch FROM v_at - clock_timestamp())) END;
END $$;
