-- Check cheaply whether the orchestrator or a sweep has work.

-- name: work row prepared
-- Return which work waits for an orchestrator: runs to start, events to dispatch, answers to take,
-- and delayed jobs or runs whose time has come. `run_due_s`: in how many seconds the next delayed
-- run is due, if that is within `within_s` seconds, at most a day. A run that was due before and
-- could not be promoted, as its row is locked or raises, is left to the poll.
SELECT EXISTS (SELECT FROM workflow_runs
                WHERE status = 'queued' AND mode = 'node' AND available_at IS NULL) AS runs,
       EXISTS (SELECT FROM workflow_dispatch_events
                WHERE processed_at IS NULL
                  AND (available_at IS NULL OR available_at <= now())) AS events,
       EXISTS (SELECT FROM workflow_input_submissions
                WHERE status IN ('pending', 'processing')
                  AND (available_at IS NULL OR available_at <= now())) AS answers,
       EXISTS (SELECT FROM workflow_node_jobs
                WHERE status = 'queued' AND blocked_reason IS NOT NULL AND available_at <= now())
       OR EXISTS (SELECT FROM ingest_jobs
                   WHERE status = 'queued' AND blocked_reason IS NOT NULL
                     AND available_at <= now())
       OR EXISTS (SELECT FROM workflow_runs
                   WHERE status = 'queued' AND mode = 'node' AND available_at <= now()) AS due,
       (SELECT greatest(0, extract(epoch FROM available_at - clock_timestamp()))::float8
          FROM workflow_runs
         WHERE status = 'queued' AND mode = 'node' AND available_at > now()
           AND available_at <= now() + greatest(0, least(%(within_s)s::float8, 86400))
                                       * interval '1 second'
         ORDER BY available_at LIMIT 1) AS run_due_s;

-- name: sweeps row prepared
-- Return which sweeps have work: leases that lapsed, input nodes that waited too long, waiters in
-- lock queues or jobs that no worker serves, and partitions with limits or waiters. Each part walks
-- an index in its order, so that no plan reads a whole table, whatever the statistics say.
SELECT coalesce((SELECT true FROM workflow_node_jobs
                  WHERE status = 'running'
                    AND (lease_expires_at IS NULL OR lease_expires_at < now())
                  ORDER BY worker_id LIMIT 1),
                (SELECT true FROM ingest_jobs
                  WHERE status = 'running'
                    AND (lease_expires_at IS NULL OR lease_expires_at < now())
                  ORDER BY worker_id LIMIT 1), false) AS leases,
       EXISTS (SELECT FROM workflow_input_timeouts WHERE due_at <= now()) AS inputs,
       w.locked AS lock_queues,
       EXISTS (SELECT FROM partition_dues WHERE due_at <= now())
       OR EXISTS (SELECT FROM queue_partition_limits)
       OR w.limited AS partitions
  FROM queue_workflows_has_waiters() w;

-- name: silent_jobs value prepared
-- Return whether a running job of either family was not renewed for `silent_s` seconds.
SELECT coalesce((SELECT true FROM workflow_node_jobs
                  WHERE status = 'running'
                    AND heartbeat_at < now() - %(silent_s)s::float8 * interval '1 second'
                  ORDER BY worker_id LIMIT 1),
                (SELECT true FROM ingest_jobs
                  WHERE status = 'running'
                    AND heartbeat_at < now() - %(silent_s)s::float8 * interval '1 second'
                  ORDER BY worker_id LIMIT 1), false) AS silent;
