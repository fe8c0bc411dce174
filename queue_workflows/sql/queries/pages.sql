-- Read for pages of the dashboard, beside the lists.

-- name: attention row
-- Return the facts that every page has, numbers up to `most`: nodes of running runs that wait for an answer that nobody
-- has given (`asked`) and the longest wait; jobs of both families that failed within `within_s` seconds (`failed`), and
-- the end and the error of the last one that failed at all; what waits for an orchestrator: the oldest event that is due
-- (`event`) and the runs that have waited for `patience_s` (`late`); the switches whose OFF has ended by itself, while no
-- worker of their host and queue was seen since then; the hosts and queues that are on, and of which a worker died or was
-- silent for `stale_s` within a day, while none lives or ended in order since then, unless their heartbeat is flagged
-- (`gone`); whether there is any run or ingest job.
SELECT q.asked, q.asked_s, l.finished_at AS failed_at, l.error,
       (SELECT sum(c.n) FROM (
           -- both:
           SELECT count(*) AS n
             FROM (SELECT FROM ingest_jobs
                    WHERE status = 'failed' AND finished_at > now() - %(within_s)s * interval '1 second'
                    LIMIT %(most)s) f
           -- end
           ) c)::bigint AS failed,
       (SELECT to_jsonb(e) FROM ({due_event()}) e) AS event,
       (SELECT coalesce(jsonb_agg(to_jsonb(r)), '[]') FROM ({late_runs()}) r) AS late,
       (SELECT coalesce(jsonb_agg(to_jsonb(o)), '[]')
          FROM (SELECT c.host_label, c.queue, {age_s(c.until_at)} AS since_s
                  FROM worker_controls c
                 WHERE c.desired_state = 'off' AND c.until_at < now() - interval '1 minute'
                   AND NOT EXISTS (
                       SELECT FROM workers w
                        WHERE w.host_label = c.host_label AND c.queue IN ('all', w.queue)
                          AND w.last_seen > c.until_at)
                 ORDER BY c.until_at LIMIT 20) o) AS switches,
       (SELECT coalesce(jsonb_agg(to_jsonb(g)), '[]')
          FROM (SELECT d.host_label, d.queue, {age_s(max(d.last_seen))} AS since_s
                  FROM workers d
                 WHERE d.state <> 'stopped' AND NOT ({is_live(d, %(stale_s)s::float8)})
                   AND d.last_seen BETWEEN now() - interval '1 day' AND now() - interval '1 minute'
                   AND queue_workflows_off_policy(d.host_label, d.queue) IS NULL
                   AND NOT EXISTS (
                       SELECT FROM workers w
                        WHERE w.host_label = d.host_label AND w.queue = d.queue AND w.last_seen > d.last_seen
                          AND (w.state = 'stopped' OR {is_live(w, %(stale_s)s::float8)}))
                   AND NOT EXISTS (
                       SELECT FROM worker_heartbeats h
                        WHERE h.host_label = d.host_label AND h.queue = d.queue AND h.last_flagged_dead_at IS NOT NULL)
                 GROUP BY d.host_label, d.queue
                 ORDER BY since_s LIMIT 20) g) AS gone,
       EXISTS (SELECT FROM workflow_runs) OR EXISTS (SELECT FROM ingest_jobs) AS any_run
  FROM (SELECT count(*) AS asked, max(w.waiting_s) AS asked_s
          FROM (SELECT {age_s(coalesce(j.started_at, j.created_at))} AS waiting_s
                  {asking()} AND NOT {is_answered(j)}
                 ORDER BY coalesce(j.started_at, j.created_at), j.seq
                 LIMIT %(most)s) w) q
  LEFT JOIN (
       SELECT b.* FROM (
           -- both:
           (SELECT finished_at, left(error, 1000) AS error FROM ingest_jobs
             WHERE status = 'failed' AND finished_at <= now()
             ORDER BY finished_at DESC LIMIT 1)
           -- end
           ) b ORDER BY b.finished_at DESC LIMIT 1) l ON true;

