-- Wake-ups of workers and of the orchestrator, sent when rows are inserted.

-- Wake the workers of every queue that an INSERT gave a claimable job. The trigger's argument names the channel of the table.
-- PostgreSQL sends equal notifications of one transaction once; a GROUP BY here would cost every INSERT of one job more than
-- the repeated calls cost a bulk INSERT. queue_workflows_node_step() sends no wake-up for the node that it claims itself.
CREATE OR REPLACE FUNCTION queue_workflows_jobs_added() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('queue_workflows.wakes_nobody', true) = 'on' THEN
        RETURN NULL;
    END IF;
    PERFORM pg_notify(TG_ARGV[0], queue) FROM added
      WHERE status = 'queued' AND blocked_reason IS NULL;
    RETURN NULL;
END $$;

-- Wake the orchestrator. The trigger's argument names the kind of work: 'run', 'delayed' (a run that starts later) or
-- 'input'. An event of an app sends 'sent' (queue_workflows_event_sent), a commit that leaves lock keys 'left'.
CREATE OR REPLACE FUNCTION notify_orchestrator() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('orchestrator_work', TG_ARGV[0]);
    RETURN NULL;
END $$;

-- Wake the orchestrator for a new outbox event. A closed event, which its worker has dispatched already, sends
-- no wake-up. Nor does an event that closely follows an open one of its run, which has sent the wake-up: every
-- notification serialises the commits and wakes every listener. The orchestrator polls again after it has
-- dispatched, so no event is missed.
CREATE OR REPLACE FUNCTION notify_dispatch_event() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    IF NEW.processed_at IS NULL AND NOT EXISTS (
        SELECT FROM workflow_dispatch_events e
         WHERE e.run_id = NEW.run_id AND e.id BETWEEN NEW.id - 20 AND NEW.id - 1
           AND e.processed_at IS NULL AND e.available_at IS NULL) THEN
        PERFORM pg_notify('orchestrator_work', 'event');
    END IF;
    RETURN NULL;
END $$;
