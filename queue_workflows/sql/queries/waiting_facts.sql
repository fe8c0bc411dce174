-- Facts from which `queue-workflows why` explains why a job or a run waits.

-- name: job one
-- tables: ingest_jobs workflow_node_jobs
-- Return a job, when it is due, and whether it is due for its host alone (`kept`), of a node also the status of its run.
-- No row: no such job.
SELECT j.*,
       'ingest job'  -- ingest only
       r.status AS run_status, 'node job'  -- nodes only
       AS kind,
       CASE WHEN j.status = 'queued' AND j.blocked_reason = 'not_due'
            THEN queue_workflows_due_at(j.available_at, j.resume_at, j.resume_until) END AS due_at,
       (j.resume_until = j.available_at AND j.resume_at <= now() AND j.resume_host IS NOT NULL) IS TRUE AS kept,
       queue_workflows_is_lost(j.status, j.lease_expires_at) AS lost
  FROM ingest_jobs j
  JOIN workflow_runs r ON r.id = j.run_id  -- nodes only
 WHERE j.id = %(job)s;

-- name: run one
-- Return the facts that explain why a run waits. No row: no such run.
SELECT id, workflow_name, status::text, available_at, definition
  FROM workflow_runs
 WHERE id = %(run)s;

-- name: run_nodes many
-- Return the jobs of a run's nodes, in the order of the queue.
SELECT id, node_id, status::text, input_spec, child_run_id
  FROM workflow_node_jobs
 WHERE run_id = %(run)s
 ORDER BY seq;

-- name: workers many
-- Return the live workers of a queue. `current_model` is the model that is warm when the worker
-- claims next, `off` the policy of the switch that is OFF for it, `node` and `ingest` its running
-- jobs.
SELECT w.worker_id, w.host_label, w.pid, w.state, w.known_models,
       coalesce((SELECT j.required_model
                   FROM workflow_node_jobs j
                  WHERE j.worker_id = w.worker_id AND j.status = 'running'
                  LIMIT 1), w.detail -> 'model' ->> 'id', w.current_model) AS current_model,
       w.vram_total_mb,
       w.detail -> 'claim' AS claim,
       w.detail -> 'throttle' AS throttle,
       w.detail -> 'gpu_fault' AS gpu_fault,
       queue_workflows_off_policy(w.host_label, w.queue) AS off,
       (SELECT j.id
          FROM workflow_node_jobs j
         WHERE j.worker_id = w.worker_id AND j.status = 'running'
         LIMIT 1) AS node,
       (SELECT j.id
          FROM ingest_jobs j
         WHERE j.worker_id = w.worker_id AND j.status = 'running'
         LIMIT 1) AS ingest
  FROM workers w
 WHERE w.queue = %(queue)s AND w.state NOT IN ('stopped', 'dead')
   AND w.last_seen > now() - %(stale_s)s::float8 * interval '1 second'
 ORDER BY w.host_label, w.started_at, w.worker_id;

-- name: jobs_ahead row
-- tables: ingest_jobs workflow_node_jobs
-- Count the due jobs, of nodes those of live runs, that stand before this one in the order of the claim, up to `most`: all
-- of them, and those of a better priority. `models`: only nodes of one of these models or of none; NULL: of any.
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

-- name: newer_gpu_job one
-- Return a due gpu job of this model and priority that came later. No row: this one is the newest.
SELECT
  FROM workflow_node_jobs j
  JOIN workflow_runs r
    ON r.id = j.run_id AND NOT queue_workflows_is_terminal_run(r.status)
 WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
   AND j.required_model IS NOT DISTINCT FROM %(required_model)s::text
   AND j.priority = %(priority)s::smallint AND j.seq > %(seq)s::bigint
 LIMIT 1;

-- name: lock_owner one
-- tables: ingest_jobs workflow_node_jobs
-- Return the job that runs under a lock key, or is admitted to run next. No row: there is none.
SELECT j.id, j.status::text
  FROM ingest_jobs j
 WHERE j.lock_key = %(lock_key)s
   AND (j.status = 'running' OR queue_workflows_is_claimable(j.status, j.blocked_reason))
 LIMIT 1;

-- name: awaited_event one
-- Return the event for which the handler of a job waits since its last claim. No row: for none.
SELECT name, key, due_at
  FROM job_steps
 WHERE job_table = %(table)s AND job_id = %(job)s AND kind = 'event' AND state = 'waiting'
   AND claim_no = %(claim)s
 ORDER BY id LIMIT 1;

-- name: misfit row
-- Return why the claim of a worker leaves jobs of a model out: `model` (it does not know it),
-- `vram` (too little GPU memory) or NULL, and the GPU memory that the model needs.
SELECT queue_workflows_gpu_misfit(%(host_label)s, %(known_models)s::text[],
           %(vram_total_mb)s::integer, %(model)s) AS misfit,
       queue_workflows_gpu_needs(%(host_label)s, %(model)s) AS needs_gb;

-- name: models value
-- Return the models in the queue of which a worker can take jobs.
SELECT queue_workflows_gpu_can(%(host_label)s, %(known_models)s::text[],
           %(vram_total_mb)s::integer) AS models;

-- name: choice row
-- Return what a gpu worker would claim next: the model, how and why, the priority and the job.
SELECT *
  FROM queue_workflows_gpu_next(%(worker_id)s, %(host_label)s, %(current_model)s,
           %(models)s::text[], %(newest)s, %(policy)s, %(grace_s)s::float8, %(bound_s)s::float8,
           %(versions)s::text[]);

-- name: weighed row
-- Return how a worker that has not loaded a model weighs the jobs of that model, and `holders`,
-- the hosts that have loaded it.
SELECT g.*,
       (SELECT array_agg(DISTINCT f.host_label)
          FROM queue_workflows_gpu_fleet(%(worker_id)s) f
         WHERE f.model = %(model)s) AS holders
  FROM queue_workflows_gpu_weigh(
           ARRAY(SELECT f FROM queue_workflows_gpu_fleet(%(worker_id)s) f),
           %(host_label)s, %(model)s, %(versions)s::text[]) g;
