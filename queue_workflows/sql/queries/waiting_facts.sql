-- Facts from which `queue-workflows why` explains why a job or a run waits.

-- name: jobs many
-- tables: ingest_jobs workflow_node_jobs
-- Return jobs with the facts that explain their waiting: when each is due, and whether it is due for its host alone
-- (`kept`); the event that its handler awaits since its last claim; the owner of its lock key, which runs or is admitted
-- next; the limits in force for its partition (its own, else the queue's for partitions), when its next job may be
-- admitted (NULL if no time is set) and how many run; whether a worker serves its queue again, if it is blocked because
-- none did. For a node, also the status of its run, and how many items of its map have ended.
SELECT j.*,
       'ingest job'  -- ingest only
       r.status AS run_status, m.total AS map_total, m.done_items AS map_done, m.failed_items AS map_failed,  -- nodes only
       m.open_items AS map_open, 'node job'  -- nodes only
       AS kind,
       CASE WHEN j.status = 'queued' AND j.blocked_reason = 'not_due'
            THEN queue_workflows_due_at(j.available_at, j.resume_at, j.resume_until) END AS due_at,
       (j.resume_until = j.available_at AND j.resume_at <= now() AND j.resume_host IS NOT NULL) IS TRUE AS kept,
       queue_workflows_is_lost(j.status, j.lease_expires_at) AS lost,
       e.name AS event_name, e.key AS event_key, e.due_at AS event_due_at, o.id AS owner_id, o.status AS owner_status, p.*,
       CASE WHEN j.blocked_reason = 'unserved'
            THEN j.queue::text = ANY (queue_workflows_served_queues(%(stale_s)s::float8)) END AS is_served
  FROM ingest_jobs j
  JOIN workflow_runs r ON r.id = j.run_id  -- nodes only
  LEFT JOIN workflow_run_maps m ON m.run_id = j.run_id AND m.node_id = j.node_id  -- nodes only
  LEFT JOIN LATERAL (
       SELECT s.name, s.key, s.due_at FROM job_steps s
        WHERE s.job_id = j.id AND s.job_table = 'ingest_jobs' AND s.kind = 'event' AND s.state = 'waiting'
          AND s.claim_no = j.claim_no
        ORDER BY s.id LIMIT 1) e ON j.blocked_reason = 'not_due'
  LEFT JOIN LATERAL (
       SELECT w.id, w.status::text FROM ingest_jobs w
        WHERE w.lock_key = j.lock_key AND (w.status = 'running' OR queue_workflows_is_claimable(w.status, w.blocked_reason))
        LIMIT 1) o ON j.blocked_reason = 'locked'
  LEFT JOIN LATERAL (
       SELECT coalesce(queue_workflows_is_paused(q.paused_at, q.paused_until), false) AS partition_paused,
              q.paused_until AS partition_until, coalesce(q.max_running, s.partition_max_running) AS partition_most,
              coalesce(q.rate_limit, s.partition_rate_limit) AS partition_rate,
              CASE WHEN q.rate_limit IS NULL THEN s.partition_rate_period_s ELSE q.rate_period_s END AS partition_period_s,
              (SELECT min(d.due_at) FROM partition_dues d
                WHERE d.queue = j.queue AND d.partition_key = j.partition_key AND d.due_at < 'infinity') AS partition_due_at,
              (SELECT count(*) FROM ingest_jobs x
                WHERE x.queue = j.queue AND x.partition_key = j.partition_key AND x.status = 'running') AS partition_running
         FROM (SELECT) AS one
         LEFT JOIN queue_settings s ON s.queue = j.queue
         LEFT JOIN queue_partitions q ON q.queue = j.queue AND q.partition_key = j.partition_key) p
    ON j.partition_key IS NOT NULL
 WHERE j.id = ANY (%(ids)s::text[])
 LIMIT 10000;

-- name: buckets many
-- Return the queued jobs of both families in buckets, the largest first: by queue, by what keeps them (`reason`: the
-- blocked_reason, `run_over`, or NULL) and by the object of it (`about`), and by what their workers need. `first_id` is the
-- first job of a bucket, `since` when its oldest was queued, `total` how many jobs all buckets have, also those past
-- `limit`. `most` jobs of a queue, and as many blocked ones, are read; `is_more`: there are more of them.
SELECT b.*, sum(b.n) OVER () AS total
  FROM (SELECT 'ingest_jobs' AS jobs, i.* FROM queue_workflows_ingest_waiting(%(most)s) i
         UNION ALL
        SELECT 'workflow_node_jobs', n.* FROM queue_workflows_node_waiting(%(most)s) n) b
 ORDER BY b.n DESC, b.queue, b.first_id
 LIMIT %(limit)s;

-- name: run one
-- Return the facts that explain why a run waits. Returns no row if the run does not exist.
SELECT id, workflow_name, status::text, available_at, definition
  FROM workflow_runs
 WHERE id = %(run)s;

-- name: run_nodes many unprepared
-- Return the first queued or asking nodes of a run, in the order of the queue, each with the number (`total`) of them all.
SELECT w.id, w.node_id, w.status, w.prompt, w.child_run_id, c.status AS child_status, w.total
  FROM (SELECT id, node_id, status::text, input_spec -> 'prompt' AS prompt, child_run_id, seq, count(*) OVER () AS total
          FROM workflow_node_jobs
         WHERE run_id = %(run)s AND status IN ('queued', 'awaiting_input')
         ORDER BY seq LIMIT %(limit)s) w
  LEFT JOIN LATERAL (SELECT r.status FROM workflow_runs r WHERE r.id = w.child_run_id LIMIT 1) c ON true
 ORDER BY w.seq;

-- name: workers many
-- Return the live workers of these queues, up to 1,000 of each. `current_model` is the model that is warm when the worker
-- claims next, `off` the policy of the switch that is OFF for it, `node` and `ingest` its running jobs. `misfits`: for
-- each of these models the GPU memory that it needs, and why a gpu worker does not claim its jobs: `model` (the worker
-- does not know it), `vram` (too little GPU memory) or null. Alike workers of a host share one answer.
WITH live AS MATERIALIZED (
    SELECT p.*
      FROM (SELECT v.*, row_number() OVER (PARTITION BY v.queue ORDER BY v.host_label, v.started_at, v.worker_id) AS place
              FROM workers v
             WHERE v.queue = ANY (%(queues)s::text[]) AND {is_live(v, %(stale_s)s::float8)}) p
     WHERE p.place <= 1000),
known AS MATERIALIZED (SELECT unnest(l.known_models) AS model FROM queue_workflows_gpu_live() l),
fits AS MATERIALIZED (
    SELECT g.host_label, g.known_models, g.vram_total_mb,
           jsonb_object_agg(m.model, jsonb_build_object(
               -- For a worker that registers no model the function searches all workers, which is slow.
               'misfit', CASE WHEN g.known_models IS NULL AND m.model IN (SELECT k.model FROM known k) THEN 'model'
                              ELSE queue_workflows_gpu_misfit(
                                   g.host_label, coalesce(g.known_models, ARRAY[m.model]), g.vram_total_mb, m.model) END,
               'needs_gb', queue_workflows_gpu_needs(g.host_label, m.model))) AS misfits
      FROM (SELECT DISTINCT host_label, known_models, vram_total_mb FROM live WHERE queue = 'gpu') g
     CROSS JOIN unnest(%(models)s::text[]) AS m (model)
     GROUP BY g.host_label, g.known_models, g.vram_total_mb)
SELECT w.worker_id, w.host_label, w.queue, w.pid, w.state, w.known_models,
       coalesce(n.required_model, w.detail -> 'model' ->> 'id', w.current_model) AS current_model,
       w.vram_total_mb,
       w.detail -> 'claim' AS claim,
       w.detail -> 'throttle' AS throttle,
       w.detail -> 'gpu_fault' AS gpu_fault,
       queue_workflows_off_policy(w.host_label, w.queue) AS off, n.id AS node, i.id AS ingest,
       f.misfits
  FROM live w
  LEFT JOIN fits f
    ON w.queue = 'gpu' AND f.host_label = w.host_label
   AND (f.known_models, f.vram_total_mb) IS NOT DISTINCT FROM (w.known_models, w.vram_total_mb)
  LEFT JOIN LATERAL (SELECT j.id, j.required_model FROM workflow_node_jobs j
                      WHERE j.worker_id = w.worker_id AND j.status = 'running' LIMIT 1) n ON true
  LEFT JOIN LATERAL (SELECT j.id FROM ingest_jobs j
                      WHERE j.worker_id = w.worker_id AND j.status = 'running' LIMIT 1) i ON true
 ORDER BY w.host_label, w.started_at, w.worker_id
 LIMIT 10000;

-- name: met many
-- Return which workers did not know these nodes.
SELECT j.id, ARRAY(SELECT DISTINCT m.worker_id FROM ({met(j)}) m ORDER BY m.worker_id) AS workers
  FROM workflow_node_jobs j
 WHERE j.id = ANY (%(ids)s::text[])
 LIMIT 10000;

-- name: jobs_ahead row
-- tables: ingest_jobs workflow_node_jobs
-- Count the due jobs before this one in the order of the claim, up to `most`: all of them, and the ones of a better priority.
-- Nodes count only if their run is live. `models`: only nodes without a model or with one of these; NULL allows any.
SELECT count(*) FILTER (WHERE priority < %(priority)s::smallint) AS better, count(*) AS every
  FROM (SELECT j.priority
          FROM ingest_jobs j
          JOIN workflow_runs r ON r.id = j.run_id AND NOT queue_workflows_is_terminal_run(r.status)  -- nodes only
         WHERE j.queue = %(queue)s AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND (j.priority < %(priority)s::smallint
                OR j.priority = %(priority)s::smallint
               AND CASE WHEN %(newest)s::boolean THEN j.seq > %(seq)s::bigint
                        ELSE j.seq < %(seq)s::bigint END)
           AND (%(models)s::text[] IS NULL OR j.required_model IS NULL  -- nodes only
                OR j.required_model = ANY (%(models)s::text[]))  -- nodes only
         LIMIT %(most)s) ahead;

-- name: gpu_choices many
-- Return for each of these gpu workers, a JSON array, the choice of its next claim: the model (`can` has each of which it
-- can take jobs), why, the priority (`band`) and the job (`seq`). `held`: by each of `models` that its policy leaves to
-- workers that hold it, their hosts (`holders`), the seconds until one is free (`reach_s`) and of a load here (`load_s`).
SELECT w.worker_id, can.models AS can, c.model, c.why, c.band,
       CASE WHEN c.how <> 'newest' THEN c.seq
            ELSE (SELECT j.seq
                    FROM workflow_node_jobs j
                    JOIN workflow_runs r
                      ON r.id = j.run_id AND NOT queue_workflows_is_terminal_run(r.status)
                   WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
                     AND j.required_model IS NOT DISTINCT FROM nullif(c.model, '')
                     AND j.priority = c.band
                   ORDER BY j.seq DESC LIMIT 1) END AS seq,
       CASE WHEN c.why IN ('worth', 'left') THEN (
            SELECT jsonb_object_agg(m.model, jsonb_build_object(
                       'reach_s', g.reach_s, 'load_s', g.load_s, 'holders', ARRAY(
                           SELECT DISTINCT f.host_label FROM unnest(fleet.holders) f
                            WHERE f.model = m.model ORDER BY f.host_label)))
              FROM (SELECT ARRAY(SELECT f FROM queue_workflows_gpu_fleet(w.worker_id) f) AS holders) fleet
             CROSS JOIN unnest(%(models)s::text[]) AS m (model)
             CROSS JOIN LATERAL queue_workflows_gpu_weigh(
                        fleet.holders, w.host_label, m.model, w.versions) g
             WHERE g.is_left) END AS held
  FROM jsonb_to_recordset(%(workers)s::jsonb) AS w (
           worker_id text, host_label text, current_model text, known_models text[],
           vram_total_mb integer, newest boolean, policy text, grace_s double precision,
           bound_s double precision, versions text[])
 CROSS JOIN LATERAL queue_workflows_gpu_can(
            w.host_label, w.known_models, w.vram_total_mb) AS can (models)
 CROSS JOIN LATERAL queue_workflows_gpu_next(
            w.worker_id, w.host_label, w.current_model, array_append(can.models, ''), w.newest,
            w.policy, w.grace_s, w.bound_s, w.versions) c;
