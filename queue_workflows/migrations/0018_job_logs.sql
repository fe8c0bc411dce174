-- What bodies print: one row an attempt, only for those that print. Apart from the rows that claims write,
-- and without a foreign key, which every change of a job would have to check.
CREATE TABLE IF NOT EXISTS job_attempt_logs (
    job_table  text NOT NULL,
    job_id     text NOT NULL,
    claim_no   bigint NOT NULL,
    head       text NOT NULL DEFAULT '',
    tail       text NOT NULL DEFAULT '',
    cut_bytes  bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (job_id, claim_no, job_table)
);
CREATE INDEX IF NOT EXISTS job_attempt_logs_created_idx ON job_attempt_logs USING brin (created_at);

CREATE OR REPLACE FUNCTION queue_workflows_forget_logs() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM job_attempt_logs l USING gone
     WHERE l.job_id = gone.id AND l.job_table = TG_TABLE_NAME;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS workflow_node_jobs_forget ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_forget AFTER DELETE ON workflow_node_jobs
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_forget_logs();
DROP TRIGGER IF EXISTS ingest_jobs_forget ON ingest_jobs;
CREATE TRIGGER ingest_jobs_forget AFTER DELETE ON ingest_jobs
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_forget_logs();

-- As its owner: whoever may delete a job needs no right to its logs.
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION queue_workflows_forget_logs() SECURITY DEFINER SET search_path = %I, pg_temp',
                   current_schema());
END $$;
REVOKE ALL ON FUNCTION queue_workflows_forget_logs() FROM PUBLIC;
