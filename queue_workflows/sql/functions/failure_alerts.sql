-- Failures that a scheduler tells the app about: noted in the transaction of the failure, while there is a sender.

-- Note one failure in failure_alerts. Nothing is noted unless a sender was there within its ALERT_MAX_AGE_S, nor while
-- about 10,000 failures wait. Names and errors of any length are cut: no text may keep a job from its end. Only
-- triggers that run as the owner call it.
CREATE OR REPLACE FUNCTION queue_workflows_alert(
    p_kind text, p_subject text, p_occurrence text, p_name text, p_reason text, p_error text,
    p_queue text DEFAULT NULL, p_schedule text DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM failure_alert_state WHERE wanted_until > now())
       OR (SELECT max(id) FROM failure_alerts) - (SELECT min(id) FROM failure_alerts) >= 10000 THEN
        RETURN;
    END IF;
    INSERT INTO failure_alerts (kind, subject, occurrence, name, queue, schedule, reason, error)
    SELECT p_kind, cut[1], p_occurrence, cut[2], cut[3], cut[4], p_reason, left(p_error, 2000)
      FROM (SELECT array_agg(CASE WHEN octet_length(t.given) <= 2000 THEN t.given ELSE left(t.given, 500) END
                             ORDER BY t.n) AS cut
              FROM unnest(ARRAY[p_subject, p_name, p_queue, coalesce(p_schedule, CASE WHEN p_kind = 'run' THEN
                       (SELECT s.name FROM schedules s WHERE s.last_run_id = p_subject LIMIT 1) END)])
                   WITH ORDINALITY AS t (given, n)) names
        ON CONFLICT (kind, subject, occurrence) DO NOTHING;
END $$;

-- Note a run that has failed, whoever ended it.
CREATE OR REPLACE FUNCTION queue_workflows_run_failed() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM queue_workflows_alert('run', NEW.id, NEW.generation::text, NEW.workflow_name, 'failed', NEW.error);
    RETURN NULL;
END $$;

-- Note a schedule that has begun to fail, and an instant that was missed.
CREATE OR REPLACE FUNCTION queue_workflows_schedule_failed() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF NEW.error IS NOT NULL AND OLD.error IS NULL THEN
        PERFORM queue_workflows_alert(
            'schedule', NEW.name, 'cannot fire ' || extract(epoch FROM coalesce(NEW.next_at, NEW.changed_at)),
            coalesce(NEW.task_name, NEW.workflow_name), 'cannot_fire', NEW.error, NEW.queue, NEW.name);
    END IF;
    IF NEW.missed_at IS DISTINCT FROM OLD.missed_at AND NEW.missed_at IS NOT NULL THEN
        PERFORM queue_workflows_alert(
            'schedule', NEW.name, 'missed ' || extract(epoch FROM NEW.missed_at),
            coalesce(NEW.task_name, NEW.workflow_name), 'missed', 'nothing fired for its instant '
            || to_char(NEW.missed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'), NEW.queue, NEW.name);
    END IF;
    RETURN NULL;
END $$;
