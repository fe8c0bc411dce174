DELETE FROM worker_heartbeats WHERE queue NOT IN ('cpu', 'gpu');
DELETE FROM ingest_jobs WHERE queue NOT IN ('fetch', 'load');
ALTER TABLE worker_heartbeats ADD CONSTRAINT worker_heartbeats_queue_check CHECK (queue IN ('cpu', 'gpu'));
ALTER TABLE ingest_jobs ADD CONSTRAINT ingest_jobs_queue_check CHECK (queue IN ('fetch', 'load'));
ALTER TABLE ingest_jobs DROP COLUMN IF EXISTS args;
