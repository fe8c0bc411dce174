-- Maps: nodes whose work is a body of nodes for each item of a list. The node's row waits with blocked_reason 'items'.
-- A domain, as PostgreSQL parses the text of a CHECK anew for every statement that writes the table.
CREATE DOMAIN queue_workflows_item_state AS text CHECK (VALUE IN ('waiting', 'done', 'failed'));
CREATE DOMAIN queue_workflows_item_count AS integer CHECK (VALUE BETWEEN 0 AND 1000000000);
CREATE TABLE workflow_run_maps (
    run_id        text NOT NULL REFERENCES workflow_runs (id) ON DELETE CASCADE,
    node_id       text NOT NULL,
    -- The generation of the run in which the items were counted last.
    generation    queue_workflows_item_count NOT NULL,
    -- How many items are open at most, and for how many free places new ones are opened.
    at_once       queue_workflows_item_count NOT NULL,
    refill        queue_workflows_item_count NOT NULL,
    may_fail      queue_workflows_item_count NOT NULL,
    -- Counters of workflow_map_items, kept by the statements that change these.
    total         queue_workflows_item_count NOT NULL,
    done_items    queue_workflows_item_count NOT NULL DEFAULT 0,
    failed_items  queue_workflows_item_count NOT NULL DEFAULT 0,
    open_items    queue_workflows_item_count NOT NULL DEFAULT 0,
    -- Items from this position on were not opened yet in this generation.
    next_position queue_workflows_item_count NOT NULL DEFAULT 0,
    -- The nodes of its items and, for a map of the definition, of the maps inside its items.
    nodes         queue_workflows_item_count NOT NULL,
    PRIMARY KEY (run_id, node_id)
) WITH (fillfactor = 50);
-- The items of each map as its source gave them.
CREATE TABLE workflow_map_items (
    run_id   text NOT NULL,
    map_id   text NOT NULL,
    position queue_workflows_item_count NOT NULL,
    key      text NOT NULL,
    item     jsonb NOT NULL,
    -- `waiting`: it has not ended, open or not.
    state    queue_workflows_item_state NOT NULL DEFAULT 'waiting',
    error    text,
    PRIMARY KEY (run_id, map_id, key),
    FOREIGN KEY (run_id, map_id) REFERENCES workflow_run_maps (run_id, node_id) ON DELETE CASCADE
) WITH (fillfactor = 80);
-- The condition is always true. A look-up by key does not have it, so no statistics make it read a whole map here.
CREATE UNIQUE INDEX workflow_map_items_position ON workflow_map_items (run_id, map_id, position) WHERE position >= 0;
