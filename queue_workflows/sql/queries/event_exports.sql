-- Export the history: read the events that others commit, each once, in whatever order they commit.

-- name: create none
-- Register an export, which begins with the events after the present ones.
INSERT INTO event_exports (name, node_event, ingest_event)
SELECT %(name)s,
       coalesce(pg_sequence_last_value(pg_get_serial_sequence('workflow_node_events', 'id')), 0),
       coalesce(pg_sequence_last_value(pg_get_serial_sequence('ingest_job_events', 'id')), 0)
    ON CONFLICT (name) DO NOTHING;

-- name: take one
-- Take or keep the export for `lease_s` seconds and return how far it is. Returns no row if another
-- process has it.
UPDATE event_exports
   SET taken_by = %(who)s, taken_until = now() + make_interval(secs => %(lease_s)s)
 WHERE name = %(name)s
   AND (taken_by IS NULL OR taken_by = %(who)s OR taken_until IS NULL OR taken_until < now())
RETURNING node_event, ingest_event;

-- name: release none
-- Let another process take the export at once.
UPDATE event_exports SET taken_by = NULL, taken_until = NULL, updated_at = now()
 WHERE name = %(name)s AND taken_by = %(who)s;

-- name: advance one
-- Note that all events up to these are exported. Returns no row if another process has the export.
UPDATE event_exports SET node_event = %(node_event)s, ingest_event = %(ingest_event)s,
                         updated_at = now()
 WHERE name = %(name)s AND taken_by = %(who)s
RETURNING name;

-- name: prune count
-- Delete up to `batch` exports that no process has had for over `days` days, so that their next events are deleted.
DELETE FROM event_exports WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM event_exports
     WHERE greatest(taken_until, updated_at) < now() - %(days)s * interval '1 day'
     LIMIT %(batch)s FOR UPDATE SKIP LOCKED));

-- name: last_ids row
-- Return the last event ids that any transaction has taken, committed or not.
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('workflow_node_events', 'id')), 0)
           AS node_event,
       coalesce(pg_sequence_last_value(pg_get_serial_sequence('ingest_job_events', 'id')), 0)
           AS ingest_event;

-- name: transactions column
-- Return the transactions that run now, except this one, including prepared ones. Each holds the
-- lock of its own id until it ends.
SELECT DISTINCT virtualtransaction AS id FROM pg_locks
 WHERE locktype IN ('virtualxid', 'transactionid') AND mode = 'ExclusiveLock' AND granted
   AND pid IS DISTINCT FROM pg_backend_pid();

-- name: events many
-- tables: ingest_jobs workflow_node_jobs
-- Return up to `batch` events whose ids are in one of the ranges.
SELECT
       e.actor,  -- ingest only
       e.run_id, e.node_id, e.model,  -- nodes only
       {exported(e)}
  FROM unnest(%(lows)s::bigint[], %(highs)s::bigint[]) AS g (low, high)
       CROSS JOIN LATERAL (SELECT * FROM ingest_job_events o
                            WHERE o.id BETWEEN g.low AND g.high ORDER BY o.id LIMIT %(batch)s) e
 ORDER BY e.id LIMIT %(batch)s;

-- name: attempts many
-- tables: ingest_jobs workflow_node_jobs
-- Return the events of these claims, the oldest first, with the name of the task or workflow and the trace of the job or
-- run. `waited_from`: when the claim before ended, else when the job was queued.
SELECT
       e.run_id, e.node_id, e.model, left(r.workflow_name, 500) AS name, r.headers ->> 'traceparent' AS traceparent,  -- nodes only
       left(j.task_name, 500) AS name, j.headers ->> 'traceparent' AS traceparent,  -- ingest only
       {exported(e)}, CASE WHEN octet_length(e.detail::text) <= 16000 THEN e.detail END AS detail,
       coalesce((SELECT max(p.created_at) FROM ingest_job_events p
                  WHERE {same_job(p, e)} p.claim_no < e.claim_no
                    AND p.event_type IN ('completed', 'failed', 'cancelled', 'retried',
                                         'requeued', 'reclaimed')),
                j.created_at) AS waited_from
  FROM unnest(
              %(runs)s::text[], %(nodes)s::text[],  -- nodes only
              %(jobs)s::text[], %(claims)s::bigint[])
           AS c (
              run_id, node_id,  -- nodes only
              job_id, claim_no)
       JOIN ingest_job_events e
         ON {same_job(e, c)} e.claim_no = c.claim_no AND e.event_type <> ALL (%(without)s::text[])
       LEFT JOIN ingest_jobs j ON j.id = e.job_id
       LEFT JOIN workflow_runs r ON r.id = e.run_id  -- nodes only
 ORDER BY e.id;

-- name: add_runs none
-- Note runs with exported events, whose own end is to be exported.
INSERT INTO event_export_runs (name, run_id)
SELECT %(name)s, r.run_id FROM unnest(%(runs)s::text[]) AS r (run_id)
    ON CONFLICT DO NOTHING;

-- name: ended_runs many
-- Return up to `batch` of these runs that are over, with all their nodes, since a later event would export the run again.
-- The workflow of a deleted run is NULL.
SELECT o.run_id, left(r.workflow_name, 500) AS name, r.status::text, left(r.error, 2000) AS error,
       r.generation, r.priority, r.created_at, r.queued_at, r.started_at, r.finished_at,
       r.headers ->> 'traceparent' AS traceparent
  FROM event_export_runs o LEFT JOIN workflow_runs r ON r.id = o.run_id
 WHERE o.name = %(name)s AND (r.id IS NULL OR queue_workflows_is_terminal_run(r.status))
   AND NOT EXISTS (SELECT FROM workflow_node_jobs j
                    WHERE j.run_id = o.run_id AND NOT queue_workflows_is_terminal_job(j.status) OFFSET 0)
 LIMIT %(batch)s;

-- name: remove_runs none
-- Forget runs whose end is exported.
DELETE FROM event_export_runs WHERE name = %(name)s AND run_id = ANY (%(runs)s::text[]);