-- name: questions many
-- Return the input nodes that wait in running runs, of one run and node if given, the longest wait first, after the place
-- `after` and `after_seq`, or from the first if NULL. A spec and a default over `most` bytes are NULL. `asked` changes with the
-- spec, and is NULL with one of more bytes as stored. `answered`: whether an answer was submitted and not taken yet. `due_at`:
-- when the wait ends by itself, with `default` as the answer if it `has_default`, or NULL if it never ends by itself.
SELECT j.run_id, r.workflow_name, r.out_dir, j.node_id, j.id AS job_id, j.seq,
       (SELECT t.due_at FROM workflow_input_timeouts t WHERE t.job_id = j.id) AS due_at,
       j.policy ? 'default' AS has_default, {small(j.policy -> 'default')} AS default,
       {small(j.input_spec)} AS input_spec, j.input_spec IS NOT NULL AS is_known,
       CASE WHEN pg_column_size(j.input_spec) <= %(most)s::integer
            THEN hashtextextended(j.input_spec::text, 0)::text END AS asked,
       coalesce(j.started_at, j.created_at) AS since, {age_s(coalesce(j.started_at, j.created_at))} AS waiting_s,
       {is_answered(j)} AS answered
{asking()}
   AND (%(run)s::text IS NULL OR r.id = %(run)s)
   AND (%(node)s::text IS NULL OR j.node_id = %(node)s)
   AND (coalesce(j.started_at, j.created_at), j.seq)
       > (coalesce(%(after)s::timestamptz, '-infinity'), coalesce(%(after_seq)s::bigint, 0))
 ORDER BY coalesce(j.started_at, j.created_at), j.seq
 LIMIT %(limit)s;

-- name: new_questions value
-- Return how many nodes of running runs began to wait for an answer after `since`, up to `most`.
SELECT count(*) AS n
  FROM (SELECT {asking()}
           AND coalesce(j.started_at, j.created_at) > %(since)s::timestamptz
         LIMIT %(most)s) q;

-- name: running many
-- Return the jobs of both families, of these workers or (NULL) of all, that run longest, each with how long its node
-- usually takes: the median of the last 20 runs of its workflow; NULL if they have no such node, and for ingest jobs.
SELECT j.*, {age_s(j.started_at)} AS elapsed_s, u.usual_s
  FROM (SELECT b.* FROM (
            -- both:
            (SELECT j.id AS job_id, j.queue::text, j.claimed_by AS host_label, j.worker_id, j.started_at, j.seq,
                    NULL::text AS run_id, NULL::text AS workflow_name, j.task_name AS name -- ingest only
                    j.run_id, r.workflow_name, j.node_id AS name -- nodes only
               FROM ingest_jobs j
               LEFT JOIN workflow_runs r ON r.id = j.run_id -- nodes only
              WHERE j.status = 'running' AND (%(workers)s::text[] IS NULL OR j.worker_id = ANY (%(workers)s))
              ORDER BY j.started_at, j.seq LIMIT %(limit)s)
            -- end
            ) b ORDER BY b.started_at, b.seq LIMIT %(limit)s) j
  LEFT JOIN LATERAL (
       SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY n.seconds)::float8 AS usual_s
         FROM (SELECT id FROM workflow_runs
                WHERE workflow_name BETWEEN j.workflow_name AND j.workflow_name  -- so that only one index has this order
                ORDER BY workflow_name, created_at DESC LIMIT 20) p
         JOIN workflow_node_jobs n
           ON n.run_id = p.id AND n.node_id = j.name AND n.status = 'completed') u ON true
 ORDER BY j.started_at, j.seq;

-- name: loads many
-- Count the loads of models for jobs of these workers within a day, by worker, among the newest `most` events of nodes.
-- `within_s`: how many seconds these go back, up to a day.
WITH newest AS MATERIALIZED (
       SELECT worker_id, event_type, created_at FROM workflow_node_events ORDER BY id DESC LIMIT %(most)s)
