DROP FUNCTION IF EXISTS queue_workflows_kept_until(timestamptz, timestamptz, timestamptz),
    queue_workflows_ingest_kept(text, text, text, text, text[], text[], integer),
    queue_workflows_node_kept(text, text, text, text, text[], text[], integer);
ALTER TABLE ingest_jobs DROP COLUMN resume_until, DROP COLUMN resume_at, DROP COLUMN resume_host;
ALTER TABLE workflow_node_jobs DROP COLUMN resume_until, DROP COLUMN resume_at, DROP COLUMN resume_host;
DROP DOMAIN queue_workflows_resume_time, queue_workflows_resume_host;
DROP TABLE job_steps;
-- The triggers of the present set call them, until an older release installs its own set.
CREATE OR REPLACE FUNCTION queue_workflows_charge_steps(p_table text, p_job text, p_claim bigint) RETURNS text
LANGUAGE sql AS 'SELECT NULL::text';
CREATE OR REPLACE FUNCTION queue_workflows_forget_steps(p_table text, p_jobs text[]) RETURNS void
LANGUAGE plpgsql AS 'BEGIN END';
