DROP INDEX job_steps_waiting_idx;
DROP TABLE events;
