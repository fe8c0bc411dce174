-- The triggers of the present set name the column; an older release installs its own.
DROP TRIGGER IF EXISTS workflow_node_jobs_bound ON workflow_node_jobs;
DROP TRIGGER IF EXISTS ingest_jobs_bound ON ingest_jobs;
ALTER TABLE workflow_node_jobs DROP COLUMN lapse_count;
ALTER TABLE ingest_jobs DROP COLUMN lapse_count;
CREATE INDEX IF NOT EXISTS ingest_job_events_reclaimed_idx
    ON ingest_job_events (created_at) WHERE event_type = 'reclaimed';
CREATE INDEX IF NOT EXISTS workflow_node_events_reclaimed_idx
    ON workflow_node_events (created_at) WHERE event_type = 'reclaimed';
