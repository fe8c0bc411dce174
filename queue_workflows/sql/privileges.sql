-- Revoke EXECUTE on our functions from PUBLIC. This text runs after the functions. A trigger fires without EXECUTE, and
-- `queue-workflows connect --for work|submit` names the functions that a role must be granted. The notify_* names are
-- listed, as an app may have functions that begin so.
DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOR v_function IN
        SELECT p.oid FROM pg_proc p
         WHERE p.pronamespace = current_schema()::regnamespace AND p.prokind = 'f'
           AND (starts_with(p.proname, 'queue_workflows_') OR p.proname IN (
                'notify_node_job_ready', 'notify_ingest_job_ready', 'notify_worker_control',
                'notify_node_jobs_inserted', 'notify_ingest_jobs_inserted', 'notify_orchestrator',
                'notify_dispatch_event'))
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', v_function);
    END LOOP;
END $$;
