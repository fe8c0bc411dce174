-- Logs of attempts.

-- Delete the logs of deleted jobs. It runs as its owner: a role that may delete a job needs no right to its
-- logs.
CREATE OR REPLACE FUNCTION queue_workflows_forget_logs() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    DELETE FROM job_attempt_logs l USING gone
     WHERE l.job_id = gone.id AND l.job_table = TG_TABLE_NAME;
    RETURN NULL;
END $$;
