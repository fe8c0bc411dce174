DROP FUNCTION IF EXISTS queue_workflows_ingest_step(
    text, text, text, double precision, integer, boolean, boolean, jsonb);
DROP FUNCTION IF EXISTS queue_workflows_node_step(
    text, text, text, double precision, boolean, boolean, boolean, boolean, text, text[], smallint, text,
    bigint, jsonb, double precision, integer, jsonb, integer, jsonb, boolean);
DROP TYPE IF EXISTS queue_workflows_claimed_node;
DROP FUNCTION IF EXISTS queue_workflows_start_run(text, integer, bigint, jsonb, text, jsonb, text);
DROP FUNCTION IF EXISTS queue_workflows_insert_nodes(text, jsonb);
DROP FUNCTION IF EXISTS queue_workflows_pick_gpu(text, text[], boolean);
DROP FUNCTION IF EXISTS queue_workflows_off_policy(text, text);
DROP FUNCTION IF EXISTS queue_workflows_born(timestamptz);
