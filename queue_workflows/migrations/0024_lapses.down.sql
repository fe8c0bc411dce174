ALTER TABLE workflow_node_jobs DROP COLUMN lapse_count;
ALTER TABLE ingest_jobs DROP COLUMN lapse_count;
