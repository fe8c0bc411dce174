-- Versions of nodes: a job of a node with a code version is claimed only by workers that have this version.
-- A domain, as PostgreSQL parses the text of a CHECK anew for every statement that writes the table.
CREATE DOMAIN queue_workflows_node_version AS text CHECK (octet_length(VALUE) BETWEEN 1 AND 1200);
-- The node's module, '@' and the version. NULL: any worker may claim the job.
ALTER TABLE workflow_node_jobs ADD COLUMN required_version queue_workflows_node_version;
-- The order of claims within a version, so that no claim reads past jobs of versions which its worker does not have.
DROP INDEX workflow_node_jobs_claim_idx;
CREATE INDEX workflow_node_jobs_claim_idx ON workflow_node_jobs (queue, required_version, priority, seq)
    WHERE status = 'queued' AND blocked_reason IS NULL;
CREATE INDEX workflow_node_jobs_gpu_idx ON workflow_node_jobs (priority, seq)
    WHERE queue = 'gpu' AND status = 'queued' AND blocked_reason IS NULL;
-- How often the run was moved to other code, and each of the last moves: at, actor, what changed.
CREATE DOMAIN queue_workflows_revision AS integer CHECK (VALUE BETWEEN 0 AND 1000000000);
ALTER TABLE workflow_runs ADD COLUMN revision queue_workflows_revision NOT NULL DEFAULT 0;
CREATE DOMAIN queue_workflows_upgrades AS jsonb CHECK (octet_length(VALUE::text) <= 1048576);
ALTER TABLE workflow_runs ADD COLUMN upgrades queue_workflows_upgrades NOT NULL DEFAULT '[]';
