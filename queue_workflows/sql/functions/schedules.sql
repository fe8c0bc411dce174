-- Schedules: a row that is written is planned again, and wakes the schedulers.

-- Forget what was planned for a schedule whose definition, pause or mark changes, and wake the schedulers. Instants
-- from before the change never fire. Refuse JSON that no process can load.
CREATE OR REPLACE FUNCTION queue_workflows_schedule_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM queue_workflows_check_payload(NEW.args, 'schedules.args', 1048576);
    PERFORM queue_workflows_check_payload(NEW.inputs, 'schedules.inputs', 1048576);
    PERFORM queue_workflows_check_payload(NEW.headers, 'schedules.headers', 1048576);
    NEW.next_at := NULL;
    NEW.wake_at := NULL;
    NEW.ended := false;
    NEW.error := NULL;
    NEW.changed_at := now();
    PERFORM pg_notify('schedules_changed', '');
    RETURN NEW;
END $$;
