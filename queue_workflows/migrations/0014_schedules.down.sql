DROP TABLE schedules;
DROP FUNCTION IF EXISTS queue_workflows_schedule_changed();
ALTER TABLE schedule_fires DROP COLUMN run_id, DROP COLUMN skipped;
