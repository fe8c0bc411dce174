ALTER TABLE workflow_node_jobs ADD COLUMN IF NOT EXISTS claimed_by text;
ALTER TABLE workflow_node_jobs ADD COLUMN IF NOT EXISTS lease_expires_at timestamptz;
CREATE INDEX IF NOT EXISTS workflow_node_jobs_lease_idx
    ON workflow_node_jobs (lease_expires_at) WHERE status = 'running';

CREATE OR REPLACE FUNCTION notify_node_job_ready() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('node_job_ready', NEW.queue);
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS node_job_ready_notify ON workflow_node_jobs;
CREATE TRIGGER node_job_ready_notify AFTER INSERT OR UPDATE OF status ON workflow_node_jobs
    FOR EACH ROW WHEN (NEW.status = 'queued') EXECUTE FUNCTION notify_node_job_ready();
