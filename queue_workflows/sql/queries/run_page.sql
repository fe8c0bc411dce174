-- Read one run for its page of the dashboard: few rows, few columns, and values only up to a size.

-- name: head one
-- Return a run with its output, its schedule and its first child runs, and the number of nodes of its graph. Values over
-- `most` bytes are NULL. Returns no row if the run does not exist.
SELECT r.id, r.workflow_name, r.status::text, left(r.error, 4000) AS error, r.out_dir, r.created_at, r.queued_at,
       r.finished_at, r.available_at, r.parent_run_id, r.parent_node_id, r.definition_hash, now() AS read_at, left(r.headers ->> 'again_of', 1000) AS again_of,
       CASE WHEN jsonb_typeof(r.definition -> 'nodes') = 'array' THEN jsonb_array_length(r.definition -> 'nodes')
            ELSE 0 END AS graph_nodes,
       {small(r.context)} AS context,
       (SELECT jsonb_build_object('bytes', pg_column_size(o.context_delta), 'value', {small(o.context_delta)})
          FROM workflow_node_jobs o
         WHERE o.run_id = r.id AND o.node_id = '__output__' AND o.status = 'completed') AS output,
       (SELECT f.name FROM schedule_fires f WHERE f.run_id = r.id LIMIT 1) AS schedule,
       (SELECT jsonb_agg(to_jsonb(c)) FROM (
               SELECT w.id, w.status::text, w.parent_node_id FROM workflow_runs w
                WHERE w.parent_run_id = r.id ORDER BY w.created_at LIMIT 21) c) AS children
  FROM workflow_runs r WHERE r.id = %(run_id)s LIMIT 1;

-- name: steps many unprepared
-- Count the nodes of a run by status, for each step in the order of their start: the node id up to its first slash or
-- bracket. The first row counts all of them and has no step; a run without nodes has no row. `of_items`: how many belong
-- to items of maps. `finished_at` is NULL while a node has not ended, and `elapsed_s` grows.
SELECT step, json_object_agg(status, n ORDER BY status) AS counts, sum(items)::bigint AS of_items,
       min(first_start) AS started_at,
       CASE WHEN bool_and(are_over) THEN max(last_end) END AS finished_at,
       extract(epoch FROM CASE WHEN bool_and(are_over) THEN max(last_end) ELSE now() END)::float8
       - extract(epoch FROM min(first_start))::float8 AS elapsed_s
  FROM (SELECT step, status, sum(n)::bigint AS n, sum(items) AS items, bool_and(are_over) AS are_over,
               max(last_end) AS last_end, min(first_start) AS first_start
          FROM (SELECT split_part(split_part(node_id, '/', 1), '[', 1) AS step, status::text, count(*) AS n,
                       count(*) FILTER (WHERE strpos(node_id, '[') > 0) AS items,
                       bool_and(finished_at IS NOT NULL) AS are_over, max(finished_at) AS last_end,
                       min(started_at) AS first_start
                  FROM workflow_node_jobs WHERE run_id = %(run_id)s GROUP BY 1, 2) s
         GROUP BY GROUPING SETS ((1, 2), (2))) c
 GROUP BY step ORDER BY step IS NOT NULL, min(first_start), step LIMIT %(limit)s;

-- name: nodes many unprepared
-- Return the first nodes of a run without their values, in the order of their start. `active`: only nodes that run, wait
-- for an answer or failed.
SELECT node_id, queue::text, status::text, required_model, claim_no, attempts AS attempts_failed, max_attempts,
       claimed_by, worker_id, blocked_reason, child_run_id, left(error, 300) AS error, seconds, created_at, started_at,
       finished_at, now() AS read_at
  FROM workflow_node_jobs
 WHERE run_id = %(run_id)s
   AND (NOT %(active)s::boolean OR status IN ('running', 'awaiting_input', 'failed'))
 ORDER BY started_at NULLS LAST, seq LIMIT %(limit)s;

-- name: events many unprepared
-- Return the last events that begin and end the attempts of these nodes, or of all if NULL, the newest first. With a
-- `claim` they have their errors and details, and the traceback of this claim.
SELECT node_id, event_type::text, claim_no, worker_id, host_label, elapsed_s, created_at,
       CASE WHEN %(claim)s::bigint IS NOT NULL THEN left(error, 1000) END AS error,
       CASE WHEN %(claim)s::bigint IS NULL THEN NULL
            WHEN event_type = 'death' AND pg_column_size(detail) <= 4000 THEN detail
            ELSE jsonb_build_object('used', detail -> 'used', 'traceback',
                 CASE WHEN claim_no = %(claim)s::bigint THEN detail ->> 'traceback' END) END AS detail
  FROM {of_nodes(workflow_node_events)} e
 WHERE event_type IN ('claimed', 'completed', 'failed', 'cancelled', 'parked', 'retried', 'requeued', 'reclaimed',
                      'model_load_done', 'budget_trip', 'stall_trip', 'gpu_health_trip', 'death')
 ORDER BY created_at DESC, id DESC LIMIT %(limit)s;

