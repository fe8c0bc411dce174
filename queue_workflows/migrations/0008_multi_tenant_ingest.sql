ALTER TABLE ingest_jobs ADD COLUMN IF NOT EXISTS args jsonb NOT NULL DEFAULT '{}'::jsonb;
ALTER TABLE ingest_jobs DROP CONSTRAINT IF EXISTS ingest_jobs_queue_check;
ALTER TABLE worker_heartbeats DROP CONSTRAINT IF EXISTS worker_heartbeats_queue_check;
