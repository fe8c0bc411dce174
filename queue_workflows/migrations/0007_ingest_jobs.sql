CREATE TABLE IF NOT EXISTS ingest_jobs (
    id               text PRIMARY KEY,
    task_name        text NOT NULL,
    queue            text NOT NULL,
    reason           text NOT NULL DEFAULT 'tick',
    status           text NOT NULL DEFAULT 'queued',
    priority         smallint NOT NULL DEFAULT 100,
    result           jsonb,
    error            text,
    seconds          double precision,
    claimed_by       text,
    lease_expires_at timestamptz,
    created_at       timestamptz NOT NULL DEFAULT now(),
    started_at       timestamptz,
    finished_at      timestamptz,
    CONSTRAINT ingest_jobs_queue_check CHECK (queue IN ('fetch', 'load')),
    CONSTRAINT ingest_jobs_status_check CHECK (status IN (
        'queued', 'running', 'completed', 'failed', 'cancelled'))
);
CREATE INDEX IF NOT EXISTS ingest_jobs_claim_idx ON ingest_jobs (queue, status, priority, created_at);
CREATE INDEX IF NOT EXISTS ingest_jobs_lease_idx
    ON ingest_jobs (lease_expires_at) WHERE status = 'running';

CREATE OR REPLACE FUNCTION notify_ingest_job_ready() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('ingest_job_ready', NEW.queue);
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS ingest_job_ready_notify ON ingest_jobs;
CREATE TRIGGER ingest_job_ready_notify AFTER INSERT OR UPDATE OF status ON ingest_jobs
    FOR EACH ROW WHEN (NEW.status = 'queued') EXECUTE FUNCTION notify_ingest_job_ready();
