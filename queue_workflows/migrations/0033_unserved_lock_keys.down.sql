DROP FUNCTION IF EXISTS queue_workflows_record(ingest_jobs, text, text, text, double precision, text, jsonb);
DROP FUNCTION IF EXISTS queue_workflows_record(workflow_node_jobs, text, text, text, double precision, text, jsonb);
DROP FUNCTION IF EXISTS queue_workflows_must_end(ingest_jobs);
DROP FUNCTION IF EXISTS queue_workflows_must_end(workflow_node_jobs);
DROP FUNCTION IF EXISTS queue_workflows_block_unserved(text, text[], integer);
DROP FUNCTION IF EXISTS queue_workflows_unblock_served(text, text[], integer);
DROP FUNCTION IF EXISTS queue_workflows_set_blocked(text, text[], text);
DROP FUNCTION IF EXISTS queue_workflows_served_queues(double precision);
DROP INDEX IF EXISTS workflow_node_jobs_unserved_idx;
DROP INDEX IF EXISTS ingest_jobs_unserved_idx;
-- Jobs that let others go first stand in line again, as before.
UPDATE workflow_node_jobs SET blocked_reason = CASE WHEN lock_key IS NOT NULL THEN 'locked' END
 WHERE status = 'queued' AND blocked_reason = 'unserved';
UPDATE ingest_jobs SET blocked_reason = CASE WHEN lock_key IS NOT NULL THEN 'locked' END
 WHERE status = 'queued' AND blocked_reason = 'unserved';
-- Give their turns now: the table of turns cannot be dropped by an earlier step while they are pending.
SET CONSTRAINTS ALL IMMEDIATE;
SET CONSTRAINTS ALL DEFERRED;
