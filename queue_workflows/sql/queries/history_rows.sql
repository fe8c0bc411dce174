-- Read a run or a job with its events, for the module history and for commands.

-- name: run one
-- Return a run without its definition and context, the time of this read, and the seconds since it was queued. Returns
-- no row if the run does not exist.
SELECT id, workflow_name, status::text, error, out_dir, priority, generation, revision, upgrades, created_at,
       queued_at, started_at, finished_at, parent_run_id, parent_node_id, now() AS read_at,
       extract(epoch FROM coalesce(finished_at, now()))::float8
       - extract(epoch FROM queued_at)::float8 AS elapsed_s
  FROM workflow_runs WHERE id = %(run_id)s;

-- name: nodes many unprepared
-- Return the jobs of a run's nodes in the order in which they were queued; only `nodes`, unless it is NULL.
SELECT {shown_node()}
  FROM {of_nodes(workflow_node_jobs)} n
 ORDER BY seq;

-- name: node one
-- Return one node job, with the columns of `nodes`.
SELECT {shown_node()}
  FROM workflow_node_jobs WHERE id = %(job)s;

-- name: ingest_job one
-- Return one ingest job.
SELECT {shown_job()}, task_name, reason, args AS inputs, result AS output, lock_key,
       partition_key, idempotency_key, headers, timeout_s
  FROM ingest_jobs WHERE id = %(job)s;

-- name: node_events many unprepared
-- Return the events of a run's nodes, the oldest first; only of `nodes`, unless it is NULL.
SELECT node_id, id, job_id, attempt, event_type::text, claim_no, worker_id, host_label, elapsed_s,
       error, detail, created_at
  FROM {of_nodes(workflow_node_events)} e
 ORDER BY created_at, id;

-- name: ingest_events many
-- Return the events of an ingest job, the oldest first, each with its actor.
SELECT id, job_id, attempt, event_type::text, claim_no, worker_id, host_label, elapsed_s, error,
       detail, created_at, actor
  FROM ingest_job_events WHERE job_id = %(job)s ORDER BY created_at, id;

-- name: node_totals row unprepared
-- Return how many nodes of a run have each status, as the object `counts`, and how many belong to items of maps. No plan
-- is kept, as above.
SELECT coalesce(json_object_agg(status, n ORDER BY status), '{}') AS counts, coalesce(sum(items), 0)::bigint AS of_items
  FROM (SELECT status::text, count(*) AS n, count(*) FILTER (WHERE strpos(node_id, '[') > 0) AS items
          FROM workflow_node_jobs WHERE run_id = %(run_id)s GROUP BY 1) c;

-- name: active_nodes column
-- Return the ids of a run's nodes that run, wait for an answer or failed, the first to be queued
-- first.
SELECT node_id FROM workflow_node_jobs
 WHERE run_id = %(run_id)s AND status IN ('running', 'awaiting_input', 'failed')
 ORDER BY seq LIMIT %(limit)s;

-- name: node_states many prepared
-- Return the state and the error of the nodes of a run with these ids that have a row, by a look-up per node.
SELECT j.node_id, j.status, j.error
  FROM unnest(%(nodes)s::text[]) AS n (id)
 CROSS JOIN LATERAL (SELECT node_id, status, error FROM workflow_node_jobs
                      WHERE run_id = %(run_id)s AND node_id = n.id LIMIT 1) j;

-- name: further_node_ids column
-- Return the ids of a run's queued nodes after `after`, in their order, without the ids `but`. It
-- searches for one node at a time: with statistics from before the run, a search for several nodes
-- would read all later ones.
WITH RECURSIVE behind (n, name) AS (
    SELECT 0, %(after)s::text
    UNION ALL
    SELECT n + 1, (SELECT j.node_id FROM workflow_node_jobs j
                    WHERE j.run_id = %(run_id)s AND j.node_id > b.name AND j.node_id <> ALL (%(but)s::text[])
                    ORDER BY j.node_id LIMIT 1)
      FROM behind b WHERE b.name IS NOT NULL AND b.n < %(limit)s)
