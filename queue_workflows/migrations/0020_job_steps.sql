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
