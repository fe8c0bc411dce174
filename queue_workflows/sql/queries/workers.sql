-- Store the reports of workers, flag dead workers, and delete old rows.

-- name: beat none
-- Record that a host serves a queue, for an app that runs workers of its own; clear its dead
-- flag. `known_models` NULL leaves them as they are.
INSERT INTO worker_heartbeats AS h
       (host_label, queue, concurrency, current_model, known_models)
VALUES (%(host_label)s, %(queue)s, %(concurrency)s, %(current_model)s,
        coalesce(%(known_models)s::text[], '{}'))
    ON CONFLICT (host_label, queue) DO UPDATE
   SET concurrency = excluded.concurrency,
       current_model = CASE WHEN %(update_current_model)s::boolean THEN excluded.current_model
                            ELSE h.current_model END,
       known_models = coalesce(%(known_models)s::text[], h.known_models),
       last_seen = now(), last_flagged_dead_at = NULL;

-- name: report none prepared
-- Write the row of a worker process and the heartbeat of its host and queue. A worker that
-- obeys controls and is switched off is draining while it has a job, and else paused or
-- parked: then its host's heartbeat is left to age.
WITH off AS MATERIALIZED (
    SELECT CASE WHEN %(obey)s THEN queue_workflows_off_policy(%(host_label)s, %(queue)s) END
        AS policy),
worker AS (
    INSERT INTO workers AS w (worker_id, host_label, queue, pid, state, job_ids, detail,
           current_model, model_since, known_models, vram_total_mb)
    SELECT %(worker_id)s, %(host_label)s, %(queue)s, %(pid)s::integer,
           CASE WHEN off.policy IS NULL THEN %(state)s
                WHEN %(job_ids)s::text[] <> '{}' THEN 'draining'
                WHEN off.policy = 'pause' THEN 'paused' ELSE 'parked' END,
           %(job_ids)s::text[], %(detail)s::jsonb, %(current_model)s, now(),
           nullif(%(known_models)s::text[], '{}'), %(vram_total_mb)s::integer
      FROM off
        ON CONFLICT (worker_id) DO UPDATE
       SET state = excluded.state, job_ids = excluded.job_ids, detail = excluded.detail,
           last_seen = now(),
           model_since = CASE WHEN w.current_model IS DISTINCT FROM excluded.current_model
                              THEN now() ELSE w.model_since END,
           current_model = excluded.current_model, known_models = excluded.known_models,
           vram_total_mb = excluded.vram_total_mb)
INSERT INTO worker_heartbeats AS h
       (host_label, queue, concurrency, current_model, known_models, vram_total_mb)
SELECT %(host_label)s, %(queue)s, %(concurrency)s::integer, %(current_model)s,
       %(known_models)s::text[], %(vram_total_mb)s::integer
  FROM off
 WHERE off.policy IS NULL OR %(job_ids)s::text[] <> '{}'
    ON CONFLICT (host_label, queue) DO UPDATE
   SET concurrency = excluded.concurrency, current_model = excluded.current_model,
       known_models = excluded.known_models, vram_total_mb = excluded.vram_total_mb,
       last_seen = now(), last_flagged_dead_at = NULL;

-- name: fill_memory one
-- Return a live worker, not in `but`, that has reported running jobs and that it fills one of these
-- memories. Returns no row if there is none. `memory` has ids as in the `memory` of the detail that
-- workers report.
SELECT w.worker_id
  FROM workers w
 WHERE w.job_ids <> '{}' AND {is_live(w, %(stale_s)s::float8)}
   AND w.worker_id <> ALL (%(but)s::text[])
   AND w.detail -> 'memory' ?| %(memory)s::text[]
 LIMIT 1;

-- name: stop none
-- Record that a worker ended in good order.
UPDATE workers SET state = 'stopped', job_ids = '{}', last_seen = now()
 WHERE worker_id = %(worker)s;

-- name: last_detail value
-- Return the last report of the worker of a process. The ids of the workers of a process start with
-- its prefix. Returns no row if it never reported.
SELECT detail FROM workers WHERE starts_with(worker_id, %(prefix)s)
 ORDER BY last_seen DESC LIMIT 1;

-- name: record_death none
-- Mark the workers of a process that has ended, unless they are marked, and add how it ended.
-- `prefix` begins their ids. They have stopped if `orderly`, else they are dead.
UPDATE workers
   SET state = CASE WHEN %(orderly)s THEN 'stopped' ELSE 'dead' END, job_ids = '{}',
       detail = detail || %(detail)s::jsonb
 WHERE starts_with(worker_id, %(prefix)s) AND state NOT IN ('stopped', 'dead');

