DROP FUNCTION IF EXISTS queue_workflows_enqueue(text, jsonb);
DROP FUNCTION IF EXISTS queue_workflows_put_jobs(text, jsonb);
DROP TRIGGER IF EXISTS ingest_jobs_reopened ON ingest_jobs;
DROP FUNCTION IF EXISTS queue_workflows_reopen_ingest();
DROP TRIGGER IF EXISTS ingest_jobs_hold ON ingest_jobs;
CREATE TRIGGER ingest_jobs_hold BEFORE INSERT ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_hold_until_due();
DROP FUNCTION IF EXISTS queue_workflows_hold_ingest();
DROP FUNCTION IF EXISTS queue_workflows_release_key(text);
DROP INDEX IF EXISTS ingest_jobs_idempotency_idx;
ALTER TABLE ingest_jobs
    DROP COLUMN IF EXISTS idempotency_window_s,
    DROP COLUMN IF EXISTS idempotency_released;
