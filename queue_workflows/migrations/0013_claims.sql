-- The identity of a claim, four separate counters, due and blocked rows, and defaults for plain INSERTs.
-- A CHECK's text is parsed anew by every statement that writes the table (25 to 40 us each here); a
-- domain's is not, and only a statement that assigns the column pays for it. The SQLSTATE is the same.
CREATE DOMAIN queue_workflows_node_status AS text CHECK (VALUE IN (
    'queued', 'running', 'completed', 'failed', 'cancelled', 'awaiting_input', 'skipped'));
CREATE DOMAIN queue_workflows_job_status AS text CHECK (VALUE IN (
    'queued', 'running', 'completed', 'failed', 'cancelled'));
CREATE DOMAIN queue_workflows_dag_queue AS text CHECK (VALUE IN ('cpu', 'gpu'));
CREATE DOMAIN queue_workflows_queue_name AS text;
-- Where a view, trigger or policy of the host names such a column its type cannot change: the CHECK stays.

ALTER TABLE workflow_runs
    ADD COLUMN IF NOT EXISTS definition       jsonb,
    ADD COLUMN IF NOT EXISTS definition_hash  text,
    ADD COLUMN IF NOT EXISTS generation       integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS start_attempts   integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at     timestamptz,
    ALTER COLUMN id SET DEFAULT gen_random_uuid()::text,
    ALTER COLUMN status SET DEFAULT 'queued',
    ALTER COLUMN mode SET DEFAULT 'node',
    ALTER COLUMN queued_at SET DEFAULT now();

-- Indexes whose predicate names a column go before its type changes, and come back below.
DROP INDEX IF EXISTS workflow_node_jobs_lease_idx, workflow_node_jobs_claim_idx,
    workflow_node_jobs_model_idx, workflow_node_jobs_run_idx, workflow_node_jobs_status_idx,
    workflow_node_jobs_celery_task_id_idx, ingest_jobs_lease_idx, ingest_jobs_claim_idx;
DROP TRIGGER IF EXISTS node_job_ready_notify ON workflow_node_jobs;
DROP TRIGGER IF EXISTS ingest_job_ready_notify ON ingest_jobs;

DO $$ BEGIN
    ALTER TABLE workflow_node_jobs
        DROP CONSTRAINT IF EXISTS workflow_node_jobs_status_check,
        DROP CONSTRAINT IF EXISTS workflow_node_jobs_queue_check,
        ALTER COLUMN status TYPE queue_workflows_node_status,
        ALTER COLUMN queue TYPE queue_workflows_dag_queue;
EXCEPTION WHEN feature_not_supported THEN NULL;
END $$;
DO $$ BEGIN
    ALTER TABLE ingest_jobs
        DROP CONSTRAINT IF EXISTS ingest_jobs_status_check,
        ALTER COLUMN status DROP DEFAULT,
        ALTER COLUMN status TYPE queue_workflows_job_status,
        ALTER COLUMN status SET DEFAULT 'queued',
        ALTER COLUMN queue TYPE queue_workflows_queue_name;
EXCEPTION WHEN feature_not_supported THEN
    ALTER TABLE ingest_jobs ADD CONSTRAINT ingest_jobs_queue_name_check
        CHECK (octet_length(queue) BETWEEN 1 AND 200) NOT VALID;
END $$;

ALTER TABLE workflow_node_jobs
    ADD COLUMN IF NOT EXISTS seq                 bigserial,
    ADD COLUMN IF NOT EXISTS claim_no            bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS worker_id           text,
    ADD COLUMN IF NOT EXISTS generation          integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS attempts            integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS max_attempts        integer NOT NULL DEFAULT 1,
    ADD COLUMN IF NOT EXISTS crash_count         integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at        timestamptz,
    ADD COLUMN IF NOT EXISTS blocked_reason      text,
    ADD COLUMN IF NOT EXISTS cancel_requested_at timestamptz,
    ADD COLUMN IF NOT EXISTS heartbeat_at        timestamptz,
    ADD COLUMN IF NOT EXISTS progress            jsonb,
    ADD COLUMN IF NOT EXISTS timeout_s           double precision,
    ADD COLUMN IF NOT EXISTS policy              jsonb,
    ADD COLUMN IF NOT EXISTS lock_key            text,
    ADD COLUMN IF NOT EXISTS partition_key       text,
    ADD COLUMN IF NOT EXISTS input_template      jsonb,
    ADD COLUMN IF NOT EXISTS ref_heads           text[],
    ALTER COLUMN id SET DEFAULT gen_random_uuid()::text,
    ALTER COLUMN status SET DEFAULT 'queued';

