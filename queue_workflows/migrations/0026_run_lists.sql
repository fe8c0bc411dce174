-- Lists of runs read an index in the order of the list: the newest first, of all runs, of a workflow, or of a status.
-- A list reads it backward, so that new runs are added at its end, where PostgreSQL fills its pages. The id is an
-- expression there. As a column it would offer the index for each look-up of a run by its id, and a planner that takes
-- the table for a small one would read the index as a whole. The index by status replaces the one of the status alone.
-- An operator of a large table may build each of them before by CREATE INDEX CONCURRENTLY, under the same name.
CREATE INDEX IF NOT EXISTS workflow_runs_created_idx ON workflow_runs (created_at, (id || '') COLLATE "C" DESC);
CREATE INDEX IF NOT EXISTS workflow_runs_workflow_created_idx
    ON workflow_runs (workflow_name, created_at, (id || '') COLLATE "C" DESC);
CREATE INDEX IF NOT EXISTS workflow_runs_status_created_idx
    ON workflow_runs (status, created_at, (id || '') COLLATE "C" DESC);
DROP INDEX IF EXISTS workflow_runs_status_idx;
-- Lists of jobs, and the failures of both families.
CREATE INDEX IF NOT EXISTS ingest_jobs_seq_idx ON ingest_jobs (seq);
CREATE INDEX IF NOT EXISTS ingest_jobs_failed_idx
    ON ingest_jobs (finished_at, (id || '') COLLATE "C" DESC) WHERE status = 'failed';
CREATE INDEX IF NOT EXISTS workflow_node_jobs_failed_idx
    ON workflow_node_jobs (finished_at, (id || '') COLLATE "C" DESC) WHERE status = 'failed';
