-- Runs: how they start, end, reopen and are deleted, and the nodes that belong to them.

-- Return when a run was created, in microseconds since the epoch, or the nearest bigint. A cast that raised for
-- an infinite time would stop the query for every other run.
-- It is STABLE, as extract() is: the planner inlines no function that claims more than its definition allows.
CREATE OR REPLACE FUNCTION queue_workflows_born(p_at timestamptz) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT least(greatest(extract(epoch FROM p_at) * 1000000, -9223372036854775808), 9223372036854775807)::bigint
$$;

-- Insert the planned node jobs `p_rows` of a run, with the run's priority and generation. Return how many rows were
-- written. An existing node is left alone, unless it failed or was cancelled in an earlier generation: then it begins
-- again without its old values, since an upgrade may have made it a step of another kind. A node that the plan itself
-- completes has a processed outbox event, since the plan has its consequences too. A node that is `awaiting_input`
-- waits for a child run. Children are made with their nodes.
CREATE OR REPLACE FUNCTION queue_workflows_insert_nodes(p_run text, p_rows jsonb) RETURNS bigint
LANGUAGE plpgsql
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_count bigint;
    v_ended text[];
    v_child record;
BEGIN
    WITH made AS (
        INSERT INTO workflow_node_jobs AS j
               (run_id, node_id, node_module, queue, required_model, status, priority, pipeline_name, inputs,
                input_template, ref_heads, generation, finished_at, max_attempts, timeout_s, policy, lock_key,
                blocked_reason, required_version, context_delta, progress)
        SELECT r.id, n.node_id, n.node_module, n.queue, n.required_model, n.status,
               coalesce(n.priority, r.priority),
               n.pipeline_name, n.inputs, n.input_template, n.ref_heads, r.generation,
               CASE WHEN n.status IN ('skipped', 'completed') THEN now() END, coalesce(n.max_attempts, 1), n.timeout_s,
               n.policy, n.lock_key, n.blocked_reason, n.required_version, coalesce(n.context_delta, '{}'),
               CASE n.status WHEN 'completed' THEN '1'::jsonb END
          FROM workflow_runs r, jsonb_to_recordset(p_rows) AS n (
               node_id text, node_module text, queue text, required_model text, status text,
               pipeline_name text, inputs jsonb, input_template jsonb, ref_heads text[],
               priority smallint, max_attempts integer, timeout_s double precision, policy jsonb,
               lock_key text, blocked_reason text, required_version text, context_delta jsonb)
         WHERE r.id = p_run AND n.status IN ('queued', 'skipped', 'completed', 'awaiting_input')
            ON CONFLICT (run_id, node_id) DO UPDATE SET
               status = EXCLUDED.status, inputs = EXCLUDED.inputs, input_template = EXCLUDED.input_template,
               ref_heads = EXCLUDED.ref_heads, node_module = EXCLUDED.node_module, queue = EXCLUDED.queue,
               required_model = EXCLUDED.required_model, required_version = EXCLUDED.required_version,
               priority = EXCLUDED.priority, generation = EXCLUDED.generation, finished_at = EXCLUDED.finished_at,
               seq = EXCLUDED.seq, max_attempts = EXCLUDED.max_attempts, timeout_s = EXCLUDED.timeout_s,
               policy = EXCLUDED.policy, lock_key = EXCLUDED.lock_key, pipeline_name = EXCLUDED.pipeline_name,
               -- queue_workflows_make_child decides whether the node keeps its child.
               child_run_id = CASE EXCLUDED.status WHEN 'awaiting_input' THEN j.child_run_id END,
               error = NULL, attempts = 0, crash_count = 0, lapse_count = 0, watchdog_retries = 0, resolved_inputs = NULL,
               seconds = NULL, vm_rss_mb_peak = NULL, input_spec = NULL, context_delta = EXCLUDED.context_delta,
               blocked_reason = EXCLUDED.blocked_reason, available_at = NULL, cancel_requested_at = NULL,
               progress = EXCLUDED.progress, created_at = now(), started_at = NULL
         WHERE j.generation < EXCLUDED.generation AND j.status IN ('failed', 'cancelled')
        RETURNING j.id, j.node_id, j.claim_no, j.generation, j.status),
    sent AS (
        INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no, generation, processed_at)
        SELECT p_run, m.node_id, 'completed', m.id, m.claim_no, m.generation, now() FROM made m
         WHERE m.status = 'completed')
    SELECT count(*), array_agg(m.node_id) FILTER (WHERE m.status IN ('completed', 'awaiting_input'))
      INTO v_count, v_ended FROM made m;
    IF v_ended IS NOT NULL THEN
        FOR v_child IN
            SELECT * FROM jsonb_to_recordset(p_rows) AS n (node_id text, status text, inputs jsonb, child jsonb)
             WHERE n.child IS NOT NULL AND n.node_id = ANY (v_ended)
        LOOP
            PERFORM queue_workflows_make_child(
                p_run, v_child.node_id, v_child.child, v_child.inputs, v_child.status = 'awaiting_input');
        END LOOP;
    END IF;
    RETURN v_count;