-- name: node one
-- Return one node with its values up to `most` bytes, their sizes as stored, and the last parts that it has streamed.
-- Returns no row if it is not queued yet.
SELECT id, node_id, node_module, queue::text, status::text, required_model, claim_no, attempts AS attempts_failed,
       max_attempts, claimed_by, worker_id, blocked_reason, child_run_id, seconds, left(error, 8000) AS error, created_at,
       started_at, finished_at, now() AS read_at,
       {small(coalesce(resolved_inputs, inputs))} AS inputs,
       {small(context_delta)} AS output,
       {small(input_spec)} AS input_spec,
       pg_column_size(coalesce(resolved_inputs, inputs)) AS inputs_bytes, pg_column_size(context_delta) AS output_bytes,
       (SELECT count(*) FROM (SELECT FROM job_steps s WHERE s.job_table = 'workflow_node_jobs' AND s.job_id = n.id
                               LIMIT 1000) c) AS steps,
       (SELECT jsonb_agg(to_jsonb(p)) FROM (
               SELECT s.claim_no, s.seq, s.name, octet_length(s.part::text) AS bytes,
                      CASE WHEN octet_length(s.part::text) <= 4096 THEN s.part END AS part
                 FROM job_parts s WHERE s.job_table = 'workflow_node_jobs' AND s.job_id = n.id
                ORDER BY s.claim_no DESC, s.seq DESC LIMIT 20) p) AS streamed
  FROM workflow_node_jobs n WHERE run_id = %(run_id)s AND node_id = %(node)s LIMIT 1;

-- name: log one
-- Return the log of an attempt of a node. Returns no row if nothing is stored.
SELECT head, tail, cut_bytes, updated_at FROM job_attempt_logs
 WHERE job_table = 'workflow_node_jobs' AND claim_no = %(claim)s
   AND job_id = (SELECT id FROM workflow_node_jobs WHERE run_id = %(run_id)s AND node_id = %(node)s) LIMIT 1;

-- name: job_steps many
-- Return the first steps of a node's job, in the order in which they began first, without their values.
SELECT name, key, state, left(error, 300) AS error, attempts, ended_at
  FROM job_steps WHERE job_table = 'workflow_node_jobs' AND job_id = %(job)s ORDER BY id LIMIT %(limit)s;

-- name: map one
-- Return the counters of a map. Returns no row if it was not opened yet.
SELECT m.node_id, m.total, m.done_items AS done, m.failed_items AS failed, m.open_items AS open, m.next_position,
       m.may_fail, m.at_once
  FROM workflow_run_maps m WHERE m.run_id = %(run_id)s AND m.node_id = %(map)s LIMIT 1;

-- name: buckets many
-- Return the worst state of the items in each of so many `buckets` of a map, by position: 0 done, 1 waiting, 2 open,
-- 3 failed. It reads the items once.
SELECT least(i.position::bigint * %(buckets)s::integer / %(total)s::integer, %(buckets)s::integer - 1) AS bucket,
       max(CASE i.state WHEN 'done' THEN 0 WHEN 'failed' THEN 3
                        ELSE CASE WHEN i.position < %(opened)s::integer THEN 2 ELSE 1 END END) AS state
  FROM workflow_map_items i
 WHERE i.run_id = %(run_id)s AND i.map_id = %(map)s AND i.position >= 0
 GROUP BY 1 LIMIT %(buckets)s;

-- name: groups many
-- Count the first `most` failed items of a map by the beginning of their error with its numbers replaced, the largest
-- group first. `kinds`: how many groups there are.
SELECT signature, count(*) AS n, count(*) OVER () AS kinds
  FROM (SELECT {error_signature(i.error)} AS signature
          FROM workflow_map_items i
         WHERE i.run_id = %(run_id)s AND i.map_id = %(map)s AND i.position >= 0 AND i.state = 'failed'
         ORDER BY i.position LIMIT %(most)s) f
 GROUP BY signature ORDER BY n DESC, signature LIMIT %(limit)s;

-- name: items many
-- Return items of a map from a position on, in the order of the source. A filter that is NULL matches every item.
-- `state`: done, failed, open or waiting. `text`: a part of the key.
SELECT i.position, i.key, left(i.error, 500) AS error,
       CASE WHEN i.state <> 'waiting' THEN i.state::text WHEN i.position < %(opened)s::integer THEN 'open'
            ELSE 'waiting' END AS state
  FROM workflow_map_items i
 WHERE i.run_id = %(run_id)s AND i.map_id = %(map)s AND i.position >= %(start)s::integer
   AND (%(state)s::text IS NULL OR %(state)s::text IN ('done', 'failed') AND i.state = %(state)s::text
        OR %(state)s::text = 'open' AND i.state = 'waiting' AND i.position < %(opened)s::integer
        OR %(state)s::text = 'waiting' AND i.state = 'waiting' AND i.position >= %(opened)s::integer)
   AND (%(text)s::text IS NULL OR strpos(i.key, %(text)s::text) > 0)
   AND (%(signature)s::text IS NULL OR {error_signature(i.error)} = %(signature)s::text)
 ORDER BY i.position LIMIT %(limit)s;

-- name: item one
-- Return an item of a map with its value up to `most` bytes. Returns no row if there is none with this key.
SELECT i.position, i.key, left(i.error, 8000) AS error, pg_column_size(i.item) AS bytes,
       {small(i.item)} AS item,
       CASE WHEN i.state <> 'waiting' THEN i.state::text WHEN i.position < %(opened)s::integer THEN 'open'
            ELSE 'waiting' END AS state
  FROM workflow_map_items i WHERE i.run_id = %(run_id)s AND i.map_id = %(map)s AND i.key = %(key)s LIMIT 1;

-- name: value value
-- Return one whole value, `inputs` or `output`, of a node, or of the run if `node` is NULL.
SELECT CASE WHEN %(node)s::text IS NULL AND %(name)s::text = 'inputs'
            THEN (SELECT context FROM workflow_runs WHERE id = %(run_id)s)
            ELSE (SELECT CASE WHEN %(name)s::text = 'inputs' THEN coalesce(resolved_inputs, inputs) ELSE context_delta END
                    FROM workflow_node_jobs
                   WHERE run_id = %(run_id)s AND node_id = coalesce(%(node)s::text, '__output__')) END AS value LIMIT 1;
