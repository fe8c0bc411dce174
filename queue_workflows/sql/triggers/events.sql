-- Triggers of events.

CREATE OR REPLACE TRIGGER events_sent AFTER INSERT ON events
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_event_sent();
