DROP TABLE failure_alerts, failure_alert_state;
-- The triggers of the present set call it, until an older release installs its own set.
CREATE OR REPLACE FUNCTION queue_workflows_alert(
    p_kind text, p_subject text, p_occurrence text, p_name text, p_reason text, p_error text,
    p_queue text DEFAULT NULL, p_schedule text DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
DROP INDEX IF EXISTS lock_turns_xid_idx;
CREATE INDEX lock_turns_xid_idx ON lock_turns (xid);
