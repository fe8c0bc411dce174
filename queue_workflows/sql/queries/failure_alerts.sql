-- Claim the failures that are to be sent as alerts, and record what was sent.

-- name: announce none
-- Note that a sender is there: failures are noted for `keep_s` more seconds.
INSERT INTO failure_alert_state (wanted_until) VALUES (now() + make_interval(secs => %(keep_s)s))
ON CONFLICT (only_row) DO UPDATE SET seen_at = now(), wanted_until = EXCLUDED.wanted_until;

-- name: pending value
-- Return whether there is any row. It locks nothing.
SELECT EXISTS (SELECT FROM failure_alerts) AS any;

-- name: lock one
-- Lock the state of all senders. Returns no row if another sender has it, or none was announced.
SELECT FROM failure_alert_state FOR UPDATE SKIP LOCKED;

-- name: free value
-- Return how many calls the state still allows within a minute: `per_minute` minus the calls of the last minute, or 0
-- for a minute after the limit was reached. A time in the future, after the clock was set back, does not count. It is
-- a separate statement after the lock, and reads the clock, so that it sees the writes of the last holder of the lock.
SELECT CASE WHEN s.quiet_until > c.now AND s.quiet_until <= c.now + interval '1 minute' THEN 0
            ELSE greatest(0, %(per_minute)s - (
                SELECT count(DISTINCT taken_by) FROM failure_alerts
                 WHERE taken_at > c.now - interval '1 minute' AND taken_at <= c.now)) END AS free
  FROM failure_alert_state s, (SELECT clock_timestamp() AS now) c;

-- name: expire many
-- Delete what was sent over a minute ago. Of the rows that no sender has at present, delete the ones over
-- `max_age_s` old and the ones that were taken `tries` times. Return `is_sent` of each.
DELETE FROM failure_alerts
 WHERE sent_at < now() - interval '1 minute'
    OR sent_at IS NULL AND (taken_until IS NULL OR taken_until < now())
       AND (claims >= %(tries)s OR failed_at < now() - make_interval(secs => %(max_age_s)s))
RETURNING kind, subject, sent_at IS NOT NULL AS is_sent, claims;

-- name: waiting value
-- Count the rows that a sender of `app` may take, up to two. If another app has a function for a row, it is left to
-- that app's senders for `patience_s`.
SELECT count(*) AS n
  FROM (SELECT FROM failure_alerts
         WHERE {may_take()} LIMIT 2) w;

-- name: take one
-- Take the oldest row for `lease_s` seconds. MATERIALIZED: a subquery that the plan runs once for each row would find
-- the next oldest each time, and take them all.
WITH oldest AS MATERIALIZED (
    SELECT id FROM failure_alerts
     WHERE {may_take()}
     ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
UPDATE failure_alerts a
   SET claims = a.claims + 1, taken_by = %(token)s, taken_at = clock_timestamp(),
       taken_until = now() + make_interval(secs => %(lease_s)s)
  FROM oldest
 WHERE a.id = oldest.id
RETURNING a.kind, a.subject, a.name, a.queue, a.schedule, a.reason, a.error, a.failed_at;

-- name: take_all many
-- Take all rows for `lease_s` seconds; return for each kind how many there are, up to five of their names, and the
-- time of the last.
WITH taken AS (
    UPDATE failure_alerts a
       SET claims = a.claims + 1, taken_by = %(token)s, taken_at = clock_timestamp(),
           taken_until = now() + make_interval(secs => %(lease_s)s)
      FROM (SELECT id FROM failure_alerts
             WHERE {may_take()}
               FOR UPDATE SKIP LOCKED) waiting
     WHERE a.id = waiting.id
    RETURNING a.kind, coalesce(a.name, a.subject) AS name, a.failed_at)
SELECT kind, count(*) AS n, (array_agg(DISTINCT name))[1:5] AS names, max(failed_at) AS failed_at
  FROM taken
 GROUP BY kind
 ORDER BY kind;

-- name: quiet none
-- Note that the limit is reached: nothing is sent for a minute.
UPDATE failure_alert_state SET quiet_until = clock_timestamp() + interval '1 minute';

-- name: sent none
-- Mark what a sender took as sent: one row stays for a minute, to count against the limit. It
-- changes no row that another sender has now.
WITH gone AS (
    DELETE FROM failure_alerts
     WHERE taken_by = %(token)s
       AND id > (SELECT min(id) FROM failure_alerts WHERE taken_by = %(token)s))
UPDATE failure_alerts SET sent_at = now()
 WHERE id = (SELECT min(id) FROM failure_alerts WHERE taken_by = %(token)s);

-- name: prune count
-- Delete failures that will not be sent: no sender was there within its time, or they are over a week old.
DELETE FROM failure_alerts
 WHERE failed_at < now() - interval '8 days'
    OR failed_at < now() - interval '1 day'
       AND NOT EXISTS (SELECT FROM failure_alert_state WHERE wanted_until > now());
