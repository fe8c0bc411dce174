-- Runs that nodes of other runs have made. A node and its child name each other (`child_run_id`, `parent_run_id` and
-- `parent_node_id`), and a pair in which only one names the other is ignored.

-- Return how many runs are above this one, 9 at most, since a forged cycle would never end.
CREATE OR REPLACE FUNCTION queue_workflows_run_depth(p_run text) RETURNS integer LANGUAGE plpgsql STABLE
SET enable_seqscan = off AS $$
DECLARE
    v_run   text := p_run;
    v_depth integer := 0;
BEGIN
    LOOP
        SELECT r.parent_run_id INTO v_run FROM workflow_runs r WHERE r.id = v_run;
        EXIT WHEN v_run IS NULL OR v_depth >= 9;
        v_depth := v_depth + 1;
    END LOOP;
    RETURN v_depth;
END $$;

-- Make the run `p_child` (`id`, `workflow`, and `folder`, which is below that of the run) of a node that was just
-- inserted. A node that waits for its child and was opened again keeps the child it has, if the inputs are the same and
-- the child has not completed: one that failed or was cancelled is queued again. The child's row is locked first, so
-- that it cannot end unseen. If the child would be the ninth below the first run, the node fails.
CREATE OR REPLACE FUNCTION queue_workflows_make_child(
    p_run text, p_node text, p_child jsonb, p_context jsonb, p_waits boolean) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    v_old record;
BEGIN
    IF p_waits THEN
        -- Search by the id alone: the indexes by parent and by workflow have every child of the run, perhaps thousands.
        SELECT r.id, r.status INTO v_old
          FROM workflow_runs r
         WHERE r.id = (SELECT j.child_run_id FROM workflow_node_jobs j WHERE j.run_id = p_run AND j.node_id = p_node)
           AND r.parent_run_id IS NOT DISTINCT FROM p_run AND r.parent_node_id = p_node
           AND (r.workflow_name = p_child ->> 'workflow') IS TRUE AND r.context = p_context AND r.mode = 'node'
           FOR NO KEY UPDATE OF r;
        IF v_old.id IS NOT NULL AND v_old.status <> 'completed' THEN
            UPDATE workflow_runs SET status = 'queued', updated_at = now()
             WHERE id = v_old.id AND status IN ('failed', 'cancelled');
            RETURN;
        END IF;
    END IF;
    IF queue_workflows_run_depth(p_run) >= 8 THEN
        WITH failed AS (
            UPDATE workflow_node_jobs
               SET status = 'failed', finished_at = now(),
                   error = 'child runs are nested deeper than 8: does workflow '
                           || left(p_child ->> 'workflow', 200) || ' call itself?'
             WHERE run_id = p_run AND node_id = p_node AND (status = 'awaiting_input') IS TRUE
            RETURNING id, claim_no, generation)
        INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no, generation)
        SELECT p_run, p_node, 'failed', f.id, f.claim_no, f.generation FROM failed f;
        RETURN;
    END IF;
    INSERT INTO workflow_runs (id, workflow_name, status, mode, priority, context, headers, out_dir, parent_run_id,
                               parent_node_id)
    SELECT p_child ->> 'id', p_child ->> 'workflow', 'queued', 'node', r.priority, p_context, r.headers,
           CASE WHEN octet_length(r.out_dir) + octet_length(p_child ->> 'folder') < 4000
                THEN r.out_dir || '/' || (p_child ->> 'folder') END,
           r.id, p_node
      FROM workflow_runs r WHERE r.id = p_run;
    UPDATE workflow_node_jobs SET child_run_id = p_child ->> 'id' WHERE run_id = p_run AND node_id = p_node;
END $$;

-- End a node that waits for its child run, with an outbox event from the same commit. A node whose own run is over is
-- left to the end of that run.
CREATE OR REPLACE FUNCTION queue_workflows_end_parent_node(
    p_child text, p_run text, p_node text, p_status text, p_output jsonb, p_error text) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    WITH ended AS (
        UPDATE workflow_node_jobs j
           SET status = p_status, context_delta = p_output, error = left(p_error, 8000), finished_at = now()
         WHERE j.run_id = p_run AND j.node_id = p_node AND j.child_run_id = p_child
           AND (j.status = 'awaiting_input') IS TRUE  -- by its key, not by the index of all that wait
           AND EXISTS (SELECT FROM workflow_runs r
                        WHERE r.id = p_run AND NOT queue_workflows_is_terminal_run(r.status))
        RETURNING j.id, j.claim_no, j.generation)
    INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no, generation)
    SELECT p_run, p_node, p_status, e.id, e.claim_no, e.generation FROM ended e;
END $$;

-- End the node that waits for a run, in the transaction that ends the run: with the run's output (the output of its
-- node `__output__`) or with its error.
CREATE OR REPLACE FUNCTION queue_workflows_child_ended() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off AS $$
DECLARE
    v_output jsonb;
BEGIN
    IF NEW.status = 'completed' THEN
        SELECT j.context_delta INTO v_output FROM workflow_node_jobs j
         WHERE j.run_id = NEW.id AND j.node_id = '__output__' AND j.status = 'completed';
    END IF;
    PERFORM queue_workflows_end_parent_node(
        NEW.id, NEW.parent_run_id, NEW.parent_node_id,
        CASE NEW.status WHEN 'completed' THEN 'completed' ELSE 'failed' END, coalesce(v_output, '{}'),
        CASE NEW.status WHEN 'failed' THEN 'run ' || NEW.id || ' failed: ' || coalesce(NEW.error, 'no error was given')
                        WHEN 'cancelled' THEN 'run ' || NEW.id || ' was cancelled' END);
    RETURN NULL;
END $$;

-- Cancel the children of a run that fails or is cancelled, before its own nodes: the end of a child locks the child
-- first and the parent's node second, and so does this. A node that was cancelled has waited for its child.
CREATE OR REPLACE FUNCTION queue_workflows_cancel_children() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off AS $$
BEGIN
    UPDATE workflow_runs r SET status = 'cancelled', finished_at = now(), updated_at = now()
     WHERE r.id = ANY (ARRAY(
               SELECT j.child_run_id FROM workflow_node_jobs j
                WHERE j.run_id = NEW.id AND (j.status IN ('awaiting_input', 'cancelled')) IS TRUE
                  AND j.child_run_id IS NOT NULL AND starts_with(j.node_module, '__run__')
                ORDER BY j.child_run_id))
       AND r.parent_run_id = NEW.id AND r.mode = 'node' AND NOT queue_workflows_is_terminal_run(r.status);
    RETURN NULL;
END $$;

-- Fail the nodes that wait for deleted runs.
CREATE OR REPLACE FUNCTION queue_workflows_children_gone() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM queue_workflows_end_parent_node(
                g.id, g.parent_run_id, g.parent_node_id, 'failed', '{}', 'run ' || g.id || ' was deleted')
       FROM gone g WHERE g.parent_run_id IS NOT NULL;
    RETURN NULL;
END $$;
