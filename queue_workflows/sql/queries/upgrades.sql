-- Move a run to another definition.

-- name: hold_queued column
-- Lock the queued nodes of a run and return their ids, without those that another transaction has
-- locked: a worker claims or changes them.
SELECT node_id FROM workflow_node_jobs
 WHERE run_id = %(run_id)s AND status = 'queued' FOR NO KEY UPDATE SKIP LOCKED;

-- name: nodes many
-- Return the nodes of a run, in the order of the queue.
SELECT node_id, status::text, generation, node_module = '__map__' AS is_map
  FROM workflow_node_jobs
 WHERE run_id = %(run_id)s
 ORDER BY seq;

-- name: set_versions none
-- Set the version of queued nodes of a run.
UPDATE workflow_node_jobs j
   SET required_version = given.version
  FROM unnest(%(nodes)s::text[], %(versions)s::text[]) AS given (node_id, version)
 WHERE j.run_id = %(run_id)s AND j.node_id = given.node_id AND j.status = 'queued';

-- name: drop_nodes none
-- Delete nodes of a run that are queued, failed or cancelled.
DELETE FROM workflow_node_jobs
 WHERE run_id = %(run_id)s AND node_id = ANY (%(nodes)s::text[])
   AND status IN ('queued', 'failed', 'cancelled');

-- name: move one
-- Store another definition of a run that is not over, queue the run, so that its start queues what
-- is ready, and record who did it, with `change`. The last 20 moves are kept. Returns no row if the
-- run has ended.
UPDATE workflow_runs
   SET definition = %(definition)s::jsonb, definition_hash = %(digest)s,
       revision = least(revision, 999999999) + 1,
       upgrades = CASE WHEN jsonb_typeof(upgrades) <> 'array' THEN '[]'
                       WHEN jsonb_array_length(upgrades) >= 20 THEN upgrades - 0
                       ELSE upgrades END
                  || jsonb_build_array(jsonb_build_object(
                         'at', now(), 'actor', queue_workflows_actor()) || %(change)s::jsonb),
       status = 'queued', queued_at = now(), start_attempts = 0, available_at = NULL, error = NULL,
       updated_at = now()
 WHERE id = %(run_id)s AND NOT queue_workflows_is_terminal_run(status)
RETURNING *;
