-- Finish and claim node jobs: one call of a worker is one transaction and one round trip. Planner settings hold
-- each query to its index, whatever the statistics say (decision 0019).

-- Return the values of these heads of refs: keys of the run's context, and outputs of its completed nodes. An empty
-- output does not replace the context's own value.
CREATE OR REPLACE FUNCTION queue_workflows_context_of(p_run text, p_heads text[])
RETURNS jsonb LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    RETURN (
        SELECT coalesce(outputs.empty, '{}')
            || coalesce((SELECT jsonb_object_agg(head, r.context -> head)
                           FROM unnest(p_heads) head WHERE r.context ? head), '{}')
            || coalesce(outputs.filled, '{}')
          FROM workflow_runs r
         CROSS JOIN (SELECT jsonb_object_agg(d.node_id, d.context_delta)
                                FILTER (WHERE d.context_delta = '{}') AS empty,
                            jsonb_object_agg(d.node_id, d.context_delta)
                                FILTER (WHERE d.context_delta <> '{}') AS filled
                       FROM workflow_node_jobs d
                      WHERE d.run_id = p_run AND d.status = 'completed'
                        AND d.node_id = ANY (p_heads)) outputs
         WHERE r.id = p_run);
END $$;

-- Record the completed nodes of the array `p_done`, then claim up to `p_claim` nodes of a queue; return a JSON document
-- for each of these, whose `context` holds the outputs that its template names. SQLSTATE QW001: a finished claim was lost,
-- and nothing was written. `rows` and `complete` of a completed node are what the worker knows to follow from it: rows of a
-- plan, the end of the run. They are applied only if the run is live, in this `generation` and `revision` (an upgrade changes
-- the graph), and not locked by another transaction; then the outbox event is inserted as processed. A completed node with
-- a model also updates the average run time of the model. `p_only`: claim this job, wherever it stands in the queue, or none.
-- A node that may have killed its worker is claimed alone, or, where nodes are chosen one by one, after others. Other claims
-- leave it, and take nodes behind it, until it is the next one. If fewer than `p_claim` are claimed, the last document may
-- have only `due_s`: in how many seconds a delayed job is due, if that is within `p_look_ahead_s`. It is 0 if a node was
-- claimed alone or the next one will be: more nodes may be claimable.
CREATE OR REPLACE FUNCTION queue_workflows_node_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim integer, p_obey boolean, p_promote boolean, p_newest boolean, p_done jsonb,
    p_model text, p_models text[], p_lane smallint, p_policy text, p_grace_s double precision, p_bound_s double precision,
    p_versions text[], p_look_ahead_s double precision, p_only text)
RETURNS SETOF json LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    v_count  bigint;
    v_learns boolean;
    v_runs   text[];
    v_rows   jsonb[];
    v_ends   boolean[];
    v_only   text;  -- the one node that follows, for which no other worker has to be woken if it is claimed here
    v_took   boolean := false;  -- whether it was
    v_singly boolean := p_queue = 'gpu' OR p_newest OR p_only IS NOT NULL;  -- whether nodes are chosen one by one
    v_room   integer := p_claim;
    v_alone  boolean := false;
    v_id     text;
    v_ids    text[];
    v_jobs   json[];
    v_job    json;
    v_due_s  double precision;
