DROP TRIGGER IF EXISTS worker_controls_drop_end ON worker_controls;
DROP FUNCTION IF EXISTS queue_workflows_drop_end();
