-- Record the steps of handlers under the claims of their jobs, read them, and forget them.

-- name: begin row
-- tables: ingest_jobs workflow_node_jobs
-- Begin a step of a claimed job, or find that it is done. Returns one row: the step as it was before
-- (`state` is NULL if it is new), `attempts` if it begins now, and whether the claim holds. A step
-- that is done is only read, which locks nothing. A cursor whose arguments differ does not begin.
WITH found AS MATERIALIZED (
    SELECT s.state, s.output::text AS output, s.arguments_hash, s.arguments, s.position
      FROM job_steps s
     WHERE {this_step(s)}),
held AS MATERIALIZED (SELECT j.id FROM ingest_jobs j WHERE {held(j)} FOR SHARE),
begun AS (
    INSERT INTO job_steps AS s
           (job_table, job_id, kind, name, key, arguments_hash, arguments, state, claim_no, attempts)
    SELECT 'ingest_jobs', held.id, %(kind)s, %(name)s, %(key)s, %(arguments_hash)s, %(arguments)s,
           'running', %(claim)s, 1
      FROM held
     WHERE NOT EXISTS (SELECT FROM found WHERE state = 'done')
        ON CONFLICT (job_id, job_table, kind, name, key) DO UPDATE
       SET state = 'running', claim_no = excluded.claim_no,
           attempts = least(s.attempts, 999999) + 1, arguments_hash = excluded.arguments_hash,
           arguments = excluded.arguments, started_at = now(), ended_at = NULL
     WHERE s.state <> 'done'
       AND (s.kind = 'step' OR s.arguments_hash = excluded.arguments_hash)
 RETURNING s.attempts)
SELECT found.*, begun.attempts,
       begun.attempts IS NOT NULL OR coalesce(found.state = 'done', false) AS held
  FROM (VALUES (1)) one
  LEFT JOIN found ON true
  LEFT JOIN begun ON true;

-- name: end one
-- tables: ingest_jobs workflow_node_jobs
-- Record how a step ended that this claim has begun, and return its output as it is stored. Returns
-- no row if the claim is lost, or another one has begun the step again.
WITH held AS MATERIALIZED (SELECT j.id FROM ingest_jobs j WHERE {held(j)} FOR SHARE)
UPDATE job_steps s
   SET state = %(state)s, output = %(output)s::jsonb, error = %(error)s, ended_at = now(),
       position = greatest(s.position, %(position)s::bigint)
  FROM held
 WHERE s.job_table = 'ingest_jobs' AND s.job_id = held.id AND s.kind = %(kind)s
   AND s.name = %(name)s AND s.key = %(key)s AND s.claim_no = %(claim)s
RETURNING s.output::text AS output;

-- name: store_cursors none
-- tables: ingest_jobs workflow_node_jobs
-- Store how far cursors are, one element of each array a cursor. Cursors of a lost claim are left out.
WITH noted AS MATERIALIZED (
    SELECT c.*
      FROM unnest(%(jobs)s::text[], %(claims)s::bigint[], %(workers)s::text[], %(names)s::text[],
                  %(keys)s::text[], %(positions)s::bigint[])
           AS c (job_id, claim_no, worker_id, name, key, position)
      JOIN ingest_jobs j ON j.id = c.job_id AND j.claim_no = c.claim_no
                        AND j.worker_id = c.worker_id AND j.status = 'running'
       FOR SHARE OF j)
UPDATE job_steps s
   SET position = noted.position
  FROM noted
 WHERE s.job_table = 'ingest_jobs' AND s.job_id = noted.job_id AND s.kind = 'cursor'
   AND s.name = noted.name AND s.key = noted.key AND s.claim_no = noted.claim_no
   AND s.state = 'running' AND s.position < noted.position;

-- name: of_job many
-- Return the steps of a job in the order in which they began first.
SELECT kind, name, key, state, output::text AS output, error, arguments, position, claim_no,
       attempts, crashes, due_at, started_at, ended_at
  FROM job_steps
 WHERE job_table = %(table)s AND job_id = %(job)s
 ORDER BY id;

-- name: forget_from row
-- Delete the first step of this name of a job and all steps that began after it first; return how
-- many.
WITH gone AS (
    DELETE FROM job_steps
     WHERE job_table = %(table)s AND job_id = %(job)s
       AND id >= (SELECT min(s.id) FROM job_steps s
                   WHERE s.job_table = %(table)s AND s.job_id = %(job)s AND s.name = %(name)s)
 RETURNING 1)
SELECT count(*) AS n FROM gone;
