DROP TRIGGER workflow_runs_child_ended ON workflow_runs;
DROP TRIGGER workflow_runs_cancel_children ON workflow_runs;
DROP TRIGGER workflow_runs_children_gone ON workflow_runs;
ALTER TABLE workflow_node_jobs DROP COLUMN child_run_id;
DROP INDEX workflow_runs_parent_idx;
ALTER TABLE workflow_runs DROP COLUMN parent_node_id;
ALTER TABLE workflow_runs DROP COLUMN parent_run_id;
