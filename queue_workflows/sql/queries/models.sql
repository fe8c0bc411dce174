-- Store sizes and load times of GPU models, flag models that no worker can load, request loads.

-- name: publish_sizes none
-- Write how much GPU memory each model needs, as a host registers it. Rows that would not
-- change are not written.
INSERT INTO gpu_models AS g (model, host_label, est_vram_gb)
SELECT s.model, %(host)s, s.gb
  FROM unnest(%(models)s::text[], %(sizes)s::float8[]) AS s (model, gb)
 ORDER BY s.model
    ON CONFLICT (model, host_label) DO UPDATE SET est_vram_gb = excluded.est_vram_gb
 WHERE g.est_vram_gb IS DISTINCT FROM excluded.est_vram_gb;

-- name: learn_load none prepared
-- Let the moving average of how long a host loads a model follow one more load.
SELECT queue_workflows_learn(%(host)s, %(model)s, %(seconds)s::float8, NULL);

-- name: prune count
-- Delete measured times that are older than 30 days, of hosts without a worker.
DELETE FROM gpu_models g
 WHERE g.updated_at < now() - interval '30 days'
   AND NOT EXISTS (SELECT FROM workers w WHERE w.host_label = g.host_label);

-- name: unserved many prepared
-- Return the models ('': no model) that have waiting gpu jobs and no live worker to take
-- them, or that are flagged so. `reason` is NULL if a worker can take them; `flagged` is the
-- reason of the flag, or NULL.
SELECT coalesce(u.model, f.model) AS model, u.reason, u.detail, f.reason AS flagged
  FROM queue_workflows_gpu_unserved() u
  FULL JOIN gpu_unassignable f ON f.model = u.model
 ORDER BY 1;

-- name: flag count
-- Flag a model as one that no live worker can take. No row is written if the flag is there
-- already.
INSERT INTO gpu_unassignable AS f (model, reason, detail)
VALUES (%(model)s, %(reason)s, %(detail)s)
    ON CONFLICT (model) DO UPDATE
   SET reason = excluded.reason, detail = excluded.detail, since = now()
 WHERE (f.reason, f.detail) IS DISTINCT FROM (excluded.reason, excluded.detail);

-- name: unflag count
-- Delete the flag of a model.
DELETE FROM gpu_unassignable WHERE model = %(model)s;

-- name: log_for_model none
-- Write an event into the history of the first 100 waiting jobs of a model. BETWEEN keeps the
-- walk in the order of the claim's index.
{log_waiting()}
   AND j.required_model BETWEEN %(model)s AND %(model)s
 ORDER BY j.required_model, j.seq LIMIT 100;

-- name: log_without_model none
-- Write an event into the history of the first 100 waiting gpu jobs that require no model.
{log_waiting()}
   AND j.required_model IS NULL
 ORDER BY j.required_model, j.seq LIMIT 100;

-- name: flagged many
-- Return the flagged models that still no live worker takes, with the present reason and the number
-- of waiting jobs of each, up to 10,000. The model NULL stands for jobs without a model.
SELECT nullif(f.model, '') AS model, u.reason, u.detail, f.since,
       (SELECT count(*) FROM (
            SELECT FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND coalesce(j.required_model, '') = f.model LIMIT 10000) c) AS jobs
  FROM gpu_unassignable f
  JOIN queue_workflows_gpu_unserved() u ON u.model = f.model
 ORDER BY f.model;

-- name: request row
-- Write an operator's request to load or unload a model, for all workers of a host (worker
-- '') or for one; return the row. A trigger wakes the workers.
INSERT INTO model_controls (host_label, worker_id, action, model, requested_by)
VALUES (%(host)s, %(worker)s, %(action)s, %(model)s, %(requested_by)s)
    ON CONFLICT (host_label, worker_id) DO UPDATE
   SET action = excluded.action, model = excluded.model, requested_by = excluded.requested_by
RETURNING *;

-- name: newest_request one
-- Return the newest request for a worker past number `after`, and the stop policy by which its
-- queue is OFF now, NULL if it is on. A request that is older than the worker was meant for another
-- process. Returns no row if there is none.
SELECT c.*, queue_workflows_off_policy(w.host_label, w.queue) AS off_policy
  FROM model_controls c
  JOIN workers w ON w.worker_id = %(worker)s
 WHERE c.host_label = %(host)s AND c.worker_id IN ('', %(worker)s)
   AND c.request_no > %(after)s AND c.requested_at >= w.started_at
 ORDER BY c.request_no DESC LIMIT 1;

-- name: on_workers many
-- Return the gpu workers seen within a day, of one host, or of all if NULL: the model and the
-- request as each reported them, the models that its host knows, and its host's GPUs in the latest
-- sample within a minute (else NULL). One that was not seen for `stale_s` seconds is dead.
SELECT w.worker_id, w.host_label, w.pid,
       CASE WHEN w.last_seen < now() - %(stale_s)s * interval '1 second' THEN 'dead'
            ELSE w.state END AS state,
       w.job_ids, w.detail->'card' AS card, w.detail->'model' AS model, w.detail->'request' AS request, w.last_seen,
       extract(epoch FROM now())::float8 - extract(epoch FROM w.last_seen)::float8 AS age_s,
       coalesce(array_remove(h.known_models, NULL), '{}') AS known_models, latest.sample->'gpus' AS gpus
  FROM workers w
  LEFT JOIN worker_heartbeats h ON h.host_label = w.host_label AND h.queue = w.queue
  LEFT JOIN LATERAL (
       SELECT s.sample FROM hw_samples s
        WHERE s.host_label = w.host_label AND s.sampled_at > now() - interval '1 minute'
        ORDER BY s.sampled_at DESC LIMIT 1) latest ON true
 WHERE w.queue = 'gpu' AND w.state <> 'stopped' AND w.last_seen > now() - interval '1 day'
   AND (%(host)s::text IS NULL OR w.host_label = %(host)s)
 ORDER BY w.host_label, w.started_at, w.worker_id
 LIMIT 10000;
