-- Read, close and postpone events of the outbox.

-- name: runs_with_events column prepared
-- Return the runs that have events to dispatch, the run of the oldest event first. Leaves out runs
-- in `set_aside` and, unless `undefined`, runs without a definition. Reads 5,000 events at most.
SELECT run_id
  FROM (SELECT id, run_id FROM workflow_dispatch_events
         WHERE processed_at IS NULL AND (available_at IS NULL OR available_at <= now())
           AND (%(undefined)s OR EXISTS (SELECT FROM workflow_runs r
                                          WHERE r.id = run_id AND r.definition IS NOT NULL))
           AND run_id <> ALL (%(set_aside)s::text[])
         ORDER BY id LIMIT 5000) open
 GROUP BY run_id ORDER BY min(id) LIMIT %(limit)s;

-- name: open_events many prepared
-- Return a run's open events that are due, the oldest first, each with the status and the error of
-- its node. If `only` is given, only the event with this id. LIMIT 1 forces one look-up per event;
-- without it, the join may read every version of the run's rows.
SELECT e.id, e.node_id, e.kind, e.attempts, j.status AS node_status, j.error AS node_error
  FROM workflow_dispatch_events e
  LEFT JOIN LATERAL (SELECT status, error FROM workflow_node_jobs
                      WHERE run_id = e.run_id AND node_id = e.node_id LIMIT 1) j ON true
 WHERE e.run_id = %(run_id)s AND e.processed_at IS NULL
   AND (%(only)s::bigint IS NULL OR e.id = %(only)s::bigint)
   AND (e.available_at IS NULL OR e.available_at <= now())
 ORDER BY e.id LIMIT %(limit)s;

-- name: close none prepared
-- Close events. If `error` is not NULL, they are poison, and it is the reason.
UPDATE workflow_dispatch_events SET processed_at = now(), error = coalesce(%(error)s, error)
 WHERE id = ANY (%(events)s);

-- name: close_failures none
-- Close the open events of a run's nodes that failed before this generation, in which they run again.
UPDATE workflow_dispatch_events SET processed_at = now()
 WHERE run_id = %(run_id)s AND processed_at IS NULL AND kind = 'failed' AND generation < %(before)s;

-- name: postpone value
-- Count a dispatch that failed, make the event due again later, and return how many failed.
UPDATE workflow_dispatch_events
   SET error = %(error)s, attempts = least(greatest(attempts, 0), 32000) + 1,
       available_at = now() + %(after_s)s * interval '1 second'
 WHERE id = %(event)s AND processed_at IS NULL
RETURNING attempts;

-- name: unprocessed many
-- Return open events, the oldest first.
SELECT * FROM workflow_dispatch_events WHERE processed_at IS NULL ORDER BY id LIMIT %(limit)s;
