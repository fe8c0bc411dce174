-- Return claimed jobs to the queue without counting an attempt or a crash.

-- name: hand_back
-- tables: ingest_jobs workflow_node_jobs
-- Give up claims, of several workers too, counting nothing: each job is queued again, or
-- cancelled if it must end. One element of each array is a claim. `after_s`: how long the jobs
-- wait first. `front`: they get at least the priority `band`. A claim without a row is lost.
WITH done AS (
    UPDATE ingest_jobs j
       SET (status, finished_at, available_at) = (
               SELECT CASE WHEN must_end THEN 'cancelled' ELSE 'queued' END,
                      CASE WHEN must_end THEN now() END,
                      CASE WHEN NOT must_end AND %(after_s)s::float8 > 0
                           THEN now() + %(after_s)s::float8 * interval '1 second' END
                 FROM queue_workflows_must_end(j) AS must_end),
           priority = CASE WHEN %(front)s::boolean THEN least(j.priority, %(band)s::smallint)
                           ELSE j.priority END,
           worker_id = NULL, lease_expires_at = NULL
      FROM unnest(%(jobs)s::text[], %(claims)s::bigint[], %(workers)s::text[])
           AS held (id, claim_no, worker)
     WHERE j.id = held.id AND j.claim_no = held.claim_no AND j.worker_id = held.worker
       AND j.status = 'running'
 RETURNING queue_workflows_record(
               j, CASE j.status WHEN 'queued' THEN 'requeued' ELSE j.status END,
               host => (SELECT o.claimed_by FROM ingest_jobs o WHERE o.id = j.id),
               worker => held.worker, detail => %(detail)s) AS job)
SELECT (job).* FROM done;

-- name: strays
-- tables: ingest_jobs workflow_node_jobs
-- Return the claims of a worker without those of the jobs `keep`.
SELECT id, worker_id, claim_no
  FROM ingest_jobs
 WHERE status = 'running' AND worker_id = %(worker)s AND id <> ALL (%(keep)s::text[]);