SELECT n.worker_id, count(*) AS loads,
       (SELECT least(86400, {age_s(min(created_at))}) FROM newest) AS within_s
  FROM newest n
 WHERE n.event_type = 'model_load_done' AND n.worker_id = ANY (%(workers)s::text[])
   AND n.created_at > now() - interval '1 day'
 GROUP BY n.worker_id;

-- name: last_runs many
-- Return the last runs of a workflow, the oldest first, each with how long it took, or has taken so far. Each also has
-- figures of them all: the median and the 95th percentile of the completed runs, the longest of the ended runs, NULL
-- without any, and how many failed.
WITH last AS (
       SELECT id, status, created_at, started_at, finished_at,
              extract(epoch FROM coalesce(finished_at, now()))::float8 - extract(epoch FROM started_at)::float8 AS elapsed_s
         FROM workflow_runs
        WHERE workflow_name BETWEEN %(workflow)s AND %(workflow)s  -- so that only one index has this order
        ORDER BY workflow_name DESC, created_at DESC
        LIMIT %(limit)s)
SELECT last.*, f.p50_s, f.p95_s, f.longest_s, f.failures
  FROM last
 CROSS JOIN (
       SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY elapsed_s) FILTER (WHERE status = 'completed') AS p50_s,
              percentile_cont(0.95) WITHIN GROUP (ORDER BY elapsed_s) FILTER (WHERE status = 'completed') AS p95_s,
              max(elapsed_s) FILTER (WHERE finished_at IS NOT NULL) AS longest_s,
              count(*) FILTER (WHERE status = 'failed') AS failures
         FROM last) f
 ORDER BY last.created_at;

-- name: nodes_of_runs many
-- Return the nodes of these runs that fail most, then the slowest, items of a map as one. It reads `most`
-- nodes of each run.
SELECT n.name, count(*) AS nodes, count(*) FILTER (WHERE n.status = 'failed') AS failed,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY n.seconds)::float8 AS p50_s,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY n.seconds)::float8 AS p95_s
  FROM unnest(%(ids)s::text[]) AS i (id)
 CROSS JOIN LATERAL (
       SELECT regexp_replace(node_id, '\[[^]]*\]', '[]', 'g') AS name, status::text, seconds
         FROM workflow_node_jobs WHERE run_id = i.id LIMIT %(most)s) n
 GROUP BY n.name
 ORDER BY failed DESC, p95_s DESC NULLS LAST, n.name
 LIMIT %(limit)s;

-- name: runs_to_change many
-- Return these runs in their order, each with how many of its nodes wait, wait for a child run, and run, up to `most`.
SELECT r.id, r.workflow_name, r.status, n.waiting, n.children, n.running
  FROM unnest(%(ids)s::text[]) WITH ORDINALITY AS i (id, place)
 CROSS JOIN LATERAL (SELECT id, workflow_name, status FROM workflow_runs WHERE id = i.id LIMIT 1) r
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE j.status <> 'running' AND j.child_run_id IS NULL) AS waiting,
              count(*) FILTER (WHERE j.status <> 'running' AND j.child_run_id IS NOT NULL) AS children,
              count(*) FILTER (WHERE j.status = 'running') AS running
         FROM (SELECT status::text, child_run_id FROM workflow_node_jobs
                WHERE run_id = i.id AND status IN ('queued', 'running', 'awaiting_input')
                LIMIT %(most)s) j) n
 ORDER BY i.place;

-- name: node_jobs many unprepared
-- Return nodes that are queued or running, of either status, in the order of the claim, after this `priority` and `seq`, or
-- from the first if NULL. A filter that is NULL matches every node. No plan is kept. The conditions are those of indexes,
-- which have no other nodes.
SELECT id, run_id, node_id, node_module, queue, status, priority, seq, created_at, started_at, claimed_by AS host_label
  FROM workflow_node_jobs
 WHERE status = %(status)s
   AND (status = 'queued' AND blocked_reason IS NULL
        OR status = 'queued' AND blocked_reason IS NOT NULL
        OR status = 'running')
   AND (%(queue)s::text IS NULL OR queue = %(queue)s)
   AND (%(task)s::text IS NULL OR node_module = %(task)s)
   AND (%(key)s::text IS NULL OR lock_key = %(key)s)
   AND (%(seq)s::bigint IS NULL OR (priority, seq) > (%(priority)s::integer, %(seq)s::bigint))
 ORDER BY priority, seq
 LIMIT %(limit)s;

