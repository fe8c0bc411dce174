DROP TABLE job_parts;
-- The triggers of the present set call it, until an older release installs its own set.
CREATE OR REPLACE FUNCTION queue_workflows_forget_parts(p_table text, p_jobs text[]) RETURNS void
LANGUAGE plpgsql AS 'BEGIN END';
