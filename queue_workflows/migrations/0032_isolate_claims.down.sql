DROP FUNCTION IF EXISTS queue_workflows_claim_apart(
    text, text, text, text, double precision, boolean, boolean, text[], smallint);
DROP FUNCTION IF EXISTS queue_workflows_set_aside(text, text, text, text, bigint);
DROP FUNCTION IF EXISTS queue_workflows_is_about_data(text);
DROP FUNCTION IF EXISTS queue_workflows_is_systemic(text);
-- Jobs that were set aside are claimed again by who is left, as before.
UPDATE workflow_node_jobs SET blocked_reason = NULL WHERE status = 'queued' AND blocked_reason = 'set_aside';
UPDATE ingest_jobs SET blocked_reason = NULL WHERE status = 'queued' AND blocked_reason = 'set_aside';
-- Give their turns now: the table of turns cannot be dropped by an earlier step while they are pending.
SET CONSTRAINTS ALL IMMEDIATE;
SET CONSTRAINTS ALL DEFERRED;
