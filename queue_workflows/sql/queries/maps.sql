-- Maps: the items of a list, each with nodes of its own. All statements run under the lock on the run's row.

-- name: open_map value
-- Seal the items of a map. Return `sealed`, `again` (an earlier generation of the run sealed them;
-- they are counted again) or `open` (this generation opened the map before). `items`: a JSON array
-- of objects with `key` and `item`. `nodes`: how many nodes the items have. `root`: the map of the
-- definition around it.
SELECT queue_workflows_open_map(
           %(run_id)s::text, %(map)s::text, %(items)s::jsonb, %(at_once)s::integer, %(refill)s::integer,
           %(may_fail)s::integer, %(nodes)s::integer, %(root)s::text) AS done;

-- name: step value prepared
-- Count items that have ended and open the next ones; return the counters and the opened items.
SELECT queue_workflows_step_map(
           %(run_id)s::text, %(map)s::text, %(done)s::text[], %(failed)s::jsonb) AS step;

-- name: close none
-- Let the last opened items wait to be opened again, from this key on.
UPDATE workflow_run_maps m
   SET open_items = m.open_items - %(count)s::integer,
       next_position = (SELECT i.position FROM workflow_map_items i
                         WHERE i.run_id = m.run_id AND i.map_id = m.node_id AND i.key = %(key)s::text)
 WHERE m.run_id = %(run_id)s AND m.node_id = %(map)s;

-- name: complete value
-- Complete the node of a map; return the size of its output in bytes. Nothing is written past `limit`.
-- `result`, `path`: see `graph.Map`.
SELECT queue_workflows_end_map(
           %(run_id)s::text, %(map)s::text, %(result)s::text, %(path)s::text[], %(limit)s::bigint) AS size;

-- name: fail none
-- Fail the node of a map, if it is open.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'failed', error = %(error)s, finished_at = now(), blocked_reason = NULL
     WHERE j.run_id = %(run_id)s AND j.node_id = %(map)s AND j.status = 'queued'
    RETURNING queue_workflows_record(j, 'failed') AS job)
SELECT (job).id FROM done;

-- name: nodes value
-- Return how many nodes the items of these maps have, including the nodes of the maps inside the items.
SELECT coalesce(sum(nodes), 0)::bigint AS n FROM workflow_run_maps
 WHERE run_id = %(run_id)s AND node_id = ANY (%(maps)s::text[]);

-- name: generation value prepared
-- Return the generation in which a map was opened last. Returns no row if it was not opened.
SELECT generation FROM workflow_run_maps WHERE run_id = %(run_id)s AND node_id = %(map)s;

-- name: opened many
-- Return the items of a map that were opened and have not ended.
SELECT i.key, i.item, i.error
  FROM workflow_run_maps m
  JOIN workflow_map_items i ON i.run_id = m.run_id AND i.map_id = m.node_id
 WHERE m.run_id = %(run_id)s AND m.node_id = %(map)s
   AND i.position >= 0 AND i.position < m.next_position AND i.state = 'waiting'
 ORDER BY i.position;

-- name: items many prepared
-- Return the items of a map with these keys. LIMIT 1 forces one look-up per key; a join may read the whole map.
SELECT i.key, i.item, i.error
  FROM unnest(%(keys)s::text[]) AS k (key)
 CROSS JOIN LATERAL (SELECT key, item, error FROM workflow_map_items
                      WHERE run_id = %(run_id)s AND map_id = %(map)s AND key = k.key LIMIT 1) i;

-- name: keys_like many
-- Return keys of a map, or of all maps of a run, that are about as long as `key`, for a hint.
SELECT key FROM workflow_map_items
 WHERE run_id = %(run_id)s AND (%(map)s::text IS NULL OR map_id = %(map)s::text) AND position >= 0
   AND length(key) BETWEEN length(%(key)s::text) - 2 AND length(%(key)s::text) + 2
 ORDER BY left(key, 4) = left(%(key)s::text, 4) DESC, position LIMIT 1000;

-- name: note_errors none
-- Store why items fail that wait for their open nodes. It updates by ctid, as queue_workflows_step_map.
-- `errors` has them by key. An item that has an error keeps it; one that has ended is left alone.
UPDATE workflow_map_items i SET error = left(%(errors)s::jsonb ->> i.key, 8000)
 WHERE i.state = 'waiting' AND i.error IS NULL AND i.ctid = ANY (ARRAY(
       SELECT f.place
         FROM jsonb_object_keys(%(errors)s::jsonb) AS e (key)
        CROSS JOIN LATERAL (
              SELECT o.ctid AS place FROM workflow_map_items o
               WHERE o.run_id = %(run_id)s AND o.map_id = %(map)s AND o.key = e.key LIMIT 1) f));

-- name: failed_items many
-- Return the first items of a map that failed, with their errors.
SELECT key, error FROM workflow_map_items
 WHERE run_id = %(run_id)s AND map_id = %(map)s AND state = 'failed' AND position >= 0
 ORDER BY position LIMIT %(limit)s;

-- name: reopen_item none
-- Let an item wait again.
-- The map counts its items again in the next generation.
UPDATE workflow_map_items SET state = 'waiting', error = NULL
 WHERE run_id = %(run_id)s AND map_id = %(map)s AND key = %(key)s;

-- name: drop_nodes none
-- Delete the nodes of the items of a map.
DELETE FROM workflow_node_jobs
 WHERE run_id = %(run_id)s AND starts_with(node_id, %(inside)s::text) AND status <> 'running';

-- name: drop none
-- Delete a map with its items, and the maps inside its items. The map of the definition around it counts their nodes no
-- more.
WITH gone AS (
    DELETE FROM workflow_run_maps
     WHERE run_id = %(run_id)s AND (node_id = %(map)s OR starts_with(node_id, %(inside)s::text))
    RETURNING nodes)
UPDATE workflow_run_maps m SET nodes = m.nodes - (SELECT coalesce(sum(g.nodes), 0) FROM gone g)
 WHERE m.run_id = %(run_id)s AND m.node_id = split_part(%(map)s, '[', 1) AND m.node_id <> %(map)s;

-- name: running_inside value
-- Return a node of an item of a map that runs.
SELECT node_id FROM workflow_node_jobs
 WHERE run_id = %(run_id)s AND status = 'running' AND starts_with(node_id, %(inside)s::text) LIMIT 1;
