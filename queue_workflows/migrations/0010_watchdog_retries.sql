ALTER TABLE workflow_node_jobs ADD COLUMN IF NOT EXISTS watchdog_retries integer NOT NULL DEFAULT 0;
