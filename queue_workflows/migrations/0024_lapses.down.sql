-- The triggers of the present set name the column; an older release installs its own.
DROP TRIGGER IF EXISTS workflow_node_jobs_bound ON workflow_node_jobs;
DROP TRIGGER IF EXISTS ingest_jobs_bound ON ingest_jobs;
ALTER TABLE workflow_node_jobs DROP COLUMN lapse_count;
ALTER TABLE ingest_jobs DROP COLUMN lapse_count;
