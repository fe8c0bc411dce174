DROP TABLE IF EXISTS workflow_node_events;
