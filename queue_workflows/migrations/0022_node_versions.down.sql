DROP FUNCTION IF EXISTS queue_workflows_pick_version(text, text[], boolean), queue_workflows_version_heads(text, text[]);
ALTER TABLE workflow_runs DROP COLUMN upgrades, DROP COLUMN revision;
DROP DOMAIN queue_workflows_upgrades;
DROP DOMAIN queue_workflows_revision;
DROP INDEX workflow_node_jobs_gpu_idx;
DROP INDEX workflow_node_jobs_claim_idx;
CREATE INDEX workflow_node_jobs_claim_idx ON workflow_node_jobs (queue, priority, seq)
    WHERE status = 'queued' AND blocked_reason IS NULL;
ALTER TABLE workflow_node_jobs DROP COLUMN required_version;
DROP DOMAIN queue_workflows_node_version;
