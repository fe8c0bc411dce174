-- Move stored times into the past, for tests of apps.

-- name: move none
-- Let `by` pass: for the start times and the leases of jobs, the start times of runs, outbox rows and answers that are tried
-- again later, the timeouts of input nodes, and since workers and hosts were seen.
WITH ingest AS (
    UPDATE ingest_jobs SET {earlier()} WHERE available_at IS NOT NULL OR lease_expires_at IS NOT NULL),
nodes AS (
    UPDATE workflow_node_jobs SET {earlier()} WHERE available_at IS NOT NULL OR lease_expires_at IS NOT NULL),
runs AS (
    UPDATE workflow_runs SET available_at = available_at - %(by)s::interval WHERE available_at IS NOT NULL),
outbox AS (
    UPDATE workflow_dispatch_events SET available_at = available_at - %(by)s::interval
     WHERE available_at IS NOT NULL AND processed_at IS NULL),
answers AS (
    UPDATE workflow_input_submissions
       SET available_at = available_at - %(by)s::interval, claimed_at = claimed_at - %(by)s::interval
     WHERE status IN ('pending', 'processing')),
inputs AS (
    UPDATE workflow_input_timeouts SET due_at = due_at - %(by)s::interval),
hosts AS (
    UPDATE worker_heartbeats SET last_seen = last_seen - %(by)s::interval)
UPDATE workers SET last_seen = last_seen - %(by)s::interval;

-- name: next_due value
-- Return the seconds until the first instant later than `after` at which something comes due, or
-- NULL if there is none.
SELECT extract(epoch FROM min(at) - now())::float8 AS seconds FROM (
    -- both:
    SELECT min(w.at) AS at FROM ingest_jobs j
     CROSS JOIN LATERAL (VALUES (
           queue_workflows_due_at(j.available_at, j.resume_at, j.resume_until))) w (at)
     WHERE j.status = 'queued' AND w.at > %(after)s
    -- end
     UNION ALL
    SELECT min(available_at) FROM workflow_runs
     WHERE status = 'queued' AND available_at > %(after)s
     UNION ALL
    SELECT min(available_at) FROM workflow_dispatch_events
     WHERE processed_at IS NULL AND available_at > %(after)s
     UNION ALL
    SELECT min(available_at) FROM workflow_input_submissions
     WHERE status = 'pending' AND available_at > %(after)s) waits;
