-- The rows of schedules: which are due, what they fire, and what their fires became.

-- name: due
-- Lock up to `limit` schedules that are due or not planned yet, and that no other scheduler has locked.
SELECT *
  FROM schedules
 WHERE NOT paused AND NOT ended AND gone_at IS NULL AND error IS NULL
   AND (wake_at IS NULL OR wake_at <= %(now)s)
 ORDER BY wake_at NULLS FIRST, name
 LIMIT %(limit)s
   FOR UPDATE SKIP LOCKED;

-- name: wake
-- Return whether there are schedules, and when the next is due; NULL: none is, or one is not planned.
SELECT EXISTS (SELECT FROM schedules) AS any,
       (SELECT wake_at FROM schedules
         WHERE NOT paused AND NOT ended AND gone_at IS NULL AND error IS NULL AND wake_at IS NOT NULL
         ORDER BY wake_at LIMIT 1) AS wake_at;

-- name: lock
-- Lock one schedule and return it.
SELECT * FROM schedules WHERE name = %(name)s FOR UPDATE;

-- name: plan
-- Store what comes next for a schedule.
UPDATE schedules
   SET next_at = %(next_at)s::timestamptz, wake_at = %(wake_at)s, ended = %(next_at)s::timestamptz IS NULL
 WHERE name = %(name)s;

-- name: plan_again
-- Forget what was planned by a clock that was ahead. With `all`: whatever is planned after `now`; else only
-- schedules that fired or changed after it.
UPDATE schedules SET next_at = NULL, wake_at = NULL, ended = false
 WHERE gone_at IS NULL AND (ended OR next_at > %(now)s)
   AND (%(all)s::boolean OR last_fire_at > %(now)s OR changed_at > %(now)s);

-- name: fired
-- Store what a fire made of a schedule.
UPDATE schedules
   SET last_fire_at = %(fire_at)s, last_job_id = %(job_id)s, last_run_id = %(run_id)s
 WHERE name = %(name)s;

-- name: fail
-- Store why a schedule cannot fire.
UPDATE schedules SET error = left(%(error)s, 2000) WHERE name = %(name)s;

-- name: forget_errors
-- Let schedules that could not fire try again: the code may have changed.
UPDATE schedules SET error = NULL WHERE error IS NOT NULL;

-- name: claim
-- Claim one instant of a schedule. No row: it was claimed before.
INSERT INTO schedule_fires (name, fire_at) VALUES (%(name)s, %(fire_at)s)
ON CONFLICT (name, fire_at) DO NOTHING
RETURNING name;

-- name: record
-- Record what became of a claimed instant.
UPDATE schedule_fires SET job_id = %(job_id)s, run_id = %(run_id)s, skipped = %(skipped)s
 WHERE name = %(name)s AND fire_at = %(fire_at)s;

-- name: last_status
-- Return the status of the job or run of the last fire; NULL: there is none any more.
SELECT coalesce((SELECT status::text FROM ingest_jobs WHERE id = %(job_id)s),
                (SELECT status FROM workflow_runs WHERE id = %(run_id)s)) AS status;

-- name: put
-- Insert a schedule, or replace the definition of the one of the name and source. No row: one of another source
-- has the name.
INSERT INTO schedules AS s (
    name, expression, tz, task_name, args, workflow_name, inputs, queue, priority, idempotency_key, headers,
    catch_up, catch_up_max, catch_up_within_s, overlap, jitter_s, start_at, end_at, source, definition_hash)
VALUES (
    %(name)s, %(expression)s, %(tz)s, %(task_name)s, %(args)s::jsonb, %(workflow_name)s, %(inputs)s::jsonb,
    %(queue)s, %(priority)s, %(idempotency_key)s, %(headers)s::jsonb, %(catch_up)s, %(catch_up_max)s,
    %(catch_up_within_s)s, %(overlap)s, %(jitter_s)s, %(start_at)s, %(end_at)s, %(source)s, %(definition_hash)s)
ON CONFLICT (name) DO UPDATE SET
    expression = excluded.expression, tz = excluded.tz, task_name = excluded.task_name, args = excluded.args,
    workflow_name = excluded.workflow_name, inputs = excluded.inputs, queue = excluded.queue,
    priority = excluded.priority, idempotency_key = excluded.idempotency_key, headers = excluded.headers,
    catch_up = excluded.catch_up, catch_up_max = excluded.catch_up_max,
    catch_up_within_s = excluded.catch_up_within_s, overlap = excluded.overlap, jitter_s = excluded.jitter_s,
    start_at = excluded.start_at, end_at = excluded.end_at, definition_hash = excluded.definition_hash,
    gone_at = NULL,
    changes = CASE WHEN s.definition_hash IS DISTINCT FROM excluded.definition_hash THEN (
        SELECT jsonb_object_agg(o.key, jsonb_build_array(o.value, n.value))
          FROM jsonb_each(to_jsonb(s)) AS o (key, value)
          JOIN jsonb_each(to_jsonb(excluded)) AS n (key, value) USING (key)
         WHERE o.value IS DISTINCT FROM n.value AND key = ANY (%(columns)s::text[])) ELSE s.changes END
 WHERE s.source = excluded.source
   AND (s.definition_hash IS DISTINCT FROM excluded.definition_hash OR s.gone_at IS NOT NULL)
RETURNING name;

-- name: owner
-- Return the source of the schedule of a name.
SELECT source FROM schedules WHERE name = %(name)s;

-- name: mark_gone
-- Mark the schedules of code that the code does not name any more. They do not fire, and keep their history.
UPDATE schedules SET gone_at = now()
 WHERE source = 'code' AND gone_at IS NULL AND name <> ALL (%(names)s::text[])
RETURNING name;

-- name: set_paused
-- Pause or resume a schedule. Instants of the pause never fire.
UPDATE schedules SET paused = %(paused)s WHERE name = %(name)s RETURNING name;

-- name: remove
-- Delete a schedule.
DELETE FROM schedules WHERE name = %(name)s RETURNING name;

-- name: find
-- Return the schedules with the status of their last job or run, and how many of their last fires failed in a
-- row (100 at most): fires that queued nothing, and jobs and runs that are gone or not over, do not count.
SELECT s.*, coalesce(j.status::text, r.status) AS last_status, coalesce(f.n, 0) AS failures
  FROM schedules s
  LEFT JOIN ingest_jobs j ON j.id = s.last_job_id
  LEFT JOIN workflow_runs r ON r.id = s.last_run_id
  LEFT JOIN LATERAL (
       SELECT count(*) FILTER (WHERE o.good = 0) AS n
         FROM (SELECT sum((x.status = 'completed')::integer) OVER (ORDER BY x.fire_at DESC) AS good
                 FROM (SELECT e.fire_at, coalesce(ej.status::text, er.status) AS status
                         FROM schedule_fires e
                         LEFT JOIN ingest_jobs ej ON ej.id = e.job_id
                         LEFT JOIN workflow_runs er ON er.id = e.run_id
                        WHERE e.name = s.name
                        ORDER BY e.fire_at DESC LIMIT 100) x
                WHERE x.status IN ('completed', 'failed')) o) f ON true
 WHERE %(name)s::text IS NULL OR s.name = %(name)s
 ORDER BY s.name;
