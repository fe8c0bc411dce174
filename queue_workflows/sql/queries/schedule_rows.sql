-- Plan and fire the rows of schedules.

-- name: due many unprepared
-- Lock up to `limit` schedules that are not planned yet, and up to `limit` that are due; skip
-- locked rows. Reads schedules of the table and of this app: only `names`, if given, and not
-- `aside`. A schedule whose task this process does not know is left to others for `patience_s`.
-- Each half is one range of the index.
WITH unplanned AS MATERIALIZED (
    SELECT * {firing()} AND wake_at IS NULL
     ORDER BY wake_at NULLS FIRST, name
     LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED),
due AS MATERIALIZED (
    SELECT * {firing()} AND wake_at <= %(now)s
       AND (workflow_name IS NOT NULL OR task_name = ANY (%(tasks)s::text[])
            OR wake_at <= %(now)s::timestamptz - make_interval(secs => %(patience_s)s))
     ORDER BY wake_at NULLS FIRST, name
     LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED)
SELECT * FROM unplanned UNION ALL SELECT * FROM due;

-- name: wake row
-- Return whether there are schedules, and when the next that `due` returns is due, or NULL if none is planned.
SELECT EXISTS (SELECT FROM schedules) AS any,
       queue_workflows_next_wake(%(app)s, %(names)s, %(aside)s, %(tasks)s, %(patience_s)s) AS wake_at;

-- name: plan none unprepared
-- Store the next instant of a schedule, and the missed one.
UPDATE schedules
   SET next_at = %(next_at)s::timestamptz, wake_at = %(wake_at)s, ended = %(next_at)s::timestamptz IS NULL,
       error = NULL, missed_at = coalesce(%(missed_at)s, missed_at)
 WHERE name = %(name)s;

-- name: notify none
-- Wake the schedulers.
SELECT pg_notify('schedules_changed', '');

-- name: plan_again none
-- Drop instants that a clock which was ahead has planned or found missed. With `all`, of every schedule that is
-- planned after `now`; else only of schedules that fired, skipped, changed or missed an instant after it. In both
-- cases, only if they wait longer than a jitter, or than `poll_s` for the end of a job.
UPDATE schedules
   SET next_at = NULL, wake_at = NULL, ended = false,
       missed_at = CASE WHEN missed_at <= %(now)s THEN missed_at END
 WHERE gone_at IS NULL
   AND (wake_at > greatest(next_at + make_interval(secs => jitter_s),
                           %(now)s::timestamptz + make_interval(secs => %(poll_s)s))
        OR (ended OR next_at > %(now)s)
           AND (%(all)s::boolean OR greatest(changed_at, missed_at) > %(now)s
                OR EXISTS (SELECT FROM schedule_fires f WHERE f.name = schedules.name AND f.fire_at > %(now)s)));

-- name: fired none unprepared
-- Store the new state of a schedule after a fire.
UPDATE schedules
   SET last_fire_at = %(fire_at)s, last_job_id = %(job_id)s, last_run_id = %(run_id)s
 WHERE name = %(name)s;

-- name: fail none
-- Store why a schedule cannot fire.
UPDATE schedules SET error = left(%(error)s, 2000) WHERE name = %(name)s;

-- name: claim one prepared
-- Claim one instant of a schedule. Returns no row if it was claimed before.
INSERT INTO schedule_fires (name, fire_at) VALUES (%(name)s, %(fire_at)s)
ON CONFLICT (name, fire_at) DO NOTHING
RETURNING name;

-- name: last_claimed value
-- Return the latest instant up to `now` that was claimed, fired or skipped, or NULL.
SELECT max(fire_at) AS at FROM schedule_fires WHERE name = %(name)s AND fire_at <= %(now)s;

-- name: fired_since one
-- Return a row if one of the names was claimed for an instant after `since` up to `now`.
SELECT FROM schedule_fires
 WHERE name = ANY (%(names)s::text[]) AND fire_at > %(since)s AND fire_at <= %(now)s
 LIMIT 1;

-- name: record none
-- Record the outcome of a claimed instant.
UPDATE schedule_fires SET job_id = %(job_id)s, run_id = %(run_id)s, skipped = %(skipped)s
 WHERE name = %(name)s AND fire_at = %(fire_at)s;

-- name: last_status value
-- Return the status of the job or run of the last fire, or NULL if it was deleted.
SELECT coalesce((SELECT status::text FROM ingest_jobs WHERE id = %(job_id)s),
                (SELECT status FROM workflow_runs WHERE id = %(run_id)s)) AS status;
