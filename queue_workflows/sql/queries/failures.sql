-- List failures of jobs and schedules, and mark groups of them as seen.

-- name: newest many unprepared
-- Return the newest failed jobs that fit the filters, the newest first, of `most` that are examined, and the last of these;
-- `place` counts the examined ones. A time is given as such, or as a span up to now. Always a row, with a NULL `place`
-- if no job has failed.
SELECT now() AS now, f.*
  FROM (SELECT) AS one
  LEFT JOIN queue_workflows_newest_failures(
       coalesce(%(since)s::timestamptz, now() - %(since_ago)s::interval),
       coalesce(%(until)s::timestamptz, now() - %(until_ago)s::interval),
       %(queue)s, %(workflow)s, %(machine)s, %(text)s, %(most)s, %(cut)s) f ON true
 ORDER BY f.place LIMIT %(most)s;

-- name: of_schedules many
-- Return the schedules that cannot fire or have missed their last instant, as failures. One that cannot fire is dated by
-- its next instant if that has passed, else by its last change. The first 1,000 schedules are read, in the order of their
-- next instants.
SELECT 'schedule' AS kind, s.name AS id, s.at, s.error, s.name, s.queue, NULL AS host_label, NULL AS run_id,
       NULL AS node_id
  FROM (SELECT name, queue, coalesce(workflow_name, task_name) AS target,
               CASE WHEN error IS NULL THEN missed_at
                    WHEN next_at <= now() THEN next_at
                    ELSE least(changed_at, now()) END AS at,
               CASE WHEN error IS NOT NULL THEN error
                    WHEN missed_at > coalesce(last_fire_at, '-infinity')
                    THEN 'nothing fired for its instant ' || to_char(missed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
               END AS error
          FROM schedules
         WHERE NOT paused AND NOT ended AND gone_at IS NULL
         ORDER BY wake_at NULLS FIRST, name LIMIT 1000) s
 WHERE s.error IS NOT NULL AND %(machine)s::text IS NULL
   AND (%(queue)s::text IS NULL OR s.queue = %(queue)s)
   AND (%(workflow)s::text IS NULL OR s.target = %(workflow)s)
   AND (%(text)s::text IS NULL OR strpos(lower(s.error), lower(%(text)s)) > 0)
 LIMIT 1000;

-- name: traceback value
-- Return the traceback of a job's last failure. Returns no row if none is recorded. `run` and `node`: NULL of an ingest job.
(SELECT e.detail ->> 'traceback' AS traceback
   FROM workflow_node_events e
  WHERE e.run_id = %(run)s AND e.node_id = %(node)s AND e.job_id = %(job)s AND e.event_type = 'failed'
  ORDER BY e.created_at DESC, e.id DESC LIMIT 1)
UNION ALL
(SELECT e.detail ->> 'traceback'
   FROM ingest_job_events e
  WHERE e.job_id = %(job)s AND e.event_type = 'failed' AND %(run)s::text IS NULL
  ORDER BY e.id DESC LIMIT 1)
 LIMIT 1;

-- name: seen many
-- Return the marks of these signatures.
SELECT signature, until, seen_at, seen_by FROM failures_seen
 WHERE signature = ANY (%(signatures)s::text[])
 LIMIT 10000;

-- name: mark_seen none
-- Mark a signature as seen until a time, by this actor, or by the transaction's actor if NULL. Delete marks over a year old.
WITH old AS (
    DELETE FROM failures_seen
     WHERE seen_at < now() - interval '366 days' AND signature <> %(signature)s)
INSERT INTO failures_seen AS f (signature, until, seen_by)
VALUES (%(signature)s, %(until)s, coalesce(%(by)s, queue_workflows_actor()))
    ON CONFLICT (signature) DO UPDATE
   SET until = greatest(f.until, excluded.until), seen_at = now(), seen_by = excluded.seen_by;

-- name: unmark_seen count
-- Delete the mark of a signature.
DELETE FROM failures_seen WHERE signature = %(signature)s;
