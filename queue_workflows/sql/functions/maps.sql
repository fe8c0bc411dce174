-- Maps: seal their items, count them and open the next ones, and end the map's node. All callers hold the run's lock.

-- Seal the items of a map, `[{"key", "item"}, ...]`, whose row was inserted in this transaction, or count them again
-- in a new generation of the run, where failed items wait again. `p_nodes`: how many nodes they have. `p_root`: the
-- map of the definition around it, which counts them too. Return what was done: `sealed`, `again`, or `open` if the
-- map was opened in this generation already, and is not changed.
CREATE OR REPLACE FUNCTION queue_workflows_open_map(
    p_run text, p_map text, p_items jsonb, p_at_once integer, p_refill integer, p_may_fail integer,
    p_nodes integer, p_root text)
RETURNS text LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_generation integer := (SELECT r.generation FROM workflow_runs r WHERE r.id = p_run);
    v_known      integer;
BEGIN
    SELECT m.generation INTO v_known FROM workflow_run_maps m WHERE m.run_id = p_run AND m.node_id = p_map;
    IF v_known = v_generation THEN
        RETURN 'open';
    END IF;
    IF v_known IS NULL THEN
        INSERT INTO workflow_run_maps (run_id, node_id, generation, at_once, refill, may_fail, total, nodes)
        VALUES (p_run, p_map, v_generation, p_at_once, p_refill, p_may_fail, jsonb_array_length(p_items), p_nodes);
        INSERT INTO workflow_map_items (run_id, map_id, position, key, item)
        SELECT p_run, p_map, i.ordinality - 1, i.key, coalesce(i.item, 'null')
          FROM ROWS FROM (jsonb_to_recordset(p_items) AS (key text, item jsonb)) WITH ORDINALITY AS i;
        UPDATE workflow_run_maps SET nodes = nodes + p_nodes
         WHERE run_id = p_run AND node_id = p_root AND p_root <> p_map;
        RETURN 'sealed';
    END IF;
    UPDATE workflow_map_items SET state = 'waiting', error = NULL
     WHERE run_id = p_run AND map_id = p_map AND (state = 'failed' OR error IS NOT NULL);
    UPDATE workflow_run_maps
       SET generation = v_generation, next_position = 0, open_items = 0, failed_items = 0,
           done_items = (SELECT count(*) FROM workflow_map_items i
                          WHERE i.run_id = p_run AND i.map_id = p_map AND i.state = 'done')
     WHERE run_id = p_run AND node_id = p_map;
    RETURN 'again';
END $$;

-- Count items that have ended, by their keys: `p_done`, and `p_failed` with the error of each. Then open the next
-- ones as far as `at_once` allows. An item is counted once, however often it is named. Return the counters, and the
-- opened items in the order of their source; NULL if there is no such map.
CREATE OR REPLACE FUNCTION queue_workflows_step_map(
    p_run text, p_map text, p_done text[], p_failed jsonb)
RETURNS jsonb LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_sort = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_map    record;
    v_done   integer := 0;
    v_failed integer := 0;
    v_closed integer := 0;
    v_room   integer;
    v_items  jsonb;
    v_opened integer := 0;
    v_last   integer;
