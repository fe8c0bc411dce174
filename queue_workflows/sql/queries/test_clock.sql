-- Move stored times into the past, for tests of apps.

-- name: move_jobs none
-- tables: ingest_jobs workflow_node_jobs
-- Let `by` pass for the start times and the leases of jobs.
UPDATE ingest_jobs
   SET available_at = available_at - %(by)s::interval, lease_expires_at = lease_expires_at - %(by)s::interval,
       resume_at = resume_at - %(by)s::interval, resume_until = resume_until - %(by)s::interval
 WHERE available_at IS NOT NULL OR lease_expires_at IS NOT NULL;

-- name: move_runs none
-- Let `by` pass for the start times of runs.
UPDATE workflow_runs SET available_at = available_at - %(by)s::interval WHERE available_at IS NOT NULL;

-- name: move_outbox none
-- Let `by` pass for the outbox rows that are tried again later.
UPDATE workflow_dispatch_events SET available_at = available_at - %(by)s::interval
 WHERE available_at IS NOT NULL AND processed_at IS NULL;

-- name: move_answers none
-- Let `by` pass for the answers to input nodes that are tried again later.
UPDATE workflow_input_submissions
   SET available_at = available_at - %(by)s::interval, claimed_at = claimed_at - %(by)s::interval
 WHERE status IN ('pending', 'processing');

-- name: move_input_timeouts none
-- Let `by` pass for the timeouts of input nodes.
UPDATE workflow_input_timeouts SET due_at = due_at - %(by)s::interval;

-- name: move_workers none
-- Let `by` pass since workers were seen.
UPDATE workers SET last_seen = last_seen - %(by)s::interval;

-- name: move_heartbeats none
-- Let `by` pass since hosts were seen.
UPDATE worker_heartbeats SET last_seen = last_seen - %(by)s::interval;

-- name: next_due value
-- Return the seconds until the first instant later than `after` at which something comes due.
-- NULL: nothing waits for a later one.
SELECT extract(epoch FROM min(at) - now())::float8 AS seconds FROM (
    SELECT min(w.at) AS at FROM workflow_node_jobs j
     CROSS JOIN LATERAL (VALUES (
           queue_workflows_due_at(j.available_at, j.resume_at, j.resume_until))) w (at)
     WHERE j.status = 'queued' AND w.at > %(after)s
     UNION ALL
    SELECT min(w.at) FROM ingest_jobs j
     CROSS JOIN LATERAL (VALUES (
           queue_workflows_due_at(j.available_at, j.resume_at, j.resume_until))) w (at)
     WHERE j.status = 'queued' AND w.at > %(after)s
     UNION ALL
    SELECT min(available_at) FROM workflow_runs
     WHERE status = 'queued' AND available_at > %(after)s
     UNION ALL
    SELECT min(available_at) FROM workflow_dispatch_events
     WHERE processed_at IS NULL AND available_at > %(after)s
     UNION ALL
    SELECT min(available_at) FROM workflow_input_submissions
     WHERE status = 'pending' AND available_at > %(after)s) waits;
