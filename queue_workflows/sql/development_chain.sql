-- Turn the tables of the last development build into those of the release. The set of functions and triggers is
-- installed afterwards.

CREATE TABLE queue_schema_objects (
    part            text PRIMARY KEY,
    checksum        text NOT NULL,
    package_version text NOT NULL,
    objects         jsonb NOT NULL,
    installed_at    timestamptz NOT NULL DEFAULT now()
);
GRANT SELECT ON queue_schema_objects TO PUBLIC;
ALTER TABLE lock_turns ADD COLUMN IF NOT EXISTS admits boolean NOT NULL DEFAULT false;
ALTER TABLE partition_turns
    ADD COLUMN IF NOT EXISTS admits boolean NOT NULL DEFAULT false,
    DROP CONSTRAINT partition_turns_pkey,
    ADD PRIMARY KEY (xid, queue, partition_key, admits);
DROP TRIGGER IF EXISTS ingest_jobs_cancel_asked ON ingest_jobs;
DROP TRIGGER IF EXISTS ingest_jobs_audit_gone ON ingest_jobs;
DROP TRIGGER IF EXISTS ingest_jobs_forget ON ingest_jobs;
DROP TRIGGER IF EXISTS workflow_node_jobs_forget ON workflow_node_jobs;
DROP FUNCTION IF EXISTS queue_workflows_audit_cancel();
DROP FUNCTION IF EXISTS queue_workflows_audit_gone();
DROP FUNCTION IF EXISTS queue_workflows_forget_logs();
