DROP FUNCTION IF EXISTS queue_workflows_open_map(text, text, jsonb, integer, integer, integer, integer, text),
    queue_workflows_step_map(text, text, text[], jsonb), queue_workflows_end_map(text, text, text, text[], bigint),
    queue_workflows_fail_map(text, text, text);
DROP TABLE workflow_map_items, workflow_run_maps;
DROP DOMAIN queue_workflows_item_state, queue_workflows_item_count;
