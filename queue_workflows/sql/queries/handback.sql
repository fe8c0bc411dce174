-- Return claimed jobs to the queue without counting an attempt or a crash.

-- name: hand_back many
-- tables: ingest_jobs workflow_node_jobs
-- Give up claims, also of several workers, without counting an attempt. Each job is queued again, or
-- cancelled if it must end. One element of each array is a claim. `after_s`: how long the jobs wait
-- first. `front`: they get at least the priority `band`. `error`: the text that a queued job shows
-- until its next claim, or NULL. `keep_for`: the host whose workers may claim it meanwhile, or NULL.
-- A claim without a row is lost.
WITH done AS (
    UPDATE ingest_jobs j
       SET (status, finished_at, error, available_at) = (
               SELECT CASE WHEN must_end THEN 'cancelled' ELSE 'queued' END,
                      CASE WHEN must_end THEN now() END,
                      CASE WHEN must_end THEN j.error ELSE coalesce(%(error)s, j.error) END,
                      CASE WHEN NOT must_end AND %(after_s)s::float8 > 0
                           THEN now() + %(after_s)s::float8 * interval '1 second' END
                 FROM queue_workflows_must_end(j) AS must_end),
           resume_host = coalesce(%(keep_for)s::text, j.resume_host),
           resume_at = CASE WHEN %(keep_for)s::text IS NULL THEN j.resume_at ELSE now() END,
           resume_until = CASE WHEN %(keep_for)s::text IS NULL THEN j.resume_until
                               ELSE now() + %(after_s)s::float8 * interval '1 second' END,
           priority = CASE WHEN %(front)s::boolean THEN least(j.priority, %(band)s::smallint)
                           ELSE j.priority END,
           worker_id = NULL, lease_expires_at = NULL
      FROM unnest(%(jobs)s::text[], %(claims)s::bigint[], %(workers)s::text[])
           AS held (id, claim_no, worker)
     WHERE j.id = held.id AND j.claim_no = held.claim_no AND j.worker_id = held.worker
       AND j.status = 'running'
 {recorded(j, {unless_queued('requeued')}, worker => held.worker, detail => %(detail)s)};

-- name: strays many
-- tables: ingest_jobs workflow_node_jobs
-- Return the claims of a worker, except rows that another transaction has locked.
SELECT id, worker_id, claim_no
  FROM ingest_jobs
 WHERE status = 'running' AND worker_id = %(worker)s
   FOR UPDATE SKIP LOCKED;

-- name: unknown one
-- Return which workers did not know a node since it was last handed back for another reason or ended: how often (`times`),
-- `age_s` of the first time, the `workers`, and the `others`: up to 20 live workers that take such jobs, have not met it, and
-- report it or no list of their nodes. `known`: one of these reports it. `keep_for`: the host of one of these, of one that
-- reports it if there is one, without a host where a live worker has met it. The history of a node is indexed by run and node.
-- Returns no row if the job does not exist.
WITH job AS (
    SELECT j.* FROM workflow_node_jobs j WHERE j.id = %(job)s),
met AS MATERIALIZED (
    SELECT m.created_at, m.worker_id FROM job CROSS JOIN LATERAL ({met(job)}) m),
other AS MATERIALIZED (
    SELECT w.worker_id, w.host_label, w.detail -> 'claim' -> 'nodes' ? job.node_module AS lists
      FROM job JOIN workers w ON w.queue = job.queue
     WHERE {is_live(w, %(stale_s)s::float8)} AND {takes_jobs(w)}
       AND queue_workflows_off_policy(w.host_label, w.queue) IS NULL
       AND w.worker_id IS DISTINCT FROM job.worker_id
       AND NOT EXISTS (SELECT FROM met WHERE met.worker_id = w.worker_id)
       AND (job.required_version IS NULL
            OR w.detail -> 'claim' -> 'versions' ? job.required_version)
       AND (job.queue <> 'gpu' OR queue_workflows_gpu_misfit(
                w.host_label, w.known_models, w.vram_total_mb, job.required_model) IS NULL))
SELECT (SELECT count(*) FROM met) AS times,
       (SELECT {age_s(min(met.created_at))} FROM met) AS age_s,
       ARRAY(SELECT DISTINCT met.worker_id FROM met ORDER BY 1) AS workers,
       EXISTS (SELECT FROM other WHERE lists) AS known,
       ARRAY(SELECT worker_id FROM other WHERE lists IS NOT FALSE ORDER BY 1 LIMIT 20) AS others,
       (SELECT o.host_label FROM other o
         WHERE o.lists IS NOT FALSE AND o.host_label <> ALL (ARRAY(
               SELECT w.host_label FROM workers w
                WHERE w.queue = job.queue
                  AND (w.worker_id = job.worker_id OR w.worker_id IN (SELECT worker_id FROM met))
                  AND w.last_seen > now() - %(stale_s)s::float8 * interval '1 second'))
         ORDER BY o.lists IS NULL, random() LIMIT 1) AS keep_for
  FROM job;

-- name: waiting_unknown many
-- Return the nodes that workers have handed back because they do not know them. A row has the queue,
-- the node module, the number of jobs, and one of their runs. Reads the first 10,000 jobs that are due
-- within `within_s` seconds, and the first job of each queue in the order of claims. Examines only jobs
-- with an error, since such a hand-back stores one, which the next claim removes.
WITH first AS (
    (SELECT j.id, j.queue::text, j.node_module, j.run_id, j.node_id, j.error
       FROM workflow_node_jobs j
      WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL
        AND j.available_at <= now() + %(within_s)s::float8 * interval '1 second'
      ORDER BY j.available_at LIMIT 10000)
    UNION ALL
    SELECT d.*
      FROM unnest(ARRAY['cpu', 'gpu']) AS dag (queue)
     CROSS JOIN LATERAL (
           SELECT j.id, j.queue::text, j.node_module, j.run_id, j.node_id, j.error
             FROM workflow_node_jobs j
            WHERE j.status = 'queued' AND j.blocked_reason IS NULL
              AND j.queue = dag.queue AND j.required_version IS NULL
            ORDER BY j.priority, j.seq LIMIT 10000) d)
SELECT first.queue, first.node_module, count(*) AS n, min(first.run_id) AS run_id
  FROM first
 CROSS JOIN LATERAL (
       SELECT (e.detail ->> 'unknown') IS NOT NULL AS is_unknown
         FROM workflow_node_events e
        WHERE e.run_id = first.run_id AND e.node_id = first.node_id AND e.job_id = first.id
          AND e.claim_no IS NOT NULL AND e.event_type <> 'claimed'
        ORDER BY e.created_at DESC, e.id DESC LIMIT 1) last
 WHERE first.error IS NOT NULL AND last.is_unknown
 GROUP BY 1, 2 ORDER BY 1, 2 LIMIT 100;