SELECT name FROM behind WHERE n > 0 AND name IS NOT NULL ORDER BY n;

-- name: ids_in_range many
-- Return runs and jobs whose id is in a range and starts so, at most `limit` of each kind.
(SELECT 'run' AS kind, id FROM workflow_runs
  WHERE id BETWEEN %(low)s AND %(high)s AND starts_with(id, %(prefix)s)
  ORDER BY id LIMIT %(limit)s)
UNION ALL
(SELECT 'node job', id FROM workflow_node_jobs
  WHERE id BETWEEN %(low)s AND %(high)s AND starts_with(id, %(prefix)s)
  ORDER BY id LIMIT %(limit)s)
UNION ALL
(SELECT 'ingest job', id FROM ingest_jobs
  WHERE id BETWEEN %(low)s AND %(high)s AND starts_with(id, %(prefix)s)
  ORDER BY id LIMIT %(limit)s);

-- name: feed many
-- Return the time of the database with each event of a job, and with the state of each run that may have changed. The
-- events of both kinds of jobs from `since` on (if NULL, of the last `late_s` seconds) come in the order of their
-- transactions' start, after the event with this place (`at`, `kind`, `id`; if NULL, from the first). The runs are of
-- these events, in `runs`, or queued since then; a row of a run has the `kind` run and no `id`. At most `most` runs come,
-- the newest of all, the oldest of these first. Without events and runs there is one row, which has the time alone.
WITH found AS MATERIALIZED (
    SELECT * FROM (
        SELECT 'ingest' AS kind, id, job_id, NULL::text AS run_id, NULL::text AS node_id,
               event_type::text, attempt::integer, claim_no, queue::text, worker_id, elapsed_s,
               left(error, 1000) AS error, actor, created_at
          FROM ingest_job_events WHERE created_at >= {feed_from()}
        UNION ALL
        SELECT 'node', id, job_id, run_id, node_id, event_type::text, attempt::integer, claim_no,
               queue::text, worker_id, elapsed_s, left(error, 1000), NULL, created_at
          FROM workflow_node_events WHERE created_at >= {feed_from()}) e
     WHERE %(at)s::timestamptz IS NULL
        OR (e.created_at, e.kind, e.id) > (%(at)s::timestamptz, %(kind)s::text, %(id)s::bigint)
     ORDER BY e.created_at, e.kind, e.id LIMIT %(limit)s),
states AS MATERIALIZED (
    SELECT r.*
      FROM (SELECT unnest(%(runs)s::text[]) AS id
            UNION SELECT run_id FROM found WHERE run_id IS NOT NULL
            UNION SELECT queue_workflows_runs_queued_since({feed_from()})) w
     CROSS JOIN LATERAL (
           SELECT id, workflow_name, status::text, generation, left(error, 1000) AS error, progress_pct, created_at,
                  queued_at, started_at, finished_at
             FROM workflow_runs WHERE id = w.id OFFSET 0) r
     ORDER BY r.created_at DESC LIMIT %(most)s)
SELECT now() AS now, f.*
  FROM (SELECT 1) one
  LEFT JOIN (
       SELECT e.*, NULL::text AS workflow_name, NULL::text AS status, NULL::integer AS generation,
              NULL::real AS progress_pct, NULL::timestamptz AS queued_at, NULL::timestamptz AS started_at,
              NULL::timestamptz AS finished_at
         FROM found e
       UNION ALL
       SELECT 'run', NULL, NULL, s.id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, s.error, NULL, s.created_at,
              s.workflow_name, s.status, s.generation, s.progress_pct, s.queued_at, s.started_at, s.finished_at
         FROM states s) f ON true
 ORDER BY f.kind = 'run', f.created_at, f.kind, f.id;
