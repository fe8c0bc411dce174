DROP TRIGGER IF EXISTS ingest_jobs_hold ON ingest_jobs;
CREATE TRIGGER ingest_jobs_hold BEFORE INSERT ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_hold_until_due();
DROP FUNCTION queue_workflows_hold_ingest();
DROP FUNCTION queue_workflows_release_key(text);
ALTER TABLE ingest_jobs DROP COLUMN idempotency_window_s, DROP COLUMN idempotency_released;
