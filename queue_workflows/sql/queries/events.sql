-- Send, list, await and delete the events of apps.

-- name: send one
-- Insert an event. Returns no row if there is one of this name and key already, which stays.
INSERT INTO events (name, key, value) VALUES (%(name)s, %(key)s, %(value)s::jsonb)
    ON CONFLICT (name, key) DO NOTHING
RETURNING created_at;

-- name: newest many
-- Return the newest events, of every name if `name` is NULL.
SELECT name, key, value::text AS value, created_at
  FROM events
 WHERE %(name)s::text IS NULL OR name = %(name)s::text
 ORDER BY created_at DESC, name, key LIMIT %(limit)s;

-- name: prune count
-- Delete up to `batch` events that are older than `days` days.
DELETE FROM events WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM events WHERE created_at < now() - %(days)s * interval '1 day'
     LIMIT %(batch)s FOR UPDATE SKIP LOCKED));

-- name: wake_waiting value
-- Wake up to `most` jobs of each family whose event is there although they wait for it; return how
-- many. Only events of this name and key count, or all if `name` is NULL.
SELECT queue_workflows_wake_waiting(%(name)s, %(key)s, %(most)s) AS n;

-- name: wait row
-- tables: ingest_jobs workflow_node_jobs
-- Begin or continue a wait of a claimed job: for an event of this name and key, or, for the kind
-- `sleep`, for the time alone. One row: `state` is `done`, with the value of the event or `default`
-- as `output`; `waiting`; `busy` if another transaction is about to end the wait; NULL if the claim
-- is lost. The time of the first call counts. A wait that is over is only read.
WITH arrived AS MATERIALIZED (
    SELECT e.value FROM events e
     WHERE %(kind)s = 'event' AND e.name = %(name)s AND e.key = %(key)s),
found AS MATERIALIZED (
    SELECT s.state, s.output::text AS output
      FROM job_steps s
     WHERE {this_step(s)}),
free AS MATERIALIZED (
    SELECT s.id
      FROM job_steps s
     WHERE {this_step(s)}
       FOR UPDATE SKIP LOCKED),
held AS MATERIALIZED (SELECT j.id FROM ingest_jobs j WHERE {held(j)} FOR SHARE),
begun AS (
    INSERT INTO job_steps AS s
           (job_table, job_id, kind, name, key, state, output, claim_no, attempts, due_at, ended_at)
    SELECT 'ingest_jobs', held.id, %(kind)s, %(name)s, %(key)s,
           CASE WHEN is_over THEN 'done' ELSE 'waiting' END,
           CASE WHEN is_over THEN coalesce((SELECT value FROM arrived), %(default)s::jsonb) END,
           %(claim)s, 1, due_at, CASE WHEN is_over THEN now() END
      FROM held
     CROSS JOIN (SELECT now() + %(after_s)s::float8 * interval '1 second' AS due_at) AS wanted
     CROSS JOIN LATERAL (SELECT EXISTS (SELECT FROM arrived)
                                OR coalesce(due_at <= now(), false) AS is_over) AS decided
     WHERE NOT EXISTS (SELECT FROM found WHERE state = 'done')
       AND (NOT EXISTS (SELECT FROM found) OR EXISTS (SELECT FROM free))
        ON CONFLICT (job_id, job_table, kind, name, key) DO UPDATE
       SET (state, output, ended_at) = (
               SELECT CASE WHEN is_over THEN 'done' ELSE 'waiting' END,
                      CASE WHEN is_over
                           THEN coalesce((SELECT value FROM arrived), %(default)s::jsonb) END,
                      CASE WHEN is_over THEN now() END
                 FROM (SELECT EXISTS (SELECT FROM arrived)
                              OR coalesce(s.due_at <= now(), false) AS is_over) AS decided),
           claim_no = excluded.claim_no, attempts = least(s.attempts, 999999) + 1
     WHERE s.state <> 'done'
 RETURNING s.state, s.output::text AS output)
SELECT CASE WHEN found.state = 'done' THEN 'done'
            WHEN begun.state IS NOT NULL THEN begun.state
            WHEN EXISTS (SELECT FROM held) THEN 'busy' END AS state,
       CASE WHEN found.state = 'done' THEN found.output ELSE begun.output END AS output
  FROM (VALUES (1)) one
  LEFT JOIN found ON true
  LEFT JOIN begun ON true;

-- name: suspend one
-- tables: ingest_jobs workflow_node_jobs
-- Give up the claim of a job whose handler waits, without counting an attempt. The job is delayed until
-- its first wait is due, at most `longest_s`, or for a second if a wait has ended meanwhile. Then only
-- workers of its host may claim it for `keep_s`, unless it has to wait for a lock key or a partition.
-- If the job must end, it is cancelled instead. Returns no row if the claim is lost.
WITH waits AS MATERIALIZED (
    SELECT s.id, CASE WHEN s.kind = 'event' AND EXISTS (SELECT FROM events e WHERE e.name = s.name AND e.key = s.key)
                      THEN now() ELSE s.due_at END AS due_at
      FROM job_steps s
     WHERE s.job_table = 'ingest_jobs' AND s.job_id = %(job)s AND s.claim_no = %(claim)s
       AND s.state = 'waiting'
       FOR UPDATE SKIP LOCKED),
ended AS MATERIALIZED (
    -- Another transaction has noted the event, or is about to. Then no other wait may delay the job.
    SELECT FROM job_steps s
     WHERE s.job_table = 'ingest_jobs' AND s.job_id = %(job)s AND s.claim_no = %(claim)s
       AND s.kind = 'event' AND s.state <> 'done' AND s.id <> ALL (ARRAY(SELECT w.id FROM waits w))),
done AS (
    UPDATE ingest_jobs j
       SET (status, finished_at, available_at, resume_host, resume_at, resume_until) = (
               SELECT CASE WHEN must_end THEN 'cancelled' ELSE 'queued' END,
                      CASE WHEN must_end THEN now() END,
                      CASE WHEN NOT must_end THEN coalesce(kept.until, due.at) END,
                      CASE WHEN kept.until IS NOT NULL THEN j.claimed_by END,
                      CASE WHEN kept.until IS NOT NULL THEN coalesce(due.at, now()) END,
                      kept.until
                 FROM queue_workflows_must_end(j) AS must_end
                CROSS JOIN (
                      SELECT nullif(greatest(least(coalesce(
                                 CASE WHEN NOT EXISTS (SELECT FROM ended) THEN min(coalesce(due_at, '9999-01-01')) END,
                                 now() + interval '1 second'),
                                 now() + %(longest_s)s::float8 * interval '1 second'), now()),
                                 now()) AS at
                        FROM waits) AS due
                CROSS JOIN LATERAL (
                      SELECT CASE WHEN NOT must_end AND j.claimed_by IS NOT NULL AND j.lock_key IS NULL
                                   AND %(keep_s)s::float8 > 0
                                   AND (j.partition_key IS NULL OR NOT EXISTS (
                                        SELECT FROM queue_partition_limits l WHERE l.queue = j.queue))
                                  THEN coalesce(due.at, now())
                                       + least(%(keep_s)s::float8, 86400) * interval '1 second'
                             END AS until) AS kept),
           worker_id = NULL, lease_expires_at = NULL
     WHERE {held(j)}
 {recorded(j, {unless_queued('requeued')}, worker => %(worker)s, detail => %(detail)s)};