END $$;

-- Start a run that has neither a definition nor nodes yet: store its definition and insert its first nodes.
-- Return how many nodes were inserted. Return NULL and write nothing for any other run, and for a run that
-- another transaction has locked.
CREATE OR REPLACE FUNCTION queue_workflows_start_run(
    p_run text, p_generation integer, p_born bigint, p_definition jsonb, p_hash text, p_rows jsonb,
    p_out_dir text)
RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
BEGIN
    PERFORM FROM workflow_runs r
      WHERE r.id = p_run AND r.status = 'queued' AND r.mode = 'node' AND r.generation = p_generation
        AND queue_workflows_born(r.created_at) = p_born AND r.definition IS NULL
        FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND OR EXISTS (SELECT FROM workflow_node_jobs WHERE run_id = p_run) THEN
        RETURN NULL;
    END IF;
    UPDATE workflow_runs
       SET definition = p_definition, definition_hash = p_hash, status = 'running',
           out_dir = coalesce(out_dir, p_out_dir),
           started_at = coalesce(started_at, now()), error = NULL, available_at = NULL, updated_at = now()
     WHERE id = p_run;
    RETURN queue_workflows_insert_nodes(p_run, p_rows);
END $$;

-- Of `p_runs`, or of all runs if NULL, return the running ones that cannot move forward: they have no node that is queued,
-- runs or waits, no open outbox event and no open answer. A map waits for its items, and a node for its child run. The
-- engine leaves no such run, plain SQL does. A node that ended less than `p_quiet_s` ago may still get its event: a worker
-- of 0.3.0 sends it in another transaction. With statistics of a time when one run had most of the rows, a table would be
-- read as a whole for each run, so only look-ups are allowed. OFFSET 0 makes them one per run.
CREATE OR REPLACE FUNCTION queue_workflows_stalled_runs(p_quiet_s double precision, p_runs text[])
RETURNS TABLE (run_id text) LANGUAGE sql STABLE
{by_index()} AS $$
    SELECT r.id
      FROM unnest(coalesce(p_runs, ARRAY(SELECT a.id FROM workflow_runs a
                                          WHERE a.status = 'running' AND a.mode = 'node'))) AS i (id)
     CROSS JOIN LATERAL (
           SELECT a.id, a.mode, a.status, a.definition IS NULL AS is_undefined FROM workflow_runs a
            WHERE a.id = i.id OFFSET 0) r
     WHERE r.mode = 'node' AND r.status = 'running' AND NOT r.is_undefined
       AND NOT EXISTS (
           SELECT FROM workflow_node_jobs j
            WHERE j.run_id = r.id
              AND (j.status IN ('queued', 'running') AND j.blocked_reason IS DISTINCT FROM 'items'
                   OR j.status = 'awaiting_input' AND (
                      NOT starts_with(j.node_module, '__run__')
                      OR EXISTS (SELECT FROM workflow_runs c
                                  WHERE c.id = j.child_run_id AND c.parent_run_id = r.id
                                    AND NOT queue_workflows_is_terminal_run(c.status)))
                   OR j.finished_at BETWEEN now() - p_quiet_s * interval '1 second' AND now())
            OFFSET 0)
       -- The first open event of this run by bounds and order, which only one index has; `=` leaves the choice open, and
       -- so does a sort where statistics know no open event: the entries of closed ones stay in all indexes.
       AND r.id IS DISTINCT FROM (
           SELECT d.run_id FROM workflow_dispatch_events d
            WHERE d.run_id >= r.id AND d.run_id <= r.id AND d.processed_at IS NULL ORDER BY d.run_id, d.id LIMIT 1)
       AND NOT EXISTS (
           SELECT FROM workflow_input_submissions s
            WHERE s.run_id = r.id AND s.status IN ('pending', 'processing') OFFSET 0)
