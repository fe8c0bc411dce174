-- Read and write worker_controls, the switches of workers.

-- name: put row
-- Switch the workers of a host and queue on or off; return the row. A trigger wakes the
-- workers.
INSERT INTO worker_controls
       (host_label, queue, desired_state, stop_policy, requested_by, reason, until_at)
VALUES (%(host)s, %(queue)s, %(desired_state)s, %(stop_policy)s, %(requested_by)s, %(reason)s,
        coalesce(%(until)s::timestamptz, now() + %(lasts)s::interval))
    ON CONFLICT (host_label, queue) DO UPDATE
   SET desired_state = excluded.desired_state, stop_policy = excluded.stop_policy,
       requested_by = excluded.requested_by, reason = excluded.reason,
       until_at = excluded.until_at, updated_at = now()
RETURNING *;

-- name: is_over value
-- Return whether an instant has come, by the database's clock.
SELECT %(instant)s::timestamptz <= clock_timestamp() AS over;

-- name: known_queues column
-- Return the queues that workers have served or switches name.
{known_queues()}
 ORDER BY queue;

-- name: known_hosts column
-- Return the hosts that have had a worker of any queue, or that a control row names.
SELECT host_label FROM workers
 UNION SELECT host_label FROM worker_heartbeats
 UNION SELECT host_label FROM worker_controls
 ORDER BY host_label;

-- name: get one
-- Return the control row of a host and queue. Returns no row if it was never switched.
SELECT * FROM worker_controls WHERE host_label = %(host)s AND queue = %(queue)s;

-- name: off_policy value
-- Return the stop policy of the control row that switches a host and queue off now, or NULL if it
-- is on.
SELECT queue_workflows_off_policy(%(host)s, %(queue)s) AS policy;
