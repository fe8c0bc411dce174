-- Triggers of ingest_jobs and of its history. None has a WHEN clause: PostgreSQL parses it again for every
-- statement, which costs more than the function does for a row.

CREATE OR REPLACE TRIGGER ingest_jobs_hold BEFORE INSERT ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_hold_ingest();

CREATE OR REPLACE TRIGGER ingest_jobs_bound
    BEFORE UPDATE OF id, task_name, reason, seq, attempts, max_attempts, crash_count, watchdog_retries, generation,
        timeout_s, idempotency_window_s, created_at, admitted_at, lock_key, partition_key, idempotency_key, policy,
        args, headers ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_bound_job();

CREATE OR REPLACE TRIGGER ingest_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at, lock_key, partition_key, queue,
        claim_no, worker_id, lease_expires_at, heartbeat_at, started_at, finished_at, seconds, admitted_at ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('ingest_job_ready', 'lapses');

CREATE OR REPLACE TRIGGER ingest_jobs_reopened BEFORE UPDATE OF generation ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_reopen_ingest();

CREATE OR REPLACE TRIGGER ingest_job_ready_notify_insert AFTER INSERT ON ingest_jobs
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_jobs_added('ingest_job_ready');

CREATE OR REPLACE TRIGGER ingest_jobs_truncated AFTER TRUNCATE ON ingest_jobs
    FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_truncated();

CREATE OR REPLACE TRIGGER ingest_jobs_gone AFTER DELETE ON ingest_jobs
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_jobs_gone();

CREATE OR REPLACE TRIGGER ingest_job_events_keep BEFORE UPDATE OR DELETE ON ingest_job_events
    FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_keep_events();
