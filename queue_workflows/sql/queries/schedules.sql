-- Read the clock and when schedule entries have fired last.

-- name: now value
-- Return the database's clock: the start of the current transaction.
SELECT now() AS now;

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
