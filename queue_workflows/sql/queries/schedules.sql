-- Record that a schedule entry has fired, and read when it last did.

-- name: now value
-- Return the database's clock: the start of the current transaction.
SELECT now() AS now;

-- name: fire value
-- Claim one instant of a schedule entry and queue its job. It waits for a transaction that is
-- claiming the same instant, so fire several in one order. No row: the instant was claimed before.
-- One statement, so that neither exists without the other.
WITH fired AS (
    INSERT INTO schedule_fires (name, fire_at, job_id)
    VALUES (%(name)s, %(fire_at)s, gen_random_uuid()::text)
    ON CONFLICT (name, fire_at) DO NOTHING
    RETURNING job_id)
INSERT INTO ingest_jobs (id, task_name, queue, reason, priority, lock_key)
SELECT job_id, %(task_name)s, %(queue)s, %(reason)s,
       coalesce(%(priority)s::smallint, 100), %(lock_key)s
  FROM fired
RETURNING id;

-- name: last_fires many
-- Return the latest instant up to `until` that was fired under each of the names.
SELECT entry.name, last.fire_at
  FROM unnest(%(names)s::text[]) AS entry (name)
 CROSS JOIN LATERAL (
       SELECT fire_at FROM schedule_fires WHERE name = entry.name AND fire_at <= %(until)s
        ORDER BY fire_at DESC LIMIT 1) AS last;

-- name: prune count
-- Delete up to `batch` instants that were claimed more than `days` days ago.
DELETE FROM schedule_fires WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM schedule_fires WHERE created_at < now() - make_interval(days => %(days)s)
     LIMIT %(batch)s FOR UPDATE SKIP LOCKED));
