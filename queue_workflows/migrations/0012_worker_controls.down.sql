DROP TABLE IF EXISTS worker_controls;
DROP FUNCTION IF EXISTS notify_worker_control();