BEGIN
    SELECT * INTO v_map FROM workflow_run_maps m WHERE m.run_id = p_run AND m.node_id = p_map;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF p_done <> '{}' OR p_failed <> '{}' THEN
        -- Find each item by its key first, then update by ctid: a join may read all items of the map.
        WITH ended AS (
            UPDATE workflow_map_items i
               SET state = CASE WHEN p_failed ? i.key THEN 'failed' ELSE 'done' END,
                   error = left(p_failed ->> i.key, 8000)
             WHERE i.state = 'waiting' AND i.ctid = ANY (ARRAY(
                   SELECT f.place
                     FROM (SELECT unnest(p_done) AS key UNION ALL SELECT jsonb_object_keys(p_failed)) e
                    CROSS JOIN LATERAL (
                          SELECT o.ctid AS place FROM workflow_map_items o
                           WHERE o.run_id = p_run AND o.map_id = p_map AND o.key = e.key LIMIT 1) f))
            RETURNING i.position, i.state)
        SELECT count(*) FILTER (WHERE e.state = 'done'), count(*) FILTER (WHERE e.state = 'failed'),
               count(*) FILTER (WHERE e.position < v_map.next_position)
          INTO v_done, v_failed, v_closed FROM ended e;
    END IF;
    v_room := v_map.at_once - v_map.open_items + v_closed;
    IF v_map.failed_items + v_failed > v_map.may_fail OR v_room < v_map.refill
       OR v_map.next_position >= v_map.total THEN
        v_room := 0;
    END IF;
    v_last := v_map.next_position - 1;
    IF v_room > 0 THEN
        SELECT count(*), max(o.position), jsonb_agg(jsonb_build_object('key', o.key, 'item', o.item) ORDER BY o.position)
          INTO v_opened, v_last, v_items
          FROM (SELECT i.position, i.key, i.item FROM workflow_map_items i
                 WHERE i.run_id = p_run AND i.map_id = p_map AND i.position >= 0
                   AND i.position >= v_map.next_position AND i.state = 'waiting'
                 ORDER BY i.position LIMIT v_room) o;
        v_last := coalesce(v_last, v_map.total - 1);
    END IF;
    UPDATE workflow_run_maps m
       SET done_items = m.done_items + v_done, failed_items = m.failed_items + v_failed,
           open_items = m.open_items - v_closed + v_opened, next_position = v_last + 1
     WHERE m.run_id = p_run AND m.node_id = p_map
    RETURNING * INTO v_map;
    RETURN jsonb_build_object(
        'items', coalesce(v_items, '[]'), 'total', v_map.total, 'done', v_map.done_items,
        'failed', v_map.failed_items, 'open', v_map.open_items, 'may_fail', v_map.may_fail);
END $$;

-- Complete the node of a map all of whose items have ended. Its output has the items' results in the order of the
-- source, the keys of these items, and the items that failed, with their errors. `p_result`, `p_path`: the node of the
-- body that has an item's result, and where in its output. An item without such an output is left out. Return the size
-- of the output in bytes; nothing is written if that exceeds `p_limit`.
CREATE OR REPLACE FUNCTION queue_workflows_end_map(
    p_run text, p_map text, p_result text, p_path text[], p_limit bigint)
RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_output jsonb;
    v_size   bigint;
    v_count  bigint;
BEGIN
    SELECT jsonb_build_object(
               'results', coalesce(jsonb_agg(d.result ORDER BY i.position)
                                   FILTER (WHERE d.result IS NOT NULL), '[]'),
               'keys', coalesce(jsonb_agg(i.key ORDER BY i.position)
                                FILTER (WHERE d.result IS NOT NULL), '[]'),
               'failed', coalesce(jsonb_agg(jsonb_build_object('key', i.key, 'error', i.error) ORDER BY i.position)
                                  FILTER (WHERE i.state = 'failed'), '[]'))
      INTO v_output
      FROM workflow_map_items i
      -- LIMIT forces a look-up per item. Statistics from before the run say that it has hardly any node, so a join
      -- would read all of its nodes for each item.
      LEFT JOIN LATERAL (
           SELECT n.status, n.context_delta #> p_path AS result FROM workflow_node_jobs n
            WHERE n.run_id = p_run AND n.node_id = p_map || '[' || i.key || ']/' || p_result LIMIT 1) d
        ON i.state = 'done' AND d.status = 'completed'
     WHERE i.run_id = p_run AND i.map_id = p_map;
    v_size := octet_length(v_output::text);
    IF v_size > p_limit THEN
        RETURN v_size;
    END IF;
    WITH done AS (
        UPDATE workflow_node_jobs j
           SET status = 'completed', context_delta = v_output, finished_at = now(), blocked_reason = NULL
         WHERE j.run_id = p_run AND j.node_id = p_map AND j.status = 'queued'
        RETURNING queue_workflows_record(j, 'completed') AS job)
    SELECT count((d.job).id) INTO v_count FROM done d;
    RETURN v_size;
EXCEPTION WHEN program_limit_exceeded THEN
    RETURN greatest(p_limit + 1, 256 * 1024 * 1024);  -- more than a jsonb holds
END $$;
