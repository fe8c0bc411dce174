-- What commands display: a run while it runs, where its nodes ran, and the whole system in counts.

-- name: nodes many
-- Return the nodes of a run: first those that run, wait for input or failed. With `live_only`, only
-- these and queued nodes with a failed attempt.
SELECT id, node_id, status, queue, required_model, claimed_by, worker_id, progress, input_spec,
       crash_count, lapse_count, attempts, max_attempts, blocked_reason,
       queue_workflows_due_at(available_at, resume_at, resume_until) AS available_at, error, seconds,
       child_run_id, extract(epoch FROM coalesce(finished_at, now()))::float8
       - extract(epoch FROM started_at)::float8 AS elapsed_s
  FROM workflow_node_jobs
 WHERE run_id = %(run)s
   AND (NOT %(live_only)s::boolean OR status IN ('running', 'awaiting_input', 'failed')
        OR status = 'queued' AND attempts > 0)
 ORDER BY status NOT IN ('running', 'awaiting_input', 'failed'), started_at, seq
 LIMIT %(limit)s;

-- name: maps many
-- Return the maps of a run's definition: their items by state, and the nodes of the items.
SELECT node_id, total, done_items AS done, failed_items AS failed, open_items AS open, nodes
  FROM workflow_run_maps
 WHERE run_id = %(run)s AND strpos(node_id, '[') = 0
 ORDER BY node_id;

-- name: nodes_of_item many
-- Return the nodes that the items with a key have, in all maps of a run, with their states.
SELECT node_id, status::text FROM workflow_node_jobs
 WHERE run_id = %(run)s AND strpos(node_id, '[' || %(key)s::text || ']') > 0
 ORDER BY seq;

-- name: items many
-- Return the items with these keys, in all maps of a run. An open item with an error fails once none of its nodes is
-- open. One that had not ended when its map did is cancelled.
SELECT i.map_id, i.key, i.error,
       CASE WHEN i.state <> 'waiting' THEN i.state::text
            WHEN queue_workflows_is_terminal_job(n.status) THEN 'cancelled'
            WHEN i.position < m.next_position THEN 'open'
            ELSE 'waiting' END AS state
  FROM workflow_map_items i
  JOIN workflow_run_maps m ON m.run_id = i.run_id AND m.node_id = i.map_id
  LEFT JOIN workflow_node_jobs n ON n.run_id = i.run_id AND n.node_id = i.map_id
 WHERE i.run_id = %(run)s AND i.key = ANY (%(keys)s::text[]) AND i.position >= 0
 ORDER BY i.map_id, i.position;

-- name: node_seconds many
-- Return how long the handler of each completed node of a run took.
SELECT node_id, coalesce(seconds, 0)::float8 AS seconds
  FROM workflow_node_jobs
 WHERE run_id = %(run)s AND status = 'completed';

-- name: completed_by many
-- Return the workers that completed nodes of a run, and how many each.
SELECT host_label, queue, worker_id, count(*) AS nodes,
       coalesce(sum(elapsed_s), 0)::float8 AS seconds
  FROM workflow_node_events
 WHERE run_id = %(run)s AND event_type = 'completed' AND worker_id IS NOT NULL
 GROUP BY 1, 2, 3
 ORDER BY queue, nodes DESC, worker_id;

-- name: crashes value
-- Count how often a node of a run was taken back from a worker that died. Lapses count until the
-- next recorded end of the node.
SELECT coalesce(sum(crash_count + lapse_count), 0)::bigint AS n FROM workflow_node_jobs WHERE run_id = %(run)s;

-- name: runs_ahead row
-- Count the runs that were submitted before this one, are at least as urgent, and have work to do
-- now. A run that only waits for a person does not count.
SELECT count(*) AS n,
       array_agg(DISTINCT o.workflow_name) AS names,
       (array_agg(o.id ORDER BY o.queued_at, o.id))[1] AS first
  FROM workflow_runs r
  JOIN workflow_runs o
    ON o.queued_at < r.queued_at AND o.priority <= r.priority AND o.mode = 'node'
 WHERE r.id = %(run)s
   AND (o.status = 'queued' AND o.available_at IS NULL
        OR o.status = 'running'
       AND EXISTS (SELECT FROM workflow_node_jobs j
                    WHERE j.run_id = o.id AND j.status IN ('queued', 'running')));

-- name: find one
-- Return the run or job with this id: the run first, or the job first if `jobs_first`. Returns no
-- row if neither exists. Ids are chosen at the insert, so a run and a job may share one.
SELECT CASE WHEN %(jobs_first)s THEN 4 ELSE 1 END AS rank, 'run' AS kind, status::text, id AS run_id,
       workflow_name AS name
  FROM workflow_runs
 WHERE id = %(id)s
