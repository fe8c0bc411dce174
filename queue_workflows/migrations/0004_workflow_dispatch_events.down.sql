DROP TABLE IF EXISTS workflow_dispatch_events;
