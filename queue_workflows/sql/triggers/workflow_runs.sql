-- Triggers of workflow_runs.

CREATE OR REPLACE TRIGGER workflow_runs_bound
    BEFORE INSERT OR UPDATE OF id, workflow_name, parcel_id, out_dir, mode, generation, start_attempts, resume_count,
        progress_pct, created_at, updated_at, queued_at, started_at, finished_at, available_at, context
    ON workflow_runs FOR EACH ROW EXECUTE FUNCTION queue_workflows_bound_run();

CREATE OR REPLACE TRIGGER workflow_runs_guard BEFORE UPDATE OF status ON workflow_runs FOR EACH ROW
    WHEN (OLD.mode = 'node' AND OLD.status IN ('completed', 'failed', 'cancelled')
          AND NEW.status IS DISTINCT FROM OLD.status)
    EXECUTE FUNCTION queue_workflows_guard_run();

-- Triggers fire in the order of their names: children end before the nodes that wait for them.
CREATE OR REPLACE TRIGGER workflow_runs_cancel_children AFTER UPDATE OF status ON workflow_runs FOR EACH ROW
    WHEN (NEW.mode = 'node' AND NEW.status IN ('failed', 'cancelled') AND OLD.status IS DISTINCT FROM NEW.status)
    EXECUTE FUNCTION queue_workflows_cancel_children();

CREATE OR REPLACE TRIGGER workflow_runs_child_ended AFTER UPDATE OF status ON workflow_runs FOR EACH ROW
    WHEN (NEW.parent_run_id IS NOT NULL AND NEW.mode = 'node' AND NEW.status IN ('completed', 'failed', 'cancelled')
          AND OLD.status IS DISTINCT FROM NEW.status)
    EXECUTE FUNCTION queue_workflows_child_ended();

CREATE OR REPLACE TRIGGER workflow_runs_children_gone AFTER DELETE ON workflow_runs
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_children_gone();

CREATE OR REPLACE TRIGGER workflow_runs_close AFTER UPDATE OF status ON workflow_runs FOR EACH ROW
    WHEN (NEW.mode = 'node' AND NEW.status IN ('completed', 'failed', 'cancelled')
          AND OLD.status IS DISTINCT FROM NEW.status)
    EXECUTE FUNCTION queue_workflows_close_run();

CREATE OR REPLACE TRIGGER workflow_runs_failed AFTER UPDATE OF status ON workflow_runs FOR EACH ROW
    WHEN (NEW.status = 'failed' AND NEW.mode = 'node' AND OLD.status IS DISTINCT FROM NEW.status)
    EXECUTE FUNCTION queue_workflows_run_failed();

CREATE OR REPLACE TRIGGER workflow_runs_forget AFTER DELETE ON workflow_runs
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_forget_runs();

CREATE OR REPLACE TRIGGER workflow_runs_truncated AFTER TRUNCATE ON workflow_runs
    FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_truncated();

CREATE OR REPLACE TRIGGER workflow_run_ready_notify AFTER UPDATE OF status, available_at ON workflow_runs FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.mode = 'node' AND NEW.available_at IS NULL
          AND (OLD.status IS DISTINCT FROM NEW.status OR OLD.available_at IS NOT NULL))
    EXECUTE FUNCTION notify_orchestrator('run');

CREATE OR REPLACE TRIGGER workflow_run_ready_notify_insert AFTER INSERT ON workflow_runs FOR EACH ROW
    WHEN (NEW.status = 'queued' AND NEW.mode = 'node' AND NEW.available_at IS NULL)
    EXECUTE FUNCTION notify_orchestrator('run');

CREATE OR REPLACE TRIGGER workflow_run_delayed_notify AFTER INSERT OR UPDATE OF status, available_at ON workflow_runs
    FOR EACH ROW WHEN (NEW.status = 'queued' AND NEW.mode = 'node' AND NEW.available_at IS NOT NULL)
    EXECUTE FUNCTION notify_orchestrator('delayed');