-- name: clear_model one
-- Clear the loaded model in the heartbeat of a host and queue; return the row. `mark_stale` also
-- sets the heartbeat back by an hour. Returns no row if that heartbeat does not exist.
UPDATE worker_heartbeats
   SET current_model = NULL,
       last_seen = CASE WHEN %(mark_stale)s THEN now() - interval '1 hour' ELSE last_seen END
 WHERE host_label = %(host)s AND queue = %(queue)s
RETURNING *;

-- name: clear_heartbeat none
-- Clear the model in a heartbeat for a worker that leaves, and set the heartbeat back by an
-- hour unless another worker of the host and queue was seen within `live_s` seconds: an old
-- heartbeat would make that one count as dead.
-- `gone` begins the id of the worker.
UPDATE worker_heartbeats h
   SET current_model = NULL,
       last_seen = CASE WHEN EXISTS (
           SELECT FROM workers w
            WHERE w.host_label = h.host_label AND w.queue = h.queue
              AND NOT starts_with(w.worker_id, %(gone)s) AND {is_live(w, %(live_s)s::float8)})
           THEN h.last_seen ELSE now() - interval '1 hour' END
 WHERE h.host_label = %(host)s AND h.queue = %(queue)s;

-- name: flag_stale many
-- Flag the heartbeats that are older than `stale_s` seconds, are not flagged, and have running jobs
-- under their host and queue; return them with the number of these jobs.
WITH stale AS MATERIALIZED (
    SELECT w.host_label, w.queue,
           (SELECT count(*) FROM workflow_node_jobs j
             WHERE j.status = 'running' AND j.claimed_by = w.host_label AND j.queue = w.queue)
           + (SELECT count(*) FROM ingest_jobs i
               WHERE i.status = 'running' AND i.claimed_by = w.host_label AND i.queue = w.queue)
               AS running_jobs
      FROM worker_heartbeats w
     WHERE w.last_seen < now() - %(stale_s)s * interval '1 second'
       AND w.last_flagged_dead_at IS NULL)
UPDATE worker_heartbeats h SET last_flagged_dead_at = now()
  FROM stale s
 WHERE s.running_jobs > 0 AND h.host_label = s.host_label AND h.queue = s.queue
   AND h.last_seen < now() - %(stale_s)s * interval '1 second' AND h.last_flagged_dead_at IS NULL
RETURNING h.*, s.running_jobs;

-- name: list many
-- List the worker processes that have not ended and were seen within a day, for an operator. One that was not seen for
-- `stale_s` seconds is dead. Each has its running jobs (`job_ids`, and as `jobs` their kind, name, run and seconds), the
-- model of its host's heartbeat (a worker of one GPU: its own), and the control row that switches it off now: of its queue's
-- and the host's row, the one whose policy queue_workflows_off_policy() returns. `limits`: the use of the limits of its
-- queue, if that has settings; whether jobs could be claimed but for these (`ready`) or are blocked by those of their
-- partitions (`limited`). Behind them with `absent`: the control rows that are off without a live worker.
WITH running AS MATERIALIZED (
    SELECT c.worker_id, array_agg(c.id ORDER BY c.started_at, c.id) AS ids,
           jsonb_agg(jsonb_build_object('id', c.id, 'kind', c.kind, 'name', c.name, 'run_id', c.run_id,
                                        'elapsed_s', c.elapsed_s) ORDER BY c.started_at, c.id) AS jobs
      FROM (
        -- both:
        SELECT j.worker_id, j.id, j.started_at, {age_s(j.started_at)} AS elapsed_s,
               'ingest job' AS kind, j.task_name AS name, NULL::text AS run_id  -- ingest only
               'node job' AS kind, j.node_id AS name, j.run_id  -- nodes only
          FROM ingest_jobs j
         WHERE j.status = 'running' AND j.worker_id IS NOT NULL
        -- end
        ) c
     GROUP BY c.worker_id),
limits AS MATERIALIZED (
    SELECT {in_use(s)},
           EXISTS (SELECT FROM ingest_jobs j
                    WHERE j.queue = s.queue AND queue_workflows_is_claimable(j.status, j.blocked_reason))
           OR EXISTS (SELECT FROM workflow_node_jobs j
                       WHERE j.queue = s.queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)) AS ready,
           EXISTS (SELECT FROM ingest_jobs j
                    WHERE j.queue = s.queue AND j.partition_key IS NOT NULL
                      AND j.status = 'queued' AND j.blocked_reason = 'limited') AS limited
      FROM queue_settings s
     WHERE s.queue IN (SELECT w.queue FROM workers w))
