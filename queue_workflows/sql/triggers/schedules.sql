-- Triggers of schedules.

CREATE OR REPLACE TRIGGER schedules_changed
    BEFORE INSERT OR UPDATE OF name, expression, tz, task_name, args, workflow_name, inputs, queue, priority,
        idempotency_key, headers, catch_up, catch_up_max, catch_up_within_s, overlap, jitter_s, start_at, end_at,
        paused, gone_at ON schedules
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_schedule_changed();

CREATE OR REPLACE TRIGGER schedules_failed AFTER UPDATE OF error, missed_at ON schedules FOR EACH ROW
    WHEN (NEW.error IS NOT NULL AND OLD.error IS NULL OR NEW.missed_at IS DISTINCT FROM OLD.missed_at)
    EXECUTE FUNCTION queue_workflows_schedule_failed();
