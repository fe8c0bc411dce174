DO $$
DECLARE
    v_function regprocedure;
    v_one      record;
BEGIN
    ALTER FUNCTION queue_workflows_put_jobs(text, jsonb) SECURITY INVOKER RESET search_path;
    FOR v_function IN
        SELECT p.oid FROM pg_proc p
         WHERE p.pronamespace = current_schema()::regnamespace AND p.prokind = 'f'
           AND (starts_with(p.proname, 'queue_workflows_') OR p.proname IN (
                'notify_node_job_ready', 'notify_ingest_job_ready', 'notify_worker_control',
                'notify_node_jobs_inserted', 'notify_ingest_jobs_inserted', 'notify_orchestrator',
                'notify_dispatch_event'))
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO PUBLIC', v_function);
    END LOOP;
    FOR v_one IN
        SELECT c.relname, a.attname, format_type(t.typbasetype, t.typtypmod) AS base
          FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid AND c.relkind = 'r'
          JOIN pg_type t ON t.oid = a.atttypid
         WHERE c.relnamespace = current_schema()::regnamespace AND NOT a.attisdropped
           AND t.typname IN ('queue_workflows_time', 'queue_workflows_due', 'queue_workflows_period_s',
                             'queue_workflows_seconds', 'queue_workflows_number', 'queue_workflows_tries')
    LOOP
        EXECUTE format('ALTER TABLE %I ALTER COLUMN %I TYPE %s', v_one.relname, v_one.attname, v_one.base);
    END LOOP;
END $$;
DROP DOMAIN IF EXISTS queue_workflows_time, queue_workflows_due, queue_workflows_period_s,
    queue_workflows_seconds, queue_workflows_number, queue_workflows_tries;
ALTER TABLE queue_settings DROP CONSTRAINT IF EXISTS queue_settings_retention_bound;
ALTER TABLE gpu_models DROP CONSTRAINT IF EXISTS gpu_models_size_bound;
DROP TRIGGER IF EXISTS workflow_node_jobs_bound ON workflow_node_jobs;
DROP TRIGGER IF EXISTS ingest_jobs_bound ON ingest_jobs;
DROP TRIGGER IF EXISTS workflow_runs_bound ON workflow_runs;
DROP TRIGGER IF EXISTS workflow_input_submissions_bound ON workflow_input_submissions;
DROP FUNCTION IF EXISTS queue_workflows_bound_job(), queue_workflows_bound_run(), queue_workflows_bound_submission(),
    queue_workflows_refuse(text, jsonb, jsonb), queue_workflows_hold_node(text, text);
