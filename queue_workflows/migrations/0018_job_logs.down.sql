DROP TRIGGER IF EXISTS ingest_jobs_forget ON ingest_jobs;
DROP TRIGGER IF EXISTS workflow_node_jobs_forget ON workflow_node_jobs;
DROP FUNCTION IF EXISTS queue_workflows_forget_logs();
DROP TABLE IF EXISTS job_attempt_logs;
