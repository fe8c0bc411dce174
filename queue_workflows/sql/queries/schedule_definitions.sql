-- Store, change and show the rows of schedules.

-- name: put one
-- Insert a schedule, or replace the definition of the one of this name, source and app, or bring back one that has left
-- the code of this or another app, changed or not. Returns no row if it is the same already, or of another source or app.
INSERT INTO schedules AS s (
    name, expression, tz, task_name, args, workflow_name, inputs, queue, priority, idempotency_key, headers,
    catch_up, catch_up_max, catch_up_within_s, overlap, jitter_s, start_at, end_at, source, app, on_failure,
    definition_hash)
VALUES (
    %(name)s, %(expression)s, %(tz)s, %(task_name)s, %(args)s::jsonb, %(workflow_name)s, %(inputs)s::jsonb,
    %(queue)s, %(priority)s, %(idempotency_key)s, %(headers)s::jsonb, %(catch_up)s, %(catch_up_max)s,
    %(catch_up_within_s)s, %(overlap)s, %(jitter_s)s, %(start_at)s, %(end_at)s, %(source)s, %(app)s, %(on_failure)s,
    %(definition_hash)s)
ON CONFLICT (name) DO UPDATE SET
    expression = excluded.expression, tz = excluded.tz, task_name = excluded.task_name, args = excluded.args,
    workflow_name = excluded.workflow_name, inputs = excluded.inputs, queue = excluded.queue,
    priority = excluded.priority, idempotency_key = excluded.idempotency_key, headers = excluded.headers,
    catch_up = excluded.catch_up, catch_up_max = excluded.catch_up_max,
    catch_up_within_s = excluded.catch_up_within_s, overlap = excluded.overlap, jitter_s = excluded.jitter_s,
    start_at = excluded.start_at, end_at = excluded.end_at, definition_hash = excluded.definition_hash,
    app = excluded.app, on_failure = excluded.on_failure, gone_at = NULL, clash = NULL,
    changes = CASE WHEN s.definition_hash IS DISTINCT FROM excluded.definition_hash THEN (
        SELECT jsonb_object_agg(o.key, jsonb_build_array(o.value, n.value))
          FROM jsonb_each(to_jsonb(s)) AS o (key, value)
          JOIN jsonb_each(to_jsonb(excluded)) AS n (key, value) USING (key)
         WHERE o.value IS DISTINCT FROM n.value AND key = ANY (%(columns)s::text[])) ELSE s.changes END
 WHERE s.source = excluded.source AND (s.app IS NOT DISTINCT FROM excluded.app OR s.gone_at IS NOT NULL)
   AND (s.definition_hash IS DISTINCT FROM excluded.definition_hash OR s.gone_at IS NOT NULL)
RETURNING name, xmax = 0 AS inserted;

-- name: begin none
-- Let a schedule that the code has changed begin now, by the clock of the scheduler.
UPDATE schedules SET changed_at = %(now)s WHERE name = %(name)s;

-- name: adopt none
-- Let a new row of an old-style entry continue from the last fire under its name up to `now`.
UPDATE schedules s SET last_fire_at = f.fire_at, last_job_id = f.job_id, changed_at = f.fire_at
  FROM (SELECT fire_at, job_id FROM schedule_fires WHERE name = %(name)s AND fire_at <= %(now)s
         ORDER BY fire_at DESC LIMIT 1) f
 WHERE s.name = %(name)s;

-- name: stored many
-- Return the definitions of an app's schedules that are in its code.
SELECT name, definition_hash FROM schedules WHERE source = 'code' AND app = %(app)s AND gone_at IS NULL;

-- name: owner one
-- Return whose the schedule of a name is.
SELECT source, app FROM schedules WHERE name = %(name)s;

-- name: clash none
-- Record on a schedule that the code of another app names it too.
UPDATE schedules SET clash = %(app)s WHERE name = %(name)s AND clash IS DISTINCT FROM %(app)s;

-- name: end_clashes none
-- Forget the names that an app does not share any more.
UPDATE schedules SET clash = NULL WHERE clash = %(app)s AND name <> ALL (%(names)s::text[]);

-- name: mark_gone column
-- Mark the schedules of an app that its code does not name any more. They do not fire, and keep their history.
UPDATE schedules SET gone_at = now()
 WHERE source = 'code' AND app = %(app)s AND gone_at IS NULL AND name <> ALL (%(names)s::text[])
RETURNING name;

-- name: set_paused count
-- Pause or resume a schedule. Instants of the pause never fire.
UPDATE schedules SET paused = %(paused)s WHERE name = %(name)s RETURNING name;

-- name: lock one
-- Lock one schedule and return it.
SELECT * FROM schedules WHERE name = %(name)s FOR UPDATE;

-- name: remove count
-- Delete a schedule.
DELETE FROM schedules WHERE name = %(name)s RETURNING name;

-- name: find many
-- Return up to `limit` schedules, those with a problem alone if `troubled`: `last_status` of the last job or run,
-- `failures`, `late_s` if the next instant is overdue by more than `patience_s` (no scheduler fires it), and `missed`
-- if an instant was missed since the last fire. `failures`: how many of the last fires, boot kicks among them, failed in
-- a row (100 at most); fires that queued nothing, and jobs and runs that are gone or not over, do not count, nor do fires
-- past their retention, except the last. `read_at`: the time of this read.
SELECT c.*, greatest(f.n, (c.last_status = 'failed')::integer, 0) AS failures, now() AS read_at
  FROM (SELECT s.*, coalesce(j.status::text, r.status) AS last_status,
               CASE WHEN NOT s.paused AND NOT s.ended AND s.gone_at IS NULL
                     AND coalesce(s.wake_at, s.changed_at) < now() - make_interval(secs => %(patience_s)s)
                    THEN extract(epoch FROM now() - coalesce(s.wake_at, s.changed_at))::float8 END AS late_s,
               coalesce(s.missed_at > coalesce(s.last_fire_at, '-infinity'), false) AS missed
          FROM schedules s
          LEFT JOIN ingest_jobs j ON j.id = s.last_job_id
          LEFT JOIN workflow_runs r ON r.id = s.last_run_id
         WHERE %(name)s::text IS NULL OR s.name = %(name)s) c
  LEFT JOIN LATERAL (
       SELECT count(*) FILTER (WHERE o.good = 0) AS n
         FROM (SELECT sum((x.status = 'completed')::integer) OVER (ORDER BY x.fire_at DESC) AS good
                 FROM (SELECT e.fire_at, coalesce(ej.status::text, er.status) AS status
                         FROM unnest(ARRAY[c.name, c.name || ':boot']) AS own (name)
                        CROSS JOIN LATERAL (
                              SELECT fire_at, job_id, run_id FROM schedule_fires
                               WHERE name = own.name AND c.last_status <> 'completed'
                               ORDER BY fire_at DESC LIMIT 100) e
                         LEFT JOIN ingest_jobs ej ON ej.id = e.job_id
                         LEFT JOIN workflow_runs er ON er.id = e.run_id
                        ORDER BY e.fire_at DESC LIMIT 100) x
                WHERE x.status IN ('completed', 'failed')) o) f ON true
 WHERE NOT %(troubled)s
    OR NOT c.paused AND c.gone_at IS NULL
   AND (c.error IS NOT NULL OR c.clash IS NOT NULL OR c.late_s IS NOT NULL OR c.missed OR f.n > 0
        OR c.last_status = 'failed')
 ORDER BY c.name
 LIMIT %(limit)s;