SELECT false AS is_absent, w.worker_id, w.host_label, w.queue, w.pid,
       CASE WHEN w.state <> 'stopped' AND w.last_seen < now() - %(stale_s)s::float8 * interval '1 second'
            THEN 'dead' ELSE w.state END AS state,
       w.detail, w.started_at, w.last_seen,
       extract(epoch FROM now())::float8 - extract(epoch FROM w.last_seen)::float8 AS age_s,
       CASE WHEN c.queue IS NULL THEN 'on' ELSE 'off' END AS desired_state, c.stop_policy,
       c.requested_by, c.reason, c.until_at,
       extract(epoch FROM c.until_at)::float8 - extract(epoch FROM now())::float8 AS until_s,
       c.updated_at AS switched_at,
       CASE WHEN w.detail ? 'card' THEN w.current_model ELSE h.current_model END AS current_model,
       h.last_flagged_dead_at, coalesce(r.ids, '{}') AS job_ids, coalesce(r.jobs, '[]') AS jobs, to_jsonb(l) AS limits
  FROM workers w
  LEFT JOIN LATERAL (
       SELECT * FROM worker_controls o
        WHERE o.host_label = w.host_label AND o.queue IN (w.queue, 'all')
          AND queue_workflows_is_off(o.desired_state, o.until_at)
        ORDER BY o.stop_policy <> 'hard', o.queue = 'all' LIMIT 1) c ON true
  LEFT JOIN worker_heartbeats h ON h.host_label = w.host_label AND h.queue = w.queue
  LEFT JOIN running r ON r.worker_id = w.worker_id
  LEFT JOIN limits l ON l.queue = w.queue
 WHERE w.last_seen > now() - interval '1 day' AND w.state <> 'stopped'
UNION ALL
SELECT true, NULL, c.host_label, c.queue, NULL, 'absent', NULL, NULL, NULL, NULL, 'off', c.stop_policy, c.requested_by, c.reason,
       c.until_at, extract(epoch FROM c.until_at)::float8 - extract(epoch FROM now())::float8, c.updated_at,
       NULL, NULL, '{}', '[]', NULL
  FROM worker_controls c
 WHERE %(absent)s::boolean AND queue_workflows_is_off(c.desired_state, c.until_at)
   AND NOT EXISTS (
       SELECT FROM workers w
        WHERE w.host_label = c.host_label AND c.queue IN (w.queue, 'all') AND {is_live(w, %(stale_s)s::float8)})
 ORDER BY is_absent, host_label, queue, started_at
 LIMIT 10000;

-- name: switched_off many
-- Return the control rows that switch workers off now, whether or not there are such workers.
-- The queue 'all' stands for every queue of its host.
SELECT c.host_label, c.queue, c.stop_policy, c.requested_by, c.reason, c.until_at,
       c.updated_at AS switched_at,
       extract(epoch FROM c.until_at)::float8 - extract(epoch FROM now())::float8 AS until_s
  FROM worker_controls c
 WHERE queue_workflows_is_off(c.desired_state, c.until_at)
 ORDER BY c.host_label, c.queue
 LIMIT 10000;

-- name: flagged many
-- Return the queues of a host, or (NULL) of all hosts, whose heartbeats are flagged as dead and
-- that are not switched off.
SELECT h.host_label, h.queue, h.last_flagged_dead_at AS flagged_at,
       extract(epoch FROM now())::float8 - extract(epoch FROM h.last_seen)::float8 AS age_s
  FROM worker_heartbeats h
 WHERE (%(host)s::text IS NULL OR h.host_label = %(host)s) AND h.last_flagged_dead_at IS NOT NULL
   AND queue_workflows_off_policy(h.host_label, h.queue) IS NULL
 ORDER BY h.host_label, h.queue;

-- name: count_heartbeats many
-- Count the heartbeats of each queue that are younger than `live_s` seconds.
SELECT queue, count(*) AS n FROM worker_heartbeats
 WHERE last_seen > now() - %(live_s)s * interval '1 second'
 GROUP BY queue;

-- name: prune count
-- Delete the rows of workers that ended, or were last seen, over a day ago.
DELETE FROM workers WHERE last_seen < now() - interval '1 day';