-- name: task_jobs many unprepared
-- Return the ingest jobs that fit the filters, the newest first, after the job with the `seq` `before`, or from the first
-- if NULL. `most` jobs are examined. If these are not enough, the last row is the one at the `place` `most`, which is in
-- the list only if it `fits`. A filter that is NULL matches every job.
SELECT e.fits, e.place, e.seq, e.id, e.task_name, e.queue::text, e.status::text, e.attempts, e.max_attempts,
       e.blocked_reason, e.lock_key, e.partition_key, e.idempotency_key, left(e.error, 1000) AS error, e.seconds,
       e.created_at, queue_workflows_is_lost(e.status, e.lease_expires_at) AS lost
  FROM (SELECT j.*, row_number() OVER (ORDER BY j.seq DESC) AS place,
               (j.status = ANY (%(statuses)s::text[]) AND (%(queue)s::text IS NULL OR j.queue = %(queue)s)
                AND (%(task)s::text IS NULL OR j.task_name = %(task)s)
                AND (%(key)s::text IS NULL OR %(key)s IN (j.idempotency_key, j.lock_key, j.partition_key))
               ) IS TRUE AS fits
          FROM (SELECT * FROM ingest_jobs
                 WHERE %(before)s::bigint IS NULL OR seq < %(before)s
                 ORDER BY seq DESC LIMIT %(most)s) j) e
 WHERE e.fits OR e.place = %(most)s
 ORDER BY e.seq DESC
 LIMIT %(limit)s;

-- name: named one
-- Return the jobs' use of this text: the `id` of the ingest job with this idempotency key. Else the `field` (`task` or
-- `key`) in which a running node or any of the newest `most` ingest jobs has it. Returns no row if there is none.
SELECT 1 AS rank, id, 'key' AS field
  FROM ingest_jobs
 WHERE idempotency_key = %(text)s::text AND NOT idempotency_released
UNION ALL
SELECT 2, NULL, CASE WHEN j.task_name = %(text)s THEN 'task' ELSE 'key' END
  FROM (SELECT task_name, idempotency_key, lock_key, partition_key
          FROM ingest_jobs
         ORDER BY seq DESC LIMIT %(most)s) j
 WHERE %(text)s IN (j.task_name, j.idempotency_key, j.lock_key, j.partition_key)
UNION ALL
SELECT 3, NULL, CASE WHEN node_module = %(text)s THEN 'task' ELSE 'key' END
  FROM workflow_node_jobs
 WHERE status = 'running' AND %(text)s IN (node_module, lock_key)
 ORDER BY rank, field DESC
 LIMIT 1;

-- name: fires many
-- Return the last instants for which a schedule of this name has fired, each with its job or run and the status of
-- that; NULL if there is none, or none any more.
SELECT f.fire_at, f.job_id, f.run_id, f.skipped, coalesce(j.status::text, r.status::text) AS status
  FROM (SELECT fire_at, job_id, run_id, skipped FROM schedule_fires
         WHERE name = %(name)s
         ORDER BY fire_at DESC LIMIT %(limit)s) f
  LEFT JOIN ingest_jobs j ON j.id = f.job_id
  LEFT JOIN workflow_runs r ON r.id = f.run_id
 ORDER BY f.fire_at DESC;

-- name: tables many
-- Return the largest tables of the schema: rows and dead rows as the statistics count them, and bytes with indexes.
SELECT s.relname::text AS name, s.n_live_tup AS live, s.n_dead_tup AS dead,
       coalesce(pg_total_relation_size(s.relid), 0) AS bytes,
       greatest(s.last_vacuum, s.last_autovacuum) AS vacuumed_at
  FROM pg_stat_user_tables s
 WHERE s.schemaname = current_schema()
 ORDER BY bytes DESC, s.relname
 LIMIT %(limit)s;
