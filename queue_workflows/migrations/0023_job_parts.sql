-- What handlers stream: parts in the order of claim and number. A part belongs to a job of either family, so there is no
-- foreign key; a trigger deletes the parts of deleted jobs.
CREATE TABLE job_parts (
    job_table  text NOT NULL CHECK (job_table IN ('ingest_jobs', 'workflow_node_jobs')),
    job_id     text NOT NULL CHECK (octet_length(job_id) <= 1000),
    -- The claim of the job under which the part was sent: a new one begins the stream again.
    claim_no   queue_workflows_number NOT NULL,
    -- 1, 2, 3 ... within a claim, over all names.
    seq        integer NOT NULL CHECK (seq > 0),
    name       text NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 400),
    part       jsonb NOT NULL CONSTRAINT job_parts_part_bound CHECK (octet_length(part::text) <= 1048576),
    created_at queue_workflows_time NOT NULL DEFAULT now(),
    PRIMARY KEY (job_id, job_table, claim_no, seq)
);
