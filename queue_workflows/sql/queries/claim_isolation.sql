-- Find the jobs of a queue after one of them has made the claim fail, and move jobs aside that the database refuses.

-- name: delayed column
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return up to 100 jobs that have become due, and as many that are kept for this host and may be claimed by it.
SELECT l.id FROM ingest_jobs l
 WHERE l.id = ANY (ARRAY(SELECT j.id FROM ingest_jobs j
                          WHERE j.queue = %(queue)s::text AND j.status = 'queued' AND j.blocked_reason = 'not_due'
                            AND j.available_at <= now()
                          ORDER BY j.available_at LIMIT 100)
                   || ARRAY(SELECT k.id FROM ingest_jobs k WHERE {kept_for(k, %(host)s::text, %(queue)s::text)} AND k.resume_at <= now()
                             ORDER BY k.resume_host, k.queue, k.resume_at LIMIT 100))
   AND (l.status = 'queued' AND l.blocked_reason = 'not_due') IS TRUE FOR UPDATE SKIP LOCKED;

-- name: claimable column
-- tables: ingest_jobs workflow_node_jobs
-- Return the first 100 jobs that a worker may claim, in the order of the claim. None if the queue is paused, or OFF for its
-- host.
SELECT q.id
  FROM (SELECT
               j.run_id, j.required_model,  -- nodes only
               j.id
          FROM ingest_jobs j
         WHERE j.queue = %(queue)s::text AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND (j.required_version IS NULL OR j.required_version = ANY (%(versions)s::text[]))  -- nodes only
         ORDER BY j.priority, j.seq LIMIT 1000) q
 WHERE NOT {is_queue_paused()} AND NOT (%(obey)s::boolean AND {is_off(%(host)s::text, %(queue)s::text)})
   AND {live(q)} AND (%(queue)s::text <> 'gpu' OR queue_workflows_gpu_misfit(  -- nodes only
       %(host)s::text, %(models)s::text[], (SELECT w.vram_total_mb FROM workers w WHERE w.worker_id = %(worker)s),  -- nodes only
       q.required_model) IS NULL)  -- nodes only
 LIMIT 100;

-- name: fail value
-- tables: ingest_jobs workflow_node_jobs
-- Fail a job, queued (`worker` NULL) or under this claim; a trigger records the end of a queued ingest job. Returns no
-- row if it is neither.
WITH done AS (
    UPDATE ingest_jobs j
       SET status = 'failed', error = %(error)s, finished_at = now(), blocked_reason = NULL, worker_id = NULL,
           lease_expires_at = NULL
     WHERE {is_aside(j)}
 RETURNING
 CASE WHEN %(worker)s::text IS NULL THEN j ELSE  -- ingest only
 queue_workflows_record(j, 'failed', worker => %(worker)s::text, detail => '{"by": "database"}')
 END  -- ingest only
 AS job)
SELECT (job).id FROM done;

-- name: block value
-- tables: ingest_jobs workflow_node_jobs
-- Block a job as `set_aside`, so that no claim finds it. Returns no row in the same cases as `fail`.
UPDATE ingest_jobs j
   SET status = 'queued', blocked_reason = 'set_aside', available_at = NULL, worker_id = NULL, lease_expires_at = NULL
 WHERE {is_aside(j)} RETURNING j.id;

-- name: postpone value
-- tables: ingest_jobs workflow_node_jobs
-- Let a queued job wait for a minute. Returns no row if it is not queued any more.
UPDATE ingest_jobs j SET blocked_reason = 'not_due', available_at = now() + interval '1 minute'
 WHERE j.id = %(job)s AND j.status = 'queued' RETURNING j.id;
