DROP TABLE job_steps;
-- The triggers of the present set call them, until an older release installs its own set.
CREATE OR REPLACE FUNCTION queue_workflows_charge_steps(p_table text, p_job text, p_claim bigint) RETURNS text
LANGUAGE sql AS 'SELECT NULL::text';
CREATE OR REPLACE FUNCTION queue_workflows_forget_steps(p_table text, p_jobs text[]) RETURNS void
LANGUAGE plpgsql AS 'BEGIN END';
