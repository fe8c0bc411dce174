-- Claim jobs, renew leases, record completed jobs, and check claims.

-- name: node_rows many
-- Record a completed node, if `job` is given, and claim the next node job, if `claim` is true.
-- Return the columns that a worker reads, and the row as JSON for the handler (`body`). If no job
-- was claimed and a delayed job is due in `due_s` seconds, at most `look_ahead_s`, the row has no
-- id. `only`: claim this job, wherever it stands in the queue, or none. Raises QW001 if the claim
-- to record is lost.
{claimed_rows()}
  FROM (SELECT queue_workflows_node_step(
           %(worker)s::text, %(host)s::text, %(queue)s::text, %(lease_s)s::float8,
           %(claim)s::boolean AND NOT {is_queue_paused()},
           %(obey)s::boolean, %(promote)s::boolean, %(newest)s::boolean, %(model)s::text,
           %(models)s::text[], %(lane)s::smallint, %(job)s::text, %(claim_no)s::bigint,
           %(result)s::jsonb, %(seconds)s::float8, %(rss_mb)s::integer, %(received)s::jsonb,
           %(generation)s::integer, %(rows)s::jsonb, %(complete)s::boolean, %(policy)s::text,
           %(grace_s)s::float8, %(bound_s)s::float8, %(versions)s::text[],
           %(revision)s::integer, %(look_ahead_s)s::float8, %(only)s::text, %(detail)s::jsonb) AS job OFFSET 0) s
 {claimed_record()}
 WHERE s.job IS NOT NULL;

-- name: nodes_rows many
-- Record the completed nodes of the JSON array `done`, if any, and claim up to `claim` more. Return
-- what `node_rows` returns; if fewer are claimed, the last row may be one without an id. Raises
-- QW001 if one of the claims to record is lost.
{claimed_rows()}
  FROM queue_workflows_nodes_step(
           %(worker)s::text, %(host)s::text, %(queue)s::text, %(lease_s)s::float8,
           CASE WHEN {is_queue_paused()} THEN 0 ELSE %(claim)s::integer END,
           %(obey)s::boolean, %(promote)s::boolean, %(newest)s::boolean, %(done)s::jsonb,
           %(versions)s::text[], %(look_ahead_s)s::float8) AS s (job)
 {claimed_record()};

-- name: ingest_rows many
-- Record the completed ingest jobs of the JSON array `done`, if any, and claim up to `claim` more.
-- Return what `node_rows` returns; if fewer are claimed, the last row may be one without an id: a
-- limit admits the next job in `wait_s` seconds, and a delayed job is due in `due_s`, at most
-- `look_ahead_s`. `only`: as for `node_rows`. Raises QW001 if one of the claims to record is lost.
SELECT s.id, s.claim_no, s.crash_count, s.timeout_s, s.task_name, NULL AS run_id, NULL AS node_id,
       NULL AS required_model, NULL AS run, row_to_json(s) AS body, s.wait_s, s.due_s,
       (SELECT j.lapse_count FROM ingest_jobs j WHERE j.id = s.id) AS lapse_count
  FROM queue_workflows_ingest_step(
           %(worker)s::text, %(host)s::text, %(queue)s::text, %(lease_s)s::float8,
           %(claim)s::integer, %(obey)s::boolean, %(promote)s::boolean, %(done)s::jsonb,
           %(look_ahead_s)s::float8, %(only)s::text) s
 ORDER BY s.id IS NULL, s.priority, s.seq;

-- name: renew many
-- tables: ingest_jobs workflow_node_jobs
-- Extend the leases of claims, one element of each array a claim, and store their progress
-- (unchanged if NULL). A claim without a row is lost. `renewed` is false for a row that somebody
-- else has locked: its lease stays as it is. `cancel`: the job was cancelled, or its run is over.
WITH held AS MATERIALIZED (
    SELECT h.*
      FROM unnest(%(jobs)s::text[], %(claims)s::bigint[], %(progress)s::text[]::jsonb[])
           AS h (id, claim_no, progress)),
mine AS MATERIALIZED (
    SELECT j.id, j.claim_no, held.progress, queue_workflows_must_end(j) AS cancel
      FROM held JOIN ingest_jobs j ON j.id = held.id AND j.claim_no = held.claim_no
     WHERE j.worker_id = %(worker)s AND j.status = 'running'),
free AS MATERIALIZED (
    SELECT j.id FROM ingest_jobs j
     WHERE j.id = ANY (ARRAY(SELECT m.id FROM mine m)) ORDER BY j.id FOR UPDATE SKIP LOCKED),
renewed AS (
    UPDATE ingest_jobs j
       SET lease_expires_at = now() + %(lease_s)s::float8 * interval '1 second',
           heartbeat_at = now(), progress = coalesce(mine.progress, j.progress)
      FROM free JOIN mine USING (id)
     WHERE j.id = free.id AND j.claim_no = mine.claim_no AND j.worker_id = %(worker)s
       AND j.status = 'running'
 RETURNING j.id)
SELECT mine.id, mine.claim_no, mine.cancel, renewed.id IS NOT NULL AS renewed
  FROM mine LEFT JOIN renewed USING (id);

-- name: is_held one
-- tables: ingest_jobs workflow_node_jobs
-- Return one row without columns if this claim still holds its job.
SELECT FROM ingest_jobs j
 WHERE {held(j)};

-- name: has_recorded one
-- tables: ingest_jobs workflow_node_jobs
-- Return one row if the history has such an event of this claim, so its write was committed. The
-- events of a node are found by run and node, which are indexed.
SELECT 1 AS recorded
  FROM ingest_job_events e
 WHERE e.job_id = %(job)s AND e.claim_no = %(claim)s AND e.worker_id = %(worker)s
   AND (e.run_id, e.node_id) = (SELECT j.run_id, j.node_id FROM workflow_node_jobs j WHERE j.id = %(job)s)  -- nodes only
   AND e.event_type = ANY (%(events)s::text[])
 LIMIT 1;

-- name: held_by many
-- tables: ingest_jobs workflow_node_jobs
-- Return the claims of workers whose id starts with `prefix`, in the order in which the jobs
-- were queued, with the crashes and lapses of the jobs.
SELECT id, worker_id, claim_no, crash_count, lapse_count
  FROM ingest_jobs
 WHERE status = 'running' AND starts_with(worker_id, %(prefix)s::text)
 ORDER BY seq;
