DROP TABLE schedules;
DROP FUNCTION IF EXISTS queue_workflows_schedule_changed();
DROP FUNCTION IF EXISTS queue_workflows_next_wake(text, text[], text[], text[], double precision);
ALTER TABLE schedule_fires DROP COLUMN run_id, DROP COLUMN skipped;
DROP INDEX ingest_job_events_reclaimed_idx, workflow_node_events_reclaimed_idx;
