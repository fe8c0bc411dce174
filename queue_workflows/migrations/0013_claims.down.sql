ALTER TABLE worker_controls DROP CONSTRAINT IF EXISTS worker_controls_name_check;
ALTER TABLE ingest_jobs DROP CONSTRAINT IF EXISTS ingest_jobs_queue_name_check;
DROP INDEX IF EXISTS workflow_node_jobs_claim_idx, workflow_node_jobs_model_idx,
    workflow_node_jobs_blocked_idx, workflow_node_jobs_running_idx,
    workflow_node_jobs_celery_task_id_idx, ingest_jobs_claim_idx, ingest_jobs_blocked_idx,
    ingest_jobs_running_idx;
ALTER TABLE workflow_node_jobs ALTER COLUMN status DROP DEFAULT;
-- Where the CHECK had to stay the column is still text.
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = 'workflow_node_jobs'::regclass
                   AND conname = 'workflow_node_jobs_status_check') THEN
        ALTER TABLE workflow_node_jobs
            ALTER COLUMN status TYPE text, ALTER COLUMN queue TYPE text,
            ADD CONSTRAINT workflow_node_jobs_queue_check CHECK (queue IN ('cpu', 'gpu')),
            ADD CONSTRAINT workflow_node_jobs_status_check CHECK (status IN (
                'queued', 'running', 'completed', 'failed', 'cancelled', 'awaiting_input', 'skipped'));
    END IF;
    IF NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = 'ingest_jobs'::regclass
                   AND conname = 'ingest_jobs_status_check') THEN
        ALTER TABLE ingest_jobs
            ALTER COLUMN status DROP DEFAULT, ALTER COLUMN status TYPE text,
            ALTER COLUMN status SET DEFAULT 'queued', ALTER COLUMN queue TYPE text,
            ADD CONSTRAINT ingest_jobs_status_check CHECK (status IN (
                'queued', 'running', 'completed', 'failed', 'cancelled'));
    END IF;
END $$;
DROP DOMAIN queue_workflows_queue_name, queue_workflows_dag_queue, queue_workflows_job_status, queue_workflows_node_status;
CREATE TRIGGER node_job_ready_notify AFTER INSERT OR UPDATE OF status ON workflow_node_jobs
    FOR EACH ROW WHEN (NEW.status = 'queued') EXECUTE FUNCTION notify_node_job_ready();
CREATE TRIGGER ingest_job_ready_notify AFTER INSERT OR UPDATE OF status ON ingest_jobs
    FOR EACH ROW WHEN (NEW.status = 'queued') EXECUTE FUNCTION notify_ingest_job_ready();
CREATE INDEX workflow_node_jobs_claim_idx
    ON workflow_node_jobs (queue, status, priority, created_at);
CREATE INDEX workflow_node_jobs_run_idx ON workflow_node_jobs (run_id);
CREATE INDEX workflow_node_jobs_status_idx ON workflow_node_jobs (status);
CREATE INDEX workflow_node_jobs_model_idx
    ON workflow_node_jobs (required_model) WHERE required_model IS NOT NULL;
CREATE INDEX workflow_node_jobs_celery_task_id_idx ON workflow_node_jobs (celery_task_id);
CREATE INDEX workflow_node_jobs_lease_idx
    ON workflow_node_jobs (lease_expires_at) WHERE status = 'running';
CREATE INDEX ingest_jobs_claim_idx ON ingest_jobs (queue, status, priority, created_at);
CREATE INDEX ingest_jobs_lease_idx ON ingest_jobs (lease_expires_at) WHERE status = 'running';
ALTER TABLE worker_heartbeats RESET (fillfactor);
ALTER TABLE ingest_jobs RESET (fillfactor);
ALTER TABLE workflow_node_jobs RESET (fillfactor);
ALTER TABLE ingest_jobs
    ALTER COLUMN id DROP DEFAULT,
    DROP COLUMN seq, DROP COLUMN claim_no, DROP COLUMN worker_id, DROP COLUMN generation,
    DROP COLUMN attempts, DROP COLUMN max_attempts, DROP COLUMN crash_count,
    DROP COLUMN watchdog_retries, DROP COLUMN available_at, DROP COLUMN blocked_reason,
    DROP COLUMN cancel_requested_at, DROP COLUMN heartbeat_at, DROP COLUMN progress,
    DROP COLUMN timeout_s, DROP COLUMN policy, DROP COLUMN lock_key, DROP COLUMN partition_key,
    DROP COLUMN idempotency_key, DROP COLUMN headers;
ALTER TABLE workflow_node_jobs
    ALTER COLUMN id DROP DEFAULT,
    DROP COLUMN seq, DROP COLUMN claim_no, DROP COLUMN worker_id, DROP COLUMN generation,
    DROP COLUMN attempts, DROP COLUMN max_attempts, DROP COLUMN crash_count,
    DROP COLUMN available_at, DROP COLUMN blocked_reason, DROP COLUMN cancel_requested_at,
    DROP COLUMN heartbeat_at, DROP COLUMN progress, DROP COLUMN timeout_s, DROP COLUMN policy,
    DROP COLUMN lock_key, DROP COLUMN partition_key, DROP COLUMN input_template,
    DROP COLUMN ref_heads;
ALTER TABLE workflow_runs
    ALTER COLUMN queued_at DROP DEFAULT, ALTER COLUMN mode SET DEFAULT 'step',
    ALTER COLUMN status DROP DEFAULT, ALTER COLUMN id DROP DEFAULT,
    DROP COLUMN definition, DROP COLUMN definition_hash, DROP COLUMN generation,
    DROP COLUMN start_attempts, DROP COLUMN available_at;
