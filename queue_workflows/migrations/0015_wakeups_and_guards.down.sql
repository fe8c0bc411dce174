DROP TRIGGER IF EXISTS ingest_jobs_cancel_notify ON ingest_jobs;
DROP TRIGGER IF EXISTS workflow_node_jobs_cancel_notify ON workflow_node_jobs;
DROP FUNCTION IF EXISTS notify_job_cancel();
DROP TRIGGER IF EXISTS workflow_runs_close ON workflow_runs;
DROP FUNCTION IF EXISTS queue_workflows_close_run();
DROP TRIGGER IF EXISTS workflow_runs_guard ON workflow_runs;
DROP FUNCTION IF EXISTS queue_workflows_guard_run();
DROP TRIGGER IF EXISTS ingest_jobs_guard ON ingest_jobs;
DROP TRIGGER IF EXISTS workflow_node_jobs_guard ON workflow_node_jobs;
DROP FUNCTION IF EXISTS queue_workflows_guard_job();
DROP TRIGGER IF EXISTS ingest_jobs_hold ON ingest_jobs;
DROP TRIGGER IF EXISTS workflow_node_jobs_hold ON workflow_node_jobs;
DROP FUNCTION IF EXISTS queue_workflows_hold_until_due();
DROP TRIGGER IF EXISTS input_submission_notify ON workflow_input_submissions;
DROP TRIGGER IF EXISTS dispatch_event_notify ON workflow_dispatch_events;
DROP TRIGGER IF EXISTS workflow_run_ready_notify ON workflow_runs;
DROP TRIGGER IF EXISTS workflow_run_ready_notify_insert ON workflow_runs;
DROP FUNCTION IF EXISTS notify_orchestrator();
DROP TRIGGER IF EXISTS ingest_job_ready_notify_insert ON ingest_jobs;
DROP TRIGGER IF EXISTS ingest_job_ready_notify ON ingest_jobs;
DROP FUNCTION IF EXISTS notify_ingest_jobs_inserted();
CREATE TRIGGER ingest_job_ready_notify AFTER INSERT OR UPDATE OF status ON ingest_jobs
    FOR EACH ROW WHEN (NEW.status = 'queued') EXECUTE FUNCTION notify_ingest_job_ready();
DROP TRIGGER IF EXISTS node_job_ready_notify_insert ON workflow_node_jobs;
DROP TRIGGER IF EXISTS node_job_ready_notify ON workflow_node_jobs;
DROP FUNCTION IF EXISTS notify_node_jobs_inserted();
CREATE TRIGGER node_job_ready_notify AFTER INSERT OR UPDATE OF status ON workflow_node_jobs
    FOR EACH ROW WHEN (NEW.status = 'queued') EXECUTE FUNCTION notify_node_job_ready();
