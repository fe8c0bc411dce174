-- A run that a node of another run has made. There is no foreign key: either may be deleted before the other.
ALTER TABLE workflow_runs ADD COLUMN parent_run_id text CHECK (octet_length(parent_run_id) <= 1000);
ALTER TABLE workflow_runs ADD COLUMN parent_node_id text CHECK (octet_length(parent_node_id) <= 1000);
CREATE INDEX workflow_runs_parent_idx ON workflow_runs (parent_run_id) WHERE parent_run_id IS NOT NULL;
-- The run that a node has made. Both columns have to agree, so that neither row alone can be forged.
ALTER TABLE workflow_node_jobs ADD COLUMN child_run_id text CHECK (octet_length(child_run_id) <= 1000);
