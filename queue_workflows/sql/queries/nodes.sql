-- Insert and read the jobs of nodes, and the context of a run.

-- name: enqueue one
-- Queue one node of a run, in the generation of the run, and return the id of its job. Returns no
-- row if the run does not exist, or the run has such a node.
INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue, required_model, inputs,
                                priority, pipeline_name, generation)
SELECT r.id, %(node_id)s, %(node_module)s, %(queue)s, %(required_model)s, %(inputs)s::jsonb,
       %(priority)s::smallint, %(pipeline_name)s, r.generation
  FROM workflow_runs r WHERE r.id = %(run_id)s
    ON CONFLICT (run_id, node_id) DO NOTHING
RETURNING id;

-- name: same_node one
-- Return the id of a node's job, and whether it was queued with this content. Returns no row if the
-- run has no such node.
SELECT id, (node_module, queue, required_model, inputs, pipeline_name) IS NOT DISTINCT FROM
           (%(node_module)s, %(queue)s, %(required_model)s, %(inputs)s::jsonb, %(pipeline_name)s)
           AND input_template IS NULL AND status <> 'skipped' AS is_same
  FROM workflow_node_jobs WHERE run_id = %(run_id)s AND node_id = %(node_id)s;

-- name: insert_planned value prepared
-- Insert the rows of a plan, a JSON array of objects, and return how many are new or opened again.
-- A node that has a row keeps it, unless it failed or was cancelled in an earlier generation.
SELECT queue_workflows_insert_nodes(%(run_id)s::text, %(nodes)s::jsonb) AS n;

-- name: get one
-- Return a node job. Returns no row if the job does not exist.
SELECT * FROM workflow_node_jobs WHERE id = %(job)s;

-- name: get_by_node one
-- Return the job of a node. Returns no row if the run has no such node yet.
SELECT * FROM workflow_node_jobs WHERE run_id = %(run_id)s AND node_id = %(node_id)s;

-- name: of_run many
-- Return all jobs of a run, the oldest first.
SELECT * FROM workflow_node_jobs WHERE run_id = %(run_id)s ORDER BY created_at, seq;

-- name: among column prepared
-- Of these nodes, return the ones whose job has such a status. LIMIT 1 makes PostgreSQL look up each
-- node by itself. Without statistics, PostgreSQL 15 would read all rows of the run instead.
SELECT j.node_id
  FROM unnest(%(nodes)s::text[]) AS n (id)
 CROSS JOIN LATERAL (SELECT node_id, status FROM workflow_node_jobs
                      WHERE run_id = %(run_id)s AND node_id = n.id LIMIT 1) j
 WHERE j.status = ANY (%(statuses)s::text[]);

-- name: all_done column prepared
-- Return every completed or skipped node of a run.
SELECT node_id FROM workflow_node_jobs
 WHERE run_id = %(run_id)s AND status IN ('completed', 'skipped');

-- name: context one
-- Return a run's context with the `context_delta` of each completed node under the node's id, and
-- the JSON type of the context. An empty delta does not replace the context's own member. `heads`
-- names the members to return, by a look-up per node; NULL stands for all. The context is NULL if
-- it is not an object, and if its `size` in bytes, as a jsonb, is more than `most`.
SELECT kind, pg_column_size(context) AS size,
       CASE WHEN pg_column_size(context) <= %(most)s::bigint THEN context END AS context
  FROM (
SELECT jsonb_typeof(r.context) AS kind,
       CASE jsonb_typeof(r.context) WHEN 'object' THEN
           coalesce(outputs.empty, '{}')
           || coalesce((SELECT jsonb_object_agg(key, value) FROM jsonb_each(r.context)
                         WHERE %(heads)s::text[] IS NULL OR key = ANY (%(heads)s::text[])), '{}')
           || coalesce(outputs.filled, '{}')
       END AS context
  FROM workflow_runs r
 CROSS JOIN LATERAL (
       SELECT jsonb_object_agg(j.node_id, j.context_delta)
                  FILTER (WHERE j.context_delta = '{}') AS empty,
              jsonb_object_agg(j.node_id, j.context_delta)
                  FILTER (WHERE j.context_delta <> '{}') AS filled
         FROM (SELECT node_id, context_delta FROM workflow_node_jobs
                WHERE %(heads)s::text[] IS NULL AND run_id = r.id AND status = 'completed'
                UNION ALL
               SELECT n.node_id, n.context_delta
                 FROM unnest(%(heads)s::text[]) AS h (id)
                CROSS JOIN LATERAL (SELECT node_id, status, context_delta FROM workflow_node_jobs
                                     WHERE run_id = r.id AND node_id = h.id LIMIT 1) n
                WHERE n.status = 'completed') j) outputs
 WHERE r.id = %(run_id)s OFFSET 0) found;

-- name: set_resolved_inputs one
-- Store the inputs that a node received and return its row.
UPDATE workflow_node_jobs SET resolved_inputs = %(inputs)s::jsonb WHERE id = %(job)s
RETURNING *;

-- name: set_input_spec one
-- Store the question of an input node and return its row.
UPDATE workflow_node_jobs SET input_spec = %(spec)s::jsonb WHERE id = %(job)s RETURNING *;
