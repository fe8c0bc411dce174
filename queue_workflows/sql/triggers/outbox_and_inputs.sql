-- Triggers of the outbox (workflow_dispatch_events) and of the answers to input nodes (workflow_input_submissions).

CREATE OR REPLACE TRIGGER dispatch_event_notify AFTER INSERT ON workflow_dispatch_events
    FOR EACH ROW EXECUTE FUNCTION notify_dispatch_event();

CREATE OR REPLACE TRIGGER workflow_input_submissions_bound
    BEFORE INSERT OR UPDATE OF id, run_id, node_id, value, attempts, created_at, claimed_at, processed_at,
        available_at
    ON workflow_input_submissions FOR EACH ROW EXECUTE FUNCTION queue_workflows_bound_submission();

CREATE OR REPLACE TRIGGER input_submission_notify AFTER INSERT ON workflow_input_submissions
    FOR EACH STATEMENT EXECUTE FUNCTION notify_orchestrator('input');
