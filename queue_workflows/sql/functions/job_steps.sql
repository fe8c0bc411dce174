-- Update the steps of a job when its state changes. Only functions of the tables' owner call these.

-- Count a crash of each step that ran under this claim of a job. Return their names, or NULL if
-- none ran.
CREATE OR REPLACE FUNCTION queue_workflows_charge_steps(p_table text, p_job text, p_claim bigint) RETURNS text
LANGUAGE sql AS $$
    WITH charged AS (
        UPDATE job_steps s SET crashes = least(s.crashes, 999999) + 1
         WHERE s.job_table = p_table AND s.job_id = p_job AND s.claim_no = p_claim AND s.state = 'running'
           AND s.kind IN ('step', 'cursor')
     RETURNING s.id, s.name, s.key)
    SELECT string_agg(c.name || CASE WHEN c.key = '' THEN '' ELSE ' (key ' || left(c.key, 100) || ')' END, ', '
                      ORDER BY c.id)
      FROM charged c
$$;

-- Delete all steps of these jobs.
CREATE OR REPLACE FUNCTION queue_workflows_forget_steps(p_table text, p_jobs text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM job_steps) THEN
        DELETE FROM job_steps s WHERE s.job_table = p_table AND s.job_id = ANY (p_jobs);
    END IF;
END $$;

-- Delete all that the handlers of these jobs have streamed.
CREATE OR REPLACE FUNCTION queue_workflows_forget_parts(p_table text, p_jobs text[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM job_parts) THEN
        DELETE FROM job_parts p WHERE p.job_table = p_table AND p.job_id = ANY (p_jobs);
    END IF;
END $$;
