-- Failures that a scheduler sends as alerts: noted in the transaction of the failure, while there is a sender.

-- Note one failure in failure_alerts. A failure is noted only if a sender was there within its ALERT_MAX_AGE_S, and
-- fewer than about 10,000 failures wait. Long names and errors are cut, so that no text can prevent the end of a job.
-- Only triggers that run as the owner call it.
CREATE OR REPLACE FUNCTION queue_workflows_alert(
    p_kind text, p_subject text, p_occurrence text, p_name text, p_reason text, p_error text,
    p_queue text DEFAULT NULL, p_schedule text DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM failure_alert_state WHERE wanted_until > now())
       OR (SELECT max(id)::numeric FROM failure_alerts) - (SELECT min(id) FROM failure_alerts) >= 10000 THEN
        RETURN;
    END IF;
    INSERT INTO failure_alerts (kind, subject, occurrence, name, queue, schedule, app, reason, error)
    SELECT p_kind, cut[1], p_occurrence, cut[2], cut[3], cut[4],
           (SELECT s.app FROM schedules s WHERE s.name = cut[4] AND s.on_failure), p_reason, left(p_error, 2000)
      FROM (SELECT array_agg(CASE WHEN octet_length(t.given) <= 2000 THEN t.given ELSE left(t.given, 500) END
                             ORDER BY t.n) AS cut
              FROM unnest(ARRAY[p_subject, p_name, p_queue, coalesce(p_schedule, CASE WHEN p_kind = 'run' THEN
                       (SELECT f.name FROM schedule_fires f WHERE f.run_id = p_subject LIMIT 1) END)])
                   WITH ORDINALITY AS t (given, n)) names
        ON CONFLICT (kind, subject, occurrence) DO NOTHING;
END $$;

-- Note a run that has failed, by any statement. A child run is not noted if a node of a live run waited for it. That
-- node has failed in this transaction (workflow_runs_child_ended fires first), and the parent decides what follows: its
-- own failure names the child, and a map may let items fail.
CREATE OR REPLACE FUNCTION queue_workflows_run_failed() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    -- After a downgrade there are no child runs.
    IF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = TG_RELID AND a.attname = 'parent_run_id') THEN
        IF NEW.parent_run_id IS NOT NULL AND EXISTS (
            SELECT FROM workflow_node_jobs j
              JOIN workflow_runs r ON r.id = j.run_id AND NOT queue_workflows_is_terminal_run(r.status)
             WHERE j.run_id = NEW.parent_run_id AND j.node_id = NEW.parent_node_id AND j.child_run_id = NEW.id
               AND j.status = 'failed' AND j.finished_at = now()) THEN
            RETURN NULL;
        END IF;
    END IF;
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