$$;

-- Refuse to change the status of a terminal run (SQLSTATE QW002), except that `queued` reopens a failed or
-- cancelled run in a new generation.
CREATE OR REPLACE FUNCTION queue_workflows_guard_run() RETURNS trigger LANGUAGE plpgsql
SET enable_seqscan = off AS $$
BEGIN
    IF NEW.generation > OLD.generation THEN
        RETURN NEW;
    END IF;
    IF NEW.status = 'queued' AND OLD.status IN ('failed', 'cancelled') THEN
        NEW.generation := OLD.generation + 1;
        NEW.finished_at := NULL;
        NEW.error := NULL;
        NEW.start_attempts := 0;
        NEW.available_at := NULL;
        NEW.queued_at := now();
        UPDATE workflow_node_jobs SET cancel_requested_at = NULL
         WHERE run_id = NEW.id AND status = 'running' AND cancel_requested_at IS NOT NULL;
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'run % is % and stays so; retry_run() reopens it', OLD.id, OLD.status
        USING ERRCODE = 'QW002';
END $$;

-- Cancel the waiting nodes of a run that ends, in the transaction that ends it, and notify the workers of its
-- running nodes.
CREATE OR REPLACE FUNCTION queue_workflows_close_run() RETURNS trigger LANGUAGE plpgsql
SET enable_seqscan = off AS $$
BEGIN
    WITH closed AS (
        UPDATE workflow_node_jobs
           SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
         WHERE run_id = NEW.id AND status IN ('queued', 'awaiting_input')
        RETURNING id, run_id, node_id, queue, attempts, claim_no)
    INSERT INTO workflow_node_events (run_id, node_id, job_id, attempt, event_type, queue, claim_no, detail)
    SELECT run_id, node_id, id, least(greatest(attempts, 0), 32767), 'cancelled', queue, claim_no,
           jsonb_build_object('reason', 'run ' || NEW.status)
      FROM closed;
    PERFORM pg_notify('job_cancel', left(NEW.id, 1000))
      WHERE EXISTS (SELECT FROM workflow_node_jobs WHERE run_id = NEW.id AND status = 'running');
    RETURN NULL;
END $$;

-- Delete the events of deleted runs. There is no foreign key, because each inserted event would have to check
-- it.
CREATE OR REPLACE FUNCTION queue_workflows_forget_runs() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM workflow_node_events e USING gone WHERE e.run_id = gone.id;
    RETURN NULL;
END $$;

-- Delete the rows that belong to truncated rows, since a TRUNCATE fires no trigger per row: the events of all runs,
-- or the logs, steps and parts of all jobs of the table. It runs as its owner, because TRUNCATE ... CASCADE asks for
-- a right to each table that it names, and an app of 0.3.0 knows none of these.
CREATE OR REPLACE FUNCTION queue_workflows_truncated() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF TG_TABLE_NAME = 'workflow_runs' THEN
        BEGIN
            TRUNCATE workflow_node_events;
        EXCEPTION WHEN object_in_use THEN NULL;  -- the TRUNCATE that fires this trigger names the events too
        END;
    ELSE
        DELETE FROM job_attempt_logs WHERE job_table = TG_TABLE_NAME;
        DELETE FROM job_steps WHERE job_table = TG_TABLE_NAME;
        DELETE FROM job_parts WHERE job_table = TG_TABLE_NAME;
    END IF;
    RETURN NULL;
END $$;

-- Lock an input node until the caller's transaction ends, for roles that may submit an answer. It runs as its
-- owner, since such a role may not lock the row. Nodes of other kinds and nodes that have ended are not locked.
-- Only the end of the node's wait (`timeout_s`) and a DELETE have to wait for the lock. With a stronger lock, a
-- role that may only submit could stop the orchestrator for as long as its transaction is open.
CREATE OR REPLACE FUNCTION queue_workflows_hold_node(p_run text, p_node text) RETURNS void LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off AS $$
BEGIN
    PERFORM queue_workflows_demand('INSERT', 'workflow_input_submissions', 'value');
    PERFORM FROM workflow_node_jobs
      WHERE run_id = p_run AND node_id = p_node AND starts_with(node_module, '__input__')
        AND status IN ('queued', 'running', 'awaiting_input') FOR KEY SHARE;
END $$;
