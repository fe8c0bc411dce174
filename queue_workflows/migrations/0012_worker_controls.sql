CREATE TABLE IF NOT EXISTS worker_controls (
    host_label    text NOT NULL,
    queue         text NOT NULL,
    desired_state text NOT NULL DEFAULT 'on',
    stop_policy   text NOT NULL DEFAULT 'hard',
    requested_by  text,
    updated_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (host_label, queue),
    CONSTRAINT worker_controls_desired_state_check CHECK (desired_state IN ('on', 'off'))
);
CREATE OR REPLACE FUNCTION notify_worker_control() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('worker_control', NEW.host_label || ':' || NEW.queue);
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS worker_control_notify ON worker_controls;
CREATE TRIGGER worker_control_notify AFTER INSERT OR UPDATE ON worker_controls
    FOR EACH ROW EXECUTE FUNCTION notify_worker_control();
