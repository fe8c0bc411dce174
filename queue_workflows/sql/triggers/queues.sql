-- Triggers of the queues' settings, and of the two tables that note what must be checked when a transaction commits.
-- A constraint trigger cannot be replaced, so it is dropped and created.

CREATE OR REPLACE TRIGGER queue_settings_set AFTER INSERT OR UPDATE OR DELETE ON queue_settings
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_queue_set();

CREATE OR REPLACE TRIGGER queue_partitions_set AFTER INSERT OR UPDATE OR DELETE ON queue_partitions
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_queue_set();

DROP TRIGGER IF EXISTS lock_turns_take ON lock_turns;
CREATE CONSTRAINT TRIGGER lock_turns_take AFTER INSERT ON lock_turns DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_take_turns();

DROP TRIGGER IF EXISTS partition_turns_take ON partition_turns;
CREATE CONSTRAINT TRIGGER partition_turns_take AFTER INSERT ON partition_turns DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_take_turns();
