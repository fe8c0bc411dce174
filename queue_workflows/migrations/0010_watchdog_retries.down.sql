ALTER TABLE workflow_node_jobs DROP COLUMN IF EXISTS watchdog_retries;
