-- The steps of handlers: what each has returned, so that a later attempt does not do it again. A step belongs to a job of
-- either family, so there is no foreign key; a trigger deletes the steps of deleted jobs.
CREATE TABLE job_steps (
    -- The order in which the steps of a job began first.
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_table      text NOT NULL CHECK (job_table IN ('ingest_jobs', 'workflow_node_jobs')),
    job_id         text NOT NULL CHECK (octet_length(job_id) <= 1000),
    kind           text NOT NULL CHECK (kind IN ('step', 'cursor', 'event', 'sleep')),
    name           text NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 400),
    key            text NOT NULL DEFAULT '' CHECK (octet_length(key) <= 1000),
    -- SHA-256 of the arguments, and their first characters.
    arguments_hash text NOT NULL DEFAULT '' CHECK (octet_length(arguments_hash) <= 64),
    arguments      text NOT NULL DEFAULT '' CHECK (octet_length(arguments) <= 8000),
    state          text NOT NULL CHECK (state IN ('running', 'waiting', 'done', 'failed')),
    output         jsonb,
    error          text CHECK (char_length(error) <= 8000),
    -- Items of a cursor that are done.
    position       queue_workflows_number NOT NULL DEFAULT 0,
    -- The claim of the job under which the step began last.
    claim_no       queue_workflows_number NOT NULL,
    attempts       integer NOT NULL DEFAULT 0 CHECK (attempts BETWEEN 0 AND 1000000),
    crashes        integer NOT NULL DEFAULT 0 CHECK (crashes BETWEEN 0 AND 1000000),
    -- Until when a sleep or the wait for an event lasts; NULL: without an end.
    due_at         queue_workflows_time,
    started_at     queue_workflows_time NOT NULL DEFAULT now(),
    ended_at       queue_workflows_time,
    UNIQUE (job_id, job_table, kind, name, key)
);
-- The host on which the handler of a job began to wait, and from when until when only its workers claim the job. They count
-- while the job is queued and `resume_until` is its `available_at`, so every change of that ends them.
-- Domains, as PostgreSQL parses the text of a CHECK anew for every statement that writes the table. They get their checks
-- after the columns: to add a column of a domain with a check writes the whole table again.
CREATE DOMAIN queue_workflows_resume_host AS text;
CREATE DOMAIN queue_workflows_resume_time AS timestamptz;
ALTER TABLE workflow_node_jobs
    ADD COLUMN resume_host  queue_workflows_resume_host,
    ADD COLUMN resume_at    queue_workflows_resume_time,
    ADD COLUMN resume_until queue_workflows_resume_time;
ALTER TABLE ingest_jobs
    ADD COLUMN resume_host  queue_workflows_resume_host,
    ADD COLUMN resume_at    queue_workflows_resume_time,
    ADD COLUMN resume_until queue_workflows_resume_time;
ALTER DOMAIN queue_workflows_resume_host ADD CONSTRAINT queue_workflows_resume_host_check
    CHECK (octet_length(VALUE) <= 1000) NOT VALID;
ALTER DOMAIN queue_workflows_resume_time ADD CONSTRAINT queue_workflows_resume_time_check
    CHECK (VALUE BETWEEN '2000-01-01+00' AND '9999-12-31+00') NOT VALID;
-- A job with a lock key is never kept.
CREATE INDEX workflow_node_jobs_resume_idx ON workflow_node_jobs (resume_host, queue, resume_at)
    WHERE status = 'queued' AND blocked_reason = 'not_due' AND resume_until = available_at AND lock_key IS NULL;
CREATE INDEX ingest_jobs_resume_idx ON ingest_jobs (resume_host, queue, resume_at)
    WHERE status = 'queued' AND blocked_reason = 'not_due' AND resume_until = available_at AND lock_key IS NULL;
