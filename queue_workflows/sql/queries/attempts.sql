-- End an attempt that has no result: fail it, end it by a watchdog, or park its node.

-- name: policy one
-- tables: ingest_jobs workflow_node_jobs
-- Return the retry policy of a job, its failed attempts and how many it may make.
SELECT policy, greatest(attempts, 0) AS attempts, max_attempts FROM ingest_jobs WHERE id = %(job)s;

-- name: fail one
-- tables: ingest_jobs workflow_node_jobs
-- Record a failed attempt: the job is queued again while attempts are left and `retry` is true,
-- else it has failed. It is cancelled instead if it must end. `after_s`: how long it waits first.
-- `most`: what `max_attempts` becomes if it is less. Counters that a plain UPDATE wrote are bounded
-- first. `received`: the inputs that a node has received; NULL stands for the inputs of its claim.
-- Returns no row if the claim is lost.
WITH done AS (
    UPDATE ingest_jobs j
       SET (attempts, max_attempts, status, finished_at, available_at) = (
               SELECT made, most,
                      CASE WHEN must_end THEN 'cancelled'
                           WHEN again THEN 'queued' ELSE 'failed' END,
                      CASE WHEN must_end OR NOT again THEN now() END,
                      CASE WHEN again AND NOT must_end AND %(after_s)s::float8 > 0
                           THEN now() + %(after_s)s::float8 * interval '1 second' END
                 FROM queue_workflows_must_end(j) AS must_end
                CROSS JOIN (
                      SELECT least(greatest(j.attempts, 0), 999999) + 1 AS made,
                             least(greatest(j.max_attempts, %(most)s::integer), 1000000) AS most
                      ) AS counted
                CROSS JOIN LATERAL (SELECT made < most AND %(retry)s::boolean AS again) AS decided),
           error = %(error)s, seconds = %(seconds)s::float8,
           resolved_inputs = coalesce(%(received)s::jsonb, j.resolved_inputs),  -- nodes only
           worker_id = NULL, lease_expires_at = NULL
     WHERE {held(j)}
 {recorded(j, {unless_queued('retried')}, worker => %(worker)s, seconds => %(seconds)s, error => %(error)s, detail => %(detail)s)};

-- name: end_by_watchdog one
-- tables: ingest_jobs workflow_node_jobs
-- Record that a watchdog ended an attempt. The job is queued again, with at least the priority
-- `band`. If watchdogs have ended more than `cap` attempts, it has failed instead; if it must end,
-- it is cancelled. Returns no row if the claim is lost.
WITH done AS (
    UPDATE ingest_jobs j
       SET (watchdog_retries, status, finished_at, priority) = (
               SELECT ended,
                      CASE WHEN must_end THEN 'cancelled'
                           WHEN ended <= %(cap)s::integer THEN 'queued' ELSE 'failed' END,
                      CASE WHEN must_end OR ended > %(cap)s::integer THEN now() END,
                      CASE WHEN ended <= %(cap)s::integer
                           THEN least(j.priority, %(band)s::smallint) ELSE j.priority END
                 FROM queue_workflows_must_end(j) AS must_end
                CROSS JOIN (
                      SELECT least(greatest(j.watchdog_retries, 0), 999999) + 1 AS ended
                      ) AS counted),
           error = %(error)s, seconds = %(seconds)s::float8,
           worker_id = NULL, lease_expires_at = NULL
     WHERE {held(j)}
 {recorded(j, {unless_queued('requeued')}, worker => %(worker)s, seconds => %(seconds)s, error => %(error)s, detail => %(detail)s)};

-- name: park one
-- Let an input node wait for its answer, or cancel it if it must end. Returns no row if the claim
-- is lost.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET (status, finished_at) = (
               SELECT CASE WHEN must_end THEN 'cancelled' ELSE 'awaiting_input' END,
                      CASE WHEN must_end THEN now() END
                 FROM queue_workflows_must_end(j) AS must_end),
           worker_id = NULL, lease_expires_at = NULL
     WHERE {held(j)}
 RETURNING queue_workflows_record(j, CASE j.status WHEN 'awaiting_input' THEN 'parked' ELSE j.status END,
                                  worker => %(worker)s) AS job)
SELECT (job).* FROM done;
