-- Locked in one order, before anything else is.
LOCK TABLE workflow_runs, workflow_node_jobs, ingest_jobs IN ACCESS EXCLUSIVE MODE;

-- Drop the triggers and functions of queue_workflows/sql/. Keep the functions of 0006, 0007 and
-- 0012, and let PUBLIC execute them again. This fails if an object of the app depends on a dropped
-- one.
DO $$
DECLARE
    v_one record;
BEGIN
    FOR v_one IN
        SELECT t.tgname, t.tgrelid::regclass AS tab
          FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_proc p ON p.oid = t.tgfoid
         WHERE NOT t.tgisinternal AND c.relnamespace = current_schema()::regnamespace
           AND p.pronamespace = c.relnamespace AND (starts_with(p.proname, 'queue_workflows_') OR p.proname IN (
               'notify_node_jobs_inserted', 'notify_ingest_jobs_inserted', 'notify_orchestrator',
               'notify_dispatch_event'))
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', v_one.tgname, v_one.tab);
    END LOOP;
    FOR v_one IN
        SELECT p.oid::regprocedure AS name FROM pg_proc p
         WHERE p.pronamespace = current_schema()::regnamespace AND p.prokind = 'f'
           AND (starts_with(p.proname, 'queue_workflows_') OR p.proname IN (
               'notify_node_jobs_inserted', 'notify_ingest_jobs_inserted', 'notify_orchestrator',
               'notify_dispatch_event'))
    LOOP
        EXECUTE format('DROP FUNCTION %s', v_one.name);
    END LOOP;
END $$;
GRANT EXECUTE ON FUNCTION notify_node_job_ready(), notify_ingest_job_ready(), notify_worker_control() TO PUBLIC;

DROP VIEW queue_partition_limits;
DROP TABLE queue_schema_objects, partition_turns, lock_turns, partition_dues, partition_starts, queue_starts,
    queue_partitions, queue_settings, workflow_input_timeouts, schedule_fires, job_attempt_logs,
    ingest_job_events, hw_samples, model_controls, gpu_unassignable, gpu_models, workers;
DROP TYPE queue_workflows_claimed_node, queue_workflows_gpu_holder, queue_workflows_gpu_line;

DROP INDEX workflow_runs_delayed_idx, workflow_runs_startable_idx, workflow_node_events_created_idx,
    workflow_dispatch_events_run_idx, ingest_jobs_admitted_idx, ingest_jobs_limited_idx,
    ingest_jobs_partition_idx, ingest_jobs_unserved_idx, workflow_node_jobs_unserved_idx, ingest_jobs_line_idx,
    workflow_node_jobs_line_idx, ingest_jobs_lock_idx, workflow_node_jobs_lock_idx, ingest_jobs_idempotency_idx,
    ingest_jobs_running_idx, ingest_jobs_blocked_idx, ingest_jobs_claim_idx,
    workflow_node_jobs_celery_task_id_idx, workflow_node_jobs_running_idx, workflow_node_jobs_blocked_idx,
    workflow_node_jobs_age_idx, workflow_node_jobs_model_idx, workflow_node_jobs_claim_idx;

-- Events that 0.3.0 does not know, and those of runs that are gone.
DELETE FROM workflow_node_events e
 WHERE e.event_type IN ('parked', 'reclaimed', 'retried', 'skipped', 'death', 'unassignable', 'assignable')
    OR NOT EXISTS (SELECT FROM workflow_runs r WHERE r.id = e.run_id);

-- Columns whose type could not change, as something of the app depends on it, still have it.
DO $$
DECLARE
    v_one record;
BEGIN
    ALTER TABLE workflow_node_jobs ALTER COLUMN status DROP DEFAULT;
    ALTER TABLE ingest_jobs ALTER COLUMN status DROP DEFAULT;
    FOR v_one IN
        SELECT c.relname, a.attname, format_type(t.typbasetype, t.typtypmod) AS base
          FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid AND c.relkind = 'r'
          JOIN pg_type t ON t.oid = a.atttypid
         WHERE c.relnamespace = current_schema()::regnamespace AND NOT a.attisdropped
           AND t.typnamespace = c.relnamespace AND t.typtype = 'd' AND starts_with(t.typname, 'queue_workflows_')
    LOOP
        EXECUTE format('ALTER TABLE %I ALTER COLUMN %I TYPE %s', v_one.relname, v_one.attname, v_one.base);
    END LOOP;
    ALTER TABLE ingest_jobs ALTER COLUMN status SET DEFAULT 'queued';
END $$;
ALTER TABLE workflow_node_jobs
    DROP CONSTRAINT IF EXISTS workflow_node_jobs_queue_check,
    DROP CONSTRAINT IF EXISTS workflow_node_jobs_status_check,
    ADD CONSTRAINT workflow_node_jobs_queue_check CHECK (queue IN ('cpu', 'gpu')),
    ADD CONSTRAINT workflow_node_jobs_status_check CHECK (status IN (
        'queued', 'running', 'completed', 'failed', 'cancelled', 'awaiting_input', 'skipped')),
    ALTER COLUMN id DROP DEFAULT,
    DROP COLUMN seq, DROP COLUMN claim_no, DROP COLUMN worker_id, DROP COLUMN generation,
    DROP COLUMN attempts, DROP COLUMN max_attempts, DROP COLUMN crash_count,
    DROP COLUMN available_at, DROP COLUMN blocked_reason, DROP COLUMN cancel_requested_at,
    DROP COLUMN heartbeat_at, DROP COLUMN progress, DROP COLUMN timeout_s, DROP COLUMN policy,
    DROP COLUMN lock_key, DROP COLUMN partition_key, DROP COLUMN input_template, DROP COLUMN ref_heads,
    RESET (fillfactor);
