-- Append events to the history of jobs.

-- name: add_ingest none
-- Append an event to the history of an ingest job.
INSERT INTO ingest_job_events (job_id, attempt, event_type, claim_no, worker_id, host_label, queue,
                               elapsed_s, error, detail)
VALUES (%(job)s, least(greatest(%(attempt)s::bigint, 0), 2147483647), %(event_type)s, %(claim_no)s,
        %(worker)s, %(host)s, %(queue)s, %(elapsed_s)s, %(error)s, %(detail)s::jsonb)
RETURNING id;

-- name: add_node one
-- Append an event to the history of a node. Its attempt is a smallint, that of a job an
-- integer. No row: there is no such run.
INSERT INTO workflow_node_events (run_id, node_id, model, job_id, attempt, event_type, claim_no,
                                  worker_id, host_label, queue, elapsed_s, error, detail)
SELECT r.id, %(node)s, %(model)s, %(job)s, least(greatest(%(attempt)s::bigint, 0), 32767),
       %(event_type)s::queue_workflows_node_event, %(claim_no)s::bigint, %(worker)s, %(host)s,
       %(queue)s, %(elapsed_s)s::float8, %(error)s, %(detail)s::jsonb
  FROM workflow_runs r WHERE r.id = %(run)s
RETURNING id;

-- name: note_logged_error none
-- Append the error that the handler of an ingest job logged, unless the claim is lost.
INSERT INTO ingest_job_events (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, error)
SELECT j.id, j.attempts, 'error', j.claim_no, j.worker_id, j.claimed_by, j.queue, %(error)s
  FROM ingest_jobs j
 WHERE j.id = %(job)s AND j.worker_id = %(worker)s AND j.claim_no = %(claim_no)s
   AND j.status = 'running';
