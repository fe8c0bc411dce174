DROP TABLE IF EXISTS workflow_run_files;
DROP TABLE IF EXISTS workflow_runs;