ALTER TABLE ingest_jobs
    DROP CONSTRAINT IF EXISTS ingest_jobs_queue_name_check,
    DROP CONSTRAINT IF EXISTS ingest_jobs_status_check,
    ADD CONSTRAINT ingest_jobs_status_check CHECK (status IN (
        'queued', 'running', 'completed', 'failed', 'cancelled')),
    ALTER COLUMN id DROP DEFAULT,
    DROP COLUMN seq, DROP COLUMN claim_no, DROP COLUMN worker_id, DROP COLUMN generation,
    DROP COLUMN attempts, DROP COLUMN max_attempts, DROP COLUMN crash_count,
    DROP COLUMN watchdog_retries, DROP COLUMN available_at, DROP COLUMN blocked_reason,
    DROP COLUMN cancel_requested_at, DROP COLUMN heartbeat_at, DROP COLUMN progress,
    DROP COLUMN timeout_s, DROP COLUMN policy, DROP COLUMN lock_key, DROP COLUMN partition_key,
    DROP COLUMN idempotency_key, DROP COLUMN headers, DROP COLUMN idempotency_window_s,
    DROP COLUMN idempotency_released, DROP COLUMN admitted_at,
    RESET (fillfactor);
ALTER TABLE workflow_node_events
    DROP CONSTRAINT IF EXISTS workflow_node_events_type_check,
    ADD CONSTRAINT workflow_node_events_run_id_fkey
        FOREIGN KEY (run_id) REFERENCES workflow_runs (id) ON DELETE CASCADE,
    ADD CONSTRAINT workflow_node_events_type_check CHECK (event_type IN (
        'claimed', 'model_load_start', 'model_load_done', 'progress_beat', 'stall_suspected',
        'stall_trip', 'gpu_health_trip', 'budget_trip', 'requeued', 'reassigned', 'lease_renew',
        'completed', 'failed', 'cancelled', 'error')),
    DROP COLUMN claim_no, DROP COLUMN worker_id;
ALTER TABLE workflow_dispatch_events
    DROP COLUMN available_at, DROP COLUMN generation, DROP COLUMN claim_no, DROP COLUMN job_id;
ALTER TABLE workflow_input_submissions
    ALTER COLUMN id DROP DEFAULT, DROP COLUMN available_at, DROP COLUMN attempts;
ALTER TABLE worker_controls
    DROP CONSTRAINT worker_controls_name_check, DROP COLUMN until_at, DROP COLUMN reason;
ALTER TABLE worker_heartbeats DROP COLUMN detail, DROP COLUMN vram_total_mb, RESET (fillfactor);
ALTER TABLE workflow_runs
    ALTER COLUMN queued_at DROP DEFAULT, ALTER COLUMN mode SET DEFAULT 'step',
    ALTER COLUMN status DROP DEFAULT, ALTER COLUMN id DROP DEFAULT,
    DROP COLUMN definition, DROP COLUMN definition_hash, DROP COLUMN generation,
    DROP COLUMN start_attempts, DROP COLUMN available_at;
DROP DOMAIN queue_workflows_node_status, queue_workflows_job_status, queue_workflows_dag_queue,
    queue_workflows_queue_name, queue_workflows_node_event, queue_workflows_time, queue_workflows_due,
    queue_workflows_period_s, queue_workflows_seconds, queue_workflows_number, queue_workflows_tries;

CREATE INDEX workflow_node_jobs_claim_idx ON workflow_node_jobs (queue, status, priority, created_at);
CREATE INDEX workflow_node_jobs_run_idx ON workflow_node_jobs (run_id);
CREATE INDEX workflow_node_jobs_status_idx ON workflow_node_jobs (status);
CREATE INDEX workflow_node_jobs_model_idx ON workflow_node_jobs (required_model) WHERE required_model IS NOT NULL;
CREATE INDEX workflow_node_jobs_celery_task_id_idx ON workflow_node_jobs (celery_task_id);
CREATE INDEX workflow_node_jobs_lease_idx ON workflow_node_jobs (lease_expires_at) WHERE status = 'running';
CREATE INDEX ingest_jobs_claim_idx ON ingest_jobs (queue, status, priority, created_at);
CREATE INDEX ingest_jobs_lease_idx ON ingest_jobs (lease_expires_at) WHERE status = 'running';
CREATE INDEX workflow_node_events_created_idx ON workflow_node_events (created_at);
CREATE TRIGGER node_job_ready_notify AFTER INSERT OR UPDATE OF status ON workflow_node_jobs
    FOR EACH ROW WHEN (NEW.status = 'queued') EXECUTE FUNCTION notify_node_job_ready();
CREATE TRIGGER ingest_job_ready_notify AFTER INSERT OR UPDATE OF status ON ingest_jobs
    FOR EACH ROW WHEN (NEW.status = 'queued') EXECUTE FUNCTION notify_ingest_job_ready();