UNION ALL
SELECT 2, 'node job', status::text, run_id, node_id
  FROM workflow_node_jobs
 WHERE id = %(id)s
UNION ALL
SELECT 3, 'ingest job', status::text, NULL, task_name
  FROM ingest_jobs
 WHERE id = %(id)s
 ORDER BY rank
 LIMIT 1;

-- name: running_under many
-- Return the running jobs that have this id or belong to the run that has it, with their workers.
SELECT j.id AS job_id, j.node_id AS name, j.queue::text, j.worker_id, j.claimed_by AS host_label,
       w.pid
  FROM workflow_node_jobs j
  LEFT JOIN workers w USING (worker_id)
 WHERE j.status = 'running' AND (j.run_id = %(id)s OR j.id = %(id)s)
UNION ALL
SELECT j.id, j.task_name, j.queue, j.worker_id, j.claimed_by, w.pid
  FROM ingest_jobs j
  LEFT JOIN workers w USING (worker_id)
 WHERE j.status = 'running' AND j.id = %(id)s
 ORDER BY name;

-- name: has_answer value
-- Return whether an answer to a node was submitted and not taken yet.
SELECT EXISTS (
       SELECT FROM workflow_input_submissions
        WHERE run_id = %(run)s AND node_id = %(node)s AND status IN ('pending', 'processing'))
       AS found;

-- name: took_default value
-- Return whether a completed input node took the default of its time-out, not an answer.
SELECT detail ->> 'by' = 'timeout' AS found
  FROM workflow_node_events
 WHERE run_id = %(run)s AND node_id = %(node)s AND event_type = 'completed'
 ORDER BY created_at DESC, id DESC
 LIMIT 1;

-- name: listed_nodes many
-- Return the first nodes of a queue that have this status, in the order of the claim.
SELECT *
  FROM workflow_node_jobs
 WHERE queue = %(queue)s AND status = %(status)s
 ORDER BY priority, seq
 LIMIT %(limit)s;

-- name: live_nodes many
-- Count the nodes that wait or run, by queue and status.
SELECT queue, status, count(*) AS n
  FROM workflow_node_jobs
 WHERE status IN ('queued', 'running', 'awaiting_input')
 GROUP BY queue, status;

-- name: runs_by_status value
-- Return how many runs have each status, as an object.
SELECT coalesce(json_object_agg(status, n ORDER BY status), '{}') AS counts
  FROM (SELECT status::text, count(*) AS n FROM workflow_runs GROUP BY 1) c;

-- name: open_events row
-- Count the outbox events that are not dispatched. Also return the oldest one that is due: for how
-- long it has been due (`lag_s`), its run and its error.
SELECT (SELECT count(*) FROM workflow_dispatch_events WHERE processed_at IS NULL) AS n,
       coalesce(o.lag_s, 0) AS lag_s, o.run_id, o.error
  FROM (SELECT) AS one
  LEFT JOIN ({due_event()}) o ON true;

-- name: answers row
-- Count the answers that are not taken yet, and the nodes of running runs that wait for one.
SELECT (SELECT count(*) FROM workflow_input_submissions WHERE status IN ('pending', 'processing')) AS answers,
       (SELECT count(*) {asking()}) AS awaiting_input;

-- name: late_runs many
-- Return at most 50 runs that could start and have waited for `patience_s`, in the order of their
-- start, each with its wait, and whether others were started within the last minute.
{late_runs()};

-- name: foreign_work many
-- Count the unfinished runs of other workflows, and the unfinished ingest jobs of other tasks.
SELECT 'run' AS kind, workflow_name AS name, count(*) AS n
  FROM workflow_runs
 WHERE status IN ('queued', 'running') AND mode = 'node'
   AND workflow_name <> ALL (%(workflows)s::text[])
 GROUP BY 2
UNION ALL
SELECT 'ingest job', task_name, count(*)
  FROM ingest_jobs
 WHERE status IN ('queued', 'running') AND task_name <> ALL (%(tasks)s::text[])
 GROUP BY 2
 ORDER BY 1, 2;

-- name: unfinished many
-- Return the workflows that have unfinished runs, with the three oldest runs of each. The workflow
-- with the oldest run comes first.
SELECT workflow_name AS name, count(*) AS n, (array_agg(id ORDER BY queued_at, id))[1:3] AS ids
  FROM workflow_runs
 WHERE status IN ('queued', 'running') AND mode = 'node'
 GROUP BY 1
 ORDER BY min(queued_at), 1;
