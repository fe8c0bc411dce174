-- Triggers of workflow_node_jobs. None has a WHEN clause: PostgreSQL parses it again for every statement, which
-- costs more than the function does for a row.

CREATE OR REPLACE TRIGGER workflow_node_jobs_hold BEFORE INSERT ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_hold_until_due();

CREATE OR REPLACE TRIGGER workflow_node_jobs_bound
    BEFORE UPDATE OF id, seq, attempts, max_attempts, crash_count, watchdog_retries, generation, timeout_s,
        created_at, lock_key, partition_key, policy ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_bound_job();

CREATE OR REPLACE TRIGGER workflow_node_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at, lock_key, claim_no,
        worker_id, lease_expires_at, heartbeat_at, started_at, finished_at, seconds ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('node_job_ready', 'lapses');

CREATE OR REPLACE TRIGGER workflow_node_jobs_model BEFORE UPDATE OF required_model ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_no_empty_model();

CREATE OR REPLACE TRIGGER node_job_ready_notify_insert AFTER INSERT ON workflow_node_jobs
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_jobs_added('node_job_ready');

CREATE OR REPLACE TRIGGER workflow_node_jobs_truncated AFTER TRUNCATE ON workflow_node_jobs
    FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_truncated();

CREATE OR REPLACE TRIGGER workflow_node_jobs_gone AFTER DELETE ON workflow_node_jobs
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_jobs_gone();
