DROP INDEX workflow_node_jobs_asking_idx;
DROP TABLE failures_seen;
