CREATE INDEX IF NOT EXISTS workflow_runs_status_idx ON workflow_runs (status);
DROP INDEX IF EXISTS workflow_runs_created_idx, workflow_runs_workflow_created_idx, workflow_runs_status_created_idx,
    ingest_jobs_seq_idx, ingest_jobs_failed_idx, workflow_node_jobs_failed_idx;
