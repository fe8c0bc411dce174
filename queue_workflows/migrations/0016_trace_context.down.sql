DROP TABLE event_export_runs, event_exports;
DROP INDEX ingest_job_events_id_idx;
ALTER TABLE workflow_runs DROP COLUMN headers;
