-- The triggers of the present set count lapses; these do not, until an older release installs its own set.
CREATE OR REPLACE TRIGGER ingest_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at, lock_key, partition_key, queue,
        claim_no, worker_id, lease_expires_at, heartbeat_at, started_at, finished_at, seconds, admitted_at ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('ingest_job_ready');
CREATE OR REPLACE TRIGGER workflow_node_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at, lock_key, claim_no,
        worker_id, lease_expires_at, heartbeat_at, started_at, finished_at, seconds ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('node_job_ready');
ALTER TABLE workflow_node_jobs DROP COLUMN lapse_count;
ALTER TABLE ingest_jobs DROP COLUMN lapse_count;
DROP DOMAIN queue_workflows_lapse_count;
CREATE INDEX IF NOT EXISTS ingest_job_events_reclaimed_idx
    ON ingest_job_events (created_at) WHERE event_type = 'reclaimed';
CREATE INDEX IF NOT EXISTS workflow_node_events_reclaimed_idx
    ON workflow_node_events (created_at) WHERE event_type = 'reclaimed';
