-- A host of 0.3.0 switches by statements that know no until_at. An end that is over is not theirs: it would make
-- their OFF none, so whoever writes the state anew without another end drops it.
CREATE OR REPLACE FUNCTION queue_workflows_drop_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.desired_state = 'on' OR (NEW.until_at = OLD.until_at AND OLD.until_at <= now()) THEN
        NEW.until_at := NULL;
    END IF;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS worker_controls_drop_end ON worker_controls;
CREATE TRIGGER worker_controls_drop_end BEFORE UPDATE OF desired_state ON worker_controls
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_drop_end();
