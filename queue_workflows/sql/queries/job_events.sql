-- Append events to the history of jobs.

-- name: add one
-- tables: ingest_jobs workflow_node_jobs
-- Append an event to the history of a job, of a node in which an attempt is a smallint. Returns no
-- row if the run of the node is gone.
INSERT INTO ingest_job_events
       (
        run_id, node_id, model,  -- nodes only
        job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, error, detail)
SELECT
       r.id, %(node)s, %(model)s,  -- nodes only
       %(job)s, least(greatest(%(attempt)s::bigint, 0),
       2147483647),  -- ingest only
       32767),  -- nodes only
       %(event_type)s::text, %(claim_no)s::bigint, %(worker)s, %(host)s, %(queue)s,
       %(elapsed_s)s::float8, %(error)s, %(detail)s::jsonb
  FROM workflow_runs r WHERE r.id = %(run)s  -- nodes only
RETURNING id;

-- name: note_logged_error none
-- Append the error that the handler of an ingest job logged, unless the claim is lost.
INSERT INTO ingest_job_events (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, error)
SELECT j.id, j.attempts, 'error', j.claim_no, j.worker_id, j.claimed_by, j.queue, %(error)s
  FROM ingest_jobs j
 WHERE j.id = %(job)s AND j.worker_id = %(worker)s AND j.claim_no = %(claim_no)s
   AND j.status = 'running';