BEGIN
    IF p_done IS NOT NULL THEN
        WITH f AS MATERIALIZED (
            SELECT * FROM jsonb_to_recordset(p_done) AS d (
                id text, claim_no bigint, result jsonb, seconds float8, rss_mb integer, received jsonb,
                generation integer, revision integer, rows jsonb, complete boolean, detail jsonb)),
        done AS (
            UPDATE workflow_node_jobs j SET {node:to_completed(j, f.result, f.seconds, f.rss_mb, f.received)}
              FROM f
             WHERE j.id = ANY (ARRAY(SELECT i.id FROM f i)) AND j.id = f.id
               AND (j.worker_id IS NOT DISTINCT FROM p_worker
                    AND j.claim_no = f.claim_no AND j.status = 'running') IS TRUE
            RETURNING j.id, j.run_id, j.node_id, j.claim_no, j.generation, j.attempts, j.claimed_by, j.queue,
                      j.required_model, j.seconds, f.generation AS planned, f.revision, f.rows, f.complete,
                      coalesce(f.detail, '{}') AS detail),
        held AS MATERIALIZED (
            SELECT r.id, r.generation, r.revision FROM workflow_runs r
             WHERE r.id = ANY (ARRAY(SELECT d.run_id FROM done d WHERE d.planned IS NOT NULL))
               AND r.mode = 'node' AND r.status <> 'queued' AND NOT queue_workflows_is_terminal_run(r.status)
               FOR NO KEY UPDATE SKIP LOCKED),
        ended AS MATERIALIZED (
            SELECT d.*, h.id IS NOT NULL AS is_ahead
              FROM done d LEFT JOIN held h ON h.id = d.run_id AND h.generation = d.planned AND h.revision = d.revision),
        outbox AS (
            INSERT INTO workflow_dispatch_events
                   (run_id, node_id, kind, job_id, claim_no, generation, processed_at)
            SELECT e.run_id, e.node_id, 'completed', e.id, e.claim_no, e.generation, CASE WHEN e.is_ahead THEN now() END
              FROM ended e),
        logged AS (
            INSERT INTO workflow_node_events
                   (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, elapsed_s, worker_id,
                    claim_no, detail)
            SELECT e.run_id, e.node_id, e.id, greatest(0, least(e.attempts, 32767)), 'completed', e.claimed_by,
                   e.queue, e.required_model, e.seconds, p_worker, e.claim_no, e.detail
              FROM ended e)
        SELECT count(*), bool_or(e.required_model IS NOT NULL), array_agg(e.run_id) FILTER (WHERE e.is_ahead),
               array_agg(e.rows) FILTER (WHERE e.is_ahead), array_agg(e.complete) FILTER (WHERE e.is_ahead)
          INTO v_count, v_learns, v_runs, v_rows, v_ends
          FROM ended e;
        IF v_count <> jsonb_array_length(p_done) THEN
            RAISE EXCEPTION '% of % claims are no longer held', jsonb_array_length(p_done) - v_count,
                jsonb_array_length(p_done) USING ERRCODE = 'QW001';
        END IF;
        IF v_learns THEN
            -- LIMIT keeps this a look-up by id, whatever the statistics say.
            PERFORM queue_workflows_learn(j.claimed_by, j.required_model, NULL, greatest(0, d.seconds - (
                        SELECT coalesce(sum(e.elapsed_s), 0) FROM workflow_node_events e
                         WHERE e.run_id = j.run_id AND e.node_id = j.node_id AND e.job_id = j.id
                           AND e.event_type = 'model_load_done' AND e.created_at >= j.started_at)))
               FROM jsonb_to_recordset(p_done) AS d (id text, seconds float8)
              CROSS JOIN LATERAL (SELECT * FROM workflow_node_jobs n WHERE n.id = d.id LIMIT 1) j
              WHERE j.required_model IS NOT NULL
              ORDER BY j.required_model;  -- two workers of a host that insert the rows of new models wait in one order
        END IF;
        IF p_claim > 0 AND jsonb_array_length(p_done) = 1 AND jsonb_array_length(v_rows[1]) = 1
           AND v_rows[1] -> 0 ->> 'queue' = p_queue THEN
            v_only := v_rows[1] -> 0 ->> 'node_id';
            PERFORM set_config('queue_workflows.wakes_nobody', 'on', true);
        END IF;
        FOR v_number IN 1 .. coalesce(cardinality(v_runs), 0) LOOP
            IF v_rows[v_number] IS NOT NULL THEN
                PERFORM queue_workflows_insert_nodes(v_runs[v_number], v_rows[v_number]);
            END IF;
            IF v_ends[v_number] THEN
                UPDATE workflow_runs SET {run_completed()} WHERE id = v_runs[v_number];
            END IF;
        END LOOP;
        IF v_only IS NOT NULL THEN
            PERFORM set_config('queue_workflows.wakes_nobody', '', true);
        END IF;
    END IF;
    IF p_claim < 1 THEN
        RETURN;
    END IF;
    IF p_promote THEN
        {node:promote_due()}
    END IF;
    IF NOT v_singly AND p_claim > 1 AND p_versions <> '{}' THEN
        v_singly := EXISTS (SELECT FROM queue_workflows_version_heads(p_queue, p_versions));
    END IF;
    IF v_singly THEN
        v_room := 1;
    END IF;
    v_count := 0;
    LOOP
        v_id := NULL;
        v_ids := '{}';
        IF p_only IS NOT NULL THEN
            -- LIMIT keeps this a look-up by id, whatever the statistics say.
            SELECT q.id INTO v_id
              FROM (SELECT * FROM workflow_node_jobs WHERE id = p_only LIMIT 1 FOR UPDATE SKIP LOCKED) q
             WHERE {versioned(q)} AND (q.required_version IS NULL OR q.required_version = ANY (p_versions));
        ELSIF p_queue = 'gpu' THEN
            v_id := queue_workflows_pick_gpu(p_worker, p_host, p_model, p_models, p_newest,
                                             p_policy, p_grace_s, p_bound_s, p_versions);
        ELSIF v_room = 1 AND p_versions <> '{}' THEN
            v_id := queue_workflows_pick_version(p_queue, p_versions, p_newest);
        END IF;
        IF p_only IS NULL AND {node:any_kept()} THEN
            v_ids := queue_workflows_node_kept(p_worker, p_host, p_queue, v_id, p_models, p_versions, v_room);
            IF v_ids <> '{}' AND v_id IS NOT NULL THEN
                PERFORM pg_notify('node_job_ready', p_queue);  -- of the job that this transaction has locked in vain
            END IF;
        END IF;
        IF p_newest AND v_id IS NULL AND v_ids = '{}' AND p_queue <> 'gpu' AND p_only IS NULL THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE {node:claimable(j)}
               AND j.priority = (SELECT k.priority FROM workflow_node_jobs k
                                  WHERE k.queue = p_queue AND queue_workflows_is_claimable(k.status, k.blocked_reason)
                                    AND k.required_version IS NULL {node:first(k)})
             ORDER BY j.required_version DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NOT NULL AND v_ids = '{}' THEN
            v_ids := ARRAY[v_id];
        END IF;
        IF p_queue = 'gpu' OR p_only IS NOT NULL THEN
            v_room := cardinality(v_ids);
        ELSIF v_room > 1 THEN
            IF (CASE WHEN v_ids = '{}' THEN {node:first_may_kill()} ELSE (
                     SELECT {may_kill(k)} FROM workflow_node_jobs k WHERE k.id = v_ids[1]) END) THEN
                v_room := 1;
                v_alone := true;
            END IF;
        END IF;
        -- An overflow host finds no job of its priority if all are locked or belong to ended runs.
        WITH picked AS MATERIALIZED (
            SELECT q.id FROM workflow_node_jobs q
             WHERE {node:claimable(q)} AND (v_room = 1 OR greatest(q.crash_count, q.lapse_count) <= 0)
             ORDER BY q.required_version, q.priority, q.seq LIMIT v_room - cardinality(v_ids)
               FOR UPDATE OF q SKIP LOCKED),
        claimed AS (
            UPDATE workflow_node_jobs j SET {node:to_running(j, p_worker, p_host, p_lease_s, p_lane)}
             WHERE j.id = ANY (CASE WHEN p_obey AND {is_off(p_host, p_queue)} THEN NULL
                                    ELSE v_ids || ARRAY(SELECT p.id FROM picked p) END)
            RETURNING j.*),
        logged AS ({node:note_claim(c)} FROM claimed c)
        SELECT array_agg(row_to_json(ROW(
                   c.id, c.run_id, c.node_id, c.node_module, c.queue, c.required_model, c.status, c.pipeline_name, c.priority,
                   c.seq, c.claim_no, c.worker_id, c.claimed_by, c.generation, c.attempts, c.max_attempts, c.crash_count,
                   c.watchdog_retries, c.timeout_s, c.inputs, c.input_template, c.ref_heads,
                   (SELECT json_build_object(
                               'id', r.id, 'out_dir', r.out_dir, 'workflow_name', r.workflow_name,
                               'generation', r.generation, 'revision', r.revision,
                               'born', queue_workflows_born(r.created_at), 'traceparent', r.headers ->> 'traceparent')
                      FROM workflow_runs r WHERE r.id = c.run_id),
                   CASE WHEN c.ref_heads <> '{}' THEN queue_workflows_context_of(c.run_id, c.ref_heads) END
               )::queue_workflows_claimed_node) ORDER BY c.priority, c.seq),
               v_alone OR coalesce(bool_or({may_kill(c)}), false),
               v_took OR coalesce(bool_or((c.run_id, c.node_id) = (v_runs[1], v_only)), false)
          INTO v_jobs, v_alone, v_took
          FROM claimed c;
        EXIT WHEN v_jobs IS NULL;
        FOREACH v_job IN ARRAY v_jobs LOOP
            RETURN NEXT v_job;
        END LOOP;
        v_count := v_count + cardinality(v_jobs);
        EXIT WHEN NOT v_singly OR v_alone OR v_count >= p_claim;
    END LOOP;
    IF v_only IS NOT NULL AND NOT v_took THEN
        PERFORM pg_notify('node_job_ready', p_queue);
    END IF;
    IF p_look_ahead_s IS NULL OR v_count >= p_claim THEN
        RETURN;
    END IF;
    IF v_count > 0 AND NOT v_alone AND NOT v_singly THEN
        v_alone := {node:first_may_kill()};
    END IF;
    IF v_count > 0 AND v_alone THEN
        v_due_s := 0;
    ELSE
        v_due_s := queue_workflows_node_due_in(p_host, p_queue, p_look_ahead_s, NOT p_promote);
    END IF;
    IF v_due_s IS NOT NULL THEN
        RETURN NEXT json_build_object('due_s', v_due_s);
    END IF;
END $$;
