DROP TABLE IF EXISTS ingest_jobs;
DROP FUNCTION IF EXISTS notify_ingest_job_ready();
