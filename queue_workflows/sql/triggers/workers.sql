-- Triggers of worker_controls and model_controls.

CREATE OR REPLACE TRIGGER worker_controls_drop_end BEFORE UPDATE OF desired_state ON worker_controls
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_drop_end();

CREATE OR REPLACE TRIGGER model_controls_number BEFORE INSERT OR UPDATE ON model_controls
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_number_model_request();