ALTER TABLE ingest_jobs
    ADD COLUMN IF NOT EXISTS seq                 bigserial,
    ADD COLUMN IF NOT EXISTS claim_no            bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS worker_id           text,
    ADD COLUMN IF NOT EXISTS generation          integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS attempts            integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS max_attempts        integer NOT NULL DEFAULT 1,
    ADD COLUMN IF NOT EXISTS crash_count         integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS watchdog_retries    integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at        timestamptz,
    ADD COLUMN IF NOT EXISTS blocked_reason      text,
    ADD COLUMN IF NOT EXISTS cancel_requested_at timestamptz,
    ADD COLUMN IF NOT EXISTS heartbeat_at        timestamptz,
    ADD COLUMN IF NOT EXISTS progress            jsonb,
    ADD COLUMN IF NOT EXISTS timeout_s           double precision,
    ADD COLUMN IF NOT EXISTS policy              jsonb,
    ADD COLUMN IF NOT EXISTS lock_key            text,
    ADD COLUMN IF NOT EXISTS partition_key       text,
    ADD COLUMN IF NOT EXISTS idempotency_key     text,
    ADD COLUMN IF NOT EXISTS headers             jsonb,
    ALTER COLUMN id SET DEFAULT gen_random_uuid()::text;

-- Renewals are HOT: no index on what they write, and room on the page.
ALTER TABLE workflow_node_jobs SET (fillfactor = 70);
ALTER TABLE ingest_jobs SET (fillfactor = 70);
ALTER TABLE worker_heartbeats SET (fillfactor = 50);

-- Rows that were there before have their place in line by age; a claim made before is fenced by the
-- lease that it has, of 7 days at the most, and whoever left `running` has none.
UPDATE workflow_node_jobs j
   SET seq = line.seq, claim_no = CASE status WHEN 'running' THEN 1 ELSE 0 END,
       worker_id = CASE status WHEN 'running'
           THEN 'legacy:' || coalesce(claimed_by, host_label, 'unknown') END,
       lease_expires_at = CASE status WHEN 'running'
           THEN least(coalesce(lease_expires_at, now()), now() + interval '7 days') END
  FROM (SELECT id, row_number() OVER (ORDER BY created_at, id) AS seq FROM workflow_node_jobs) line
 WHERE j.id = line.id;
SELECT setval(pg_get_serial_sequence('workflow_node_jobs', 'seq'),
              greatest(1, (SELECT coalesce(max(seq), 0) FROM workflow_node_jobs)));
UPDATE ingest_jobs j
   SET seq = line.seq, claim_no = CASE status WHEN 'running' THEN 1 ELSE 0 END,
       worker_id = CASE status WHEN 'running' THEN 'legacy:' || coalesce(claimed_by, 'unknown') END,
       lease_expires_at = CASE status WHEN 'running'
           THEN least(coalesce(lease_expires_at, now()), now() + interval '7 days') END
  FROM (SELECT id, row_number() OVER (ORDER BY created_at, id) AS seq FROM ingest_jobs) line
 WHERE j.id = line.id;
SELECT setval(pg_get_serial_sequence('ingest_jobs', 'seq'),
              greatest(1, (SELECT coalesce(max(seq), 0) FROM ingest_jobs)));

-- The claim's order is its index. What is not due or blocked is not in it.
CREATE INDEX workflow_node_jobs_claim_idx ON workflow_node_jobs (queue, priority, seq)
    WHERE status = 'queued' AND blocked_reason IS NULL;
CREATE INDEX workflow_node_jobs_model_idx ON workflow_node_jobs (required_model, priority, seq)
    WHERE queue = 'gpu' AND status = 'queued' AND blocked_reason IS NULL;
CREATE INDEX workflow_node_jobs_blocked_idx ON workflow_node_jobs (available_at)
    WHERE status = 'queued' AND blocked_reason IS NOT NULL;
CREATE INDEX workflow_node_jobs_running_idx ON workflow_node_jobs (worker_id) WHERE status = 'running';
CREATE INDEX workflow_node_jobs_celery_task_id_idx ON workflow_node_jobs (celery_task_id)
    WHERE celery_task_id IS NOT NULL;
CREATE INDEX ingest_jobs_claim_idx ON ingest_jobs (queue, priority, seq)
    WHERE status = 'queued' AND blocked_reason IS NULL;
CREATE INDEX ingest_jobs_blocked_idx ON ingest_jobs (available_at)
    WHERE status = 'queued' AND blocked_reason IS NOT NULL;
CREATE INDEX ingest_jobs_running_idx ON ingest_jobs (worker_id) WHERE status = 'running';

-- NOTIFY refuses payloads of 8,000 bytes, and a refused one would roll the writer back.
ALTER DOMAIN queue_workflows_queue_name ADD CONSTRAINT queue_workflows_queue_name_check
    CHECK (octet_length(VALUE) BETWEEN 1 AND 200) NOT VALID;
ALTER TABLE worker_controls ADD CONSTRAINT worker_controls_name_check
    CHECK (octet_length(host_label) BETWEEN 1 AND 400 AND octet_length(queue) BETWEEN 1 AND 200) NOT VALID;
