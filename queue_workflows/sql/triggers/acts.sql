-- Triggers of operator_acts.

CREATE OR REPLACE TRIGGER operator_acts_keep BEFORE UPDATE OR DELETE ON operator_acts
    FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_keep_events();
