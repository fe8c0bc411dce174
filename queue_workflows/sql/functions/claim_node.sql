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

-- Record the completed node `p_job`, if any, then claim one node; return it as JSON, whose `context` holds the outputs that
-- its template names, or NULL if nothing is claimable. SQLSTATE QW001: the finished claim was lost, and nothing was
-- written. `p_next` (rows of a plan) and `p_end` (the end of the run) are the consequences of its node that the worker has
-- computed. They are applied only if the run is live, in generation `p_generation`, and not locked by another transaction;
-- then the outbox event is inserted as processed. A completed gpu node also updates the average run time of its model. The
-- run must also be in `p_revision`: an upgrade changes the graph. If nothing is claimed, and a delayed job is due within
-- `p_look_ahead_s` seconds, the JSON has only `due_s`: in how many seconds. `p_only`: claim this job, wherever it stands in
-- the queue, or none.
CREATE OR REPLACE FUNCTION queue_workflows_node_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim boolean, p_obey boolean, p_promote boolean, p_newest boolean,
    p_model text, p_models text[], p_lane smallint,
    p_job text, p_claim_no bigint, p_delta jsonb, p_seconds double precision, p_rss integer,
    p_resolved jsonb, p_generation integer, p_next jsonb, p_end boolean,
    p_policy text DEFAULT 'strict', p_grace_s double precision DEFAULT 300,
    p_bound_s double precision DEFAULT 2400, p_versions text[] DEFAULT NULL,
    p_revision integer DEFAULT 0, p_look_ahead_s double precision DEFAULT NULL, p_only text DEFAULT NULL,
    p_detail jsonb DEFAULT NULL)
RETURNS json LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    v_id  text;
    v_old record;
    v_new queue_workflows_claimed_node;
    v_ahead boolean := false;
    v_kept  text;
    v_due_s double precision;
    v_only  text;  -- the one node that follows, for which no other worker has to be woken if it is claimed here
BEGIN
    IF p_job IS NOT NULL THEN
        UPDATE workflow_node_jobs j SET {node:to_completed(j, p_delta, p_seconds, p_rss, p_resolved)}
         WHERE j.id = p_job AND (j.worker_id IS NOT DISTINCT FROM p_worker AND j.claim_no = p_claim_no
                                 AND j.status = 'running') IS TRUE
        RETURNING j.run_id, j.node_id, j.generation, j.attempts, j.claimed_by, j.queue, j.required_model, j.started_at
          INTO v_old;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'claim % of job % is no longer held', p_claim_no, p_job
                USING ERRCODE = 'QW001';
        END IF;
        IF v_old.required_model IS NOT NULL THEN
            PERFORM queue_workflows_learn(v_old.claimed_by, v_old.required_model, NULL, greatest(0, p_seconds - (
                SELECT coalesce(sum(e.elapsed_s), 0) FROM workflow_node_events e
                 WHERE e.run_id = v_old.run_id AND e.node_id = v_old.node_id AND e.job_id = p_job
                   AND e.event_type = 'model_load_done' AND e.created_at >= v_old.started_at)));
        END IF;
        IF p_generation IS NOT NULL THEN
            PERFORM FROM workflow_runs
              WHERE id = v_old.run_id AND generation = p_generation AND revision = p_revision AND mode = 'node'
                AND status <> 'queued' AND NOT queue_workflows_is_terminal_run(status)
                FOR NO KEY UPDATE SKIP LOCKED;
            v_ahead := FOUND;
        END IF;
        INSERT INTO workflow_dispatch_events
               (run_id, node_id, kind, job_id, claim_no, generation, processed_at)
        VALUES (v_old.run_id, v_old.node_id, 'completed', p_job, p_claim_no, v_old.generation,
                CASE WHEN v_ahead THEN now() END);
        IF v_ahead AND p_next IS NOT NULL THEN
            IF p_claim AND jsonb_array_length(p_next) = 1 AND p_next -> 0 ->> 'queue' = p_queue THEN
                v_only := p_next -> 0 ->> 'node_id';
                PERFORM set_config('queue_workflows.wakes_nobody', 'on', true);
            END IF;
            PERFORM queue_workflows_insert_nodes(v_old.run_id, p_next);
            IF v_only IS NOT NULL THEN
                PERFORM set_config('queue_workflows.wakes_nobody', '', true);
            END IF;
        END IF;
        IF v_ahead AND p_end THEN
            UPDATE workflow_runs SET {run_completed()} WHERE id = v_old.run_id;
        END IF;
    END IF;
    IF p_claim THEN
        IF p_promote THEN
            {node:promote_due()}
        END IF;
        IF p_only IS NOT NULL THEN
            -- LIMIT forces a look-up by id, whatever the statistics say.
            SELECT q.id INTO v_id
              FROM (SELECT * FROM workflow_node_jobs WHERE id = p_only LIMIT 1 FOR UPDATE SKIP LOCKED) q
             WHERE {versioned(q)} AND (q.required_version IS NULL OR q.required_version = ANY (p_versions));
        ELSIF p_queue = 'gpu' THEN
            v_id := queue_workflows_pick_gpu(p_worker, p_host, p_model, p_models, p_newest,
                                             p_policy, p_grace_s, p_bound_s, p_versions);
        ELSIF p_versions <> '{}' THEN
            v_id := queue_workflows_pick_version(p_queue, p_versions, p_newest);
        END IF;
        IF p_only IS NULL AND {node:any_kept()} THEN
            v_kept := (queue_workflows_node_kept(p_worker, p_host, p_queue, v_id, p_models, p_versions, 1))[1];
            IF v_kept IS NOT NULL AND v_id IS NOT NULL THEN
                PERFORM pg_notify('node_job_ready', p_queue);  -- of the job that this transaction has locked in vain
            END IF;
            v_id := coalesce(v_kept, v_id);
        END IF;
        IF v_id IS NULL AND p_only IS NULL AND p_newest AND p_queue <> 'gpu' THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE {node:claimable(j)}
               AND j.priority = (SELECT k.priority FROM workflow_node_jobs k
                                  WHERE k.queue = p_queue AND queue_workflows_is_claimable(k.status, k.blocked_reason)
                                    AND k.required_version IS NULL {node:first(k)})
             ORDER BY j.required_version DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        -- An overflow host finds no job of its priority if all are locked or belong to ended runs.
        UPDATE workflow_node_jobs j SET {node:to_running(j, p_worker, p_host, p_lease_s, p_lane)}
         WHERE j.id = (
               SELECT CASE WHEN p_obey AND {is_off(p_host, p_queue)} THEN NULL
                           WHEN v_id IS NOT NULL OR p_queue = 'gpu' OR p_only IS NOT NULL THEN v_id
                           ELSE (SELECT q.id FROM workflow_node_jobs q
                                  WHERE {node:claimable(q)}
                                  {node:first(q)} FOR UPDATE OF q SKIP LOCKED) END)
        RETURNING {claimed_columns(j)}, {run_of(j)}, NULL::jsonb
          INTO v_new;
    END IF;
    IF v_only IS NOT NULL THEN
        IF (v_new.run_id, v_new.node_id) IS DISTINCT FROM (v_old.run_id, v_only) THEN
            PERFORM pg_notify('node_job_ready', p_queue);
        END IF;
    END IF;
    IF p_job IS NOT NULL THEN
        INSERT INTO workflow_node_events
               (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, elapsed_s,
                worker_id, claim_no, detail)
        VALUES (v_old.run_id, v_old.node_id, p_job, greatest(0, least(v_old.attempts, 32767)), 'completed', v_old.claimed_by,
                v_old.queue, v_old.required_model, p_seconds, p_worker, p_claim_no, coalesce(p_detail, '{}'));
    END IF;
    IF v_new.id IS NULL THEN
        IF p_claim AND p_look_ahead_s IS NOT NULL THEN
            v_due_s := queue_workflows_node_due_in(p_host, p_queue, p_look_ahead_s, NOT p_promote);
        END IF;
        RETURN CASE WHEN v_due_s IS NOT NULL THEN json_build_object('due_s', v_due_s) END;
    END IF;
    {node:note_claim(v_new)};
    IF v_new.ref_heads <> '{}' THEN
        v_new.context := queue_workflows_context_of(v_new.run_id, v_new.ref_heads);
    END IF;
    RETURN row_to_json(v_new);
END $$;

-- Do for several nodes of one worker what queue_workflows_node_step() does for one, in statements that each
-- concern all of them: record the completed nodes `p_done`, then claim up to `p_claim` nodes of a cpu queue;
-- return one JSON document for each of these, and `due_s`, as it does, if fewer were claimed. A node that may have killed
-- its worker is claimed alone, or, with versions or `p_newest`, after others. Other claims leave it, and take nodes behind it,
-- until it is the next one. `due_s` is 0 if one was claimed or is the next: more nodes may be claimable.
CREATE OR REPLACE FUNCTION queue_workflows_nodes_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim integer, p_obey boolean, p_promote boolean, p_newest boolean, p_done jsonb,
    p_versions text[] DEFAULT NULL, p_look_ahead_s double precision DEFAULT NULL)
RETURNS SETOF json LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    v_count bigint;
    v_held  text[];
    v_runs  text[];
    v_next  record;
    v_job   json;
    v_kept  text[] := '{}';
    v_room  integer := p_claim;
    v_due_s double precision;
BEGIN
    IF p_done IS NOT NULL THEN
        WITH f AS MATERIALIZED (
            SELECT * FROM jsonb_to_recordset(p_done) AS d (
                id text, claim_no bigint, result jsonb, seconds float8, rss_mb integer, received jsonb,
                generation integer, revision integer, detail jsonb)),
        done AS (
            UPDATE workflow_node_jobs j SET {node:to_completed(j, f.result, f.seconds, f.rss_mb, f.received)}
              FROM f
             WHERE j.id = ANY (ARRAY(SELECT i.id FROM f i)) AND j.id = f.id
               AND (j.worker_id IS NOT DISTINCT FROM p_worker
                    AND j.claim_no = f.claim_no AND j.status = 'running') IS TRUE
            RETURNING j.id, j.run_id, j.node_id, j.claim_no, j.generation, j.attempts, j.claimed_by, j.queue,
                      j.seconds, f.generation AS planned, f.revision, coalesce(f.detail, '{}') AS detail),
        held AS MATERIALIZED (
            SELECT r.id, r.generation, r.revision FROM workflow_runs r
             WHERE r.id = ANY (ARRAY(SELECT d.run_id FROM done d WHERE d.planned IS NOT NULL))
               AND r.mode = 'node' AND r.status <> 'queued' AND NOT queue_workflows_is_terminal_run(r.status)
               FOR NO KEY UPDATE SKIP LOCKED),
        outbox AS (
            INSERT INTO workflow_dispatch_events
                   (run_id, node_id, kind, job_id, claim_no, generation, processed_at)
            SELECT d.run_id, d.node_id, 'completed', d.id, d.claim_no, d.generation,
                   CASE WHEN h.id IS NOT NULL THEN now() END
              FROM done d LEFT JOIN held h ON h.id = d.run_id AND h.generation = d.planned AND h.revision = d.revision),
        logged AS (
            INSERT INTO workflow_node_events
                   (run_id, node_id, job_id, attempt, event_type, host_label, queue, elapsed_s, worker_id,
                    claim_no, detail)
            SELECT d.run_id, d.node_id, d.id, greatest(0, least(d.attempts, 32767)), 'completed',
                   d.claimed_by, d.queue, d.seconds, p_worker, d.claim_no, d.detail
              FROM done d)
        SELECT count(*), array_agg(d.id) FILTER (WHERE h.id IS NOT NULL),
               array_agg(d.run_id) FILTER (WHERE h.id IS NOT NULL)
          INTO v_count, v_held, v_runs
          FROM done d LEFT JOIN held h ON h.id = d.run_id AND h.generation = d.planned AND h.revision = d.revision;
        IF v_count <> jsonb_array_length(p_done) THEN
            RAISE EXCEPTION '% of % claims are no longer held', jsonb_array_length(p_done) - v_count,
                jsonb_array_length(p_done) USING ERRCODE = 'QW001';
        END IF;
        FOR v_next IN
            SELECT h.run_id, d.rows, d.complete
              FROM jsonb_to_recordset(p_done) AS d (id text, rows jsonb, complete boolean),
                   unnest(v_held, v_runs) AS h (id, run_id)
             WHERE (d.rows IS NOT NULL OR d.complete) AND h.id = d.id
        LOOP
            IF v_next.rows IS NOT NULL THEN
                PERFORM queue_workflows_insert_nodes(v_next.run_id, v_next.rows);
            END IF;
            IF v_next.complete THEN
                UPDATE workflow_runs SET {run_completed()} WHERE id = v_next.run_id;
            END IF;
        END LOOP;
    END IF;
    IF p_newest OR EXISTS (SELECT FROM queue_workflows_version_heads(p_queue, p_versions)) THEN
        FOR v_number IN 1 .. p_claim LOOP
            v_job := queue_workflows_node_step(
                p_worker, p_host, p_queue, p_lease_s, true, p_obey, p_promote AND v_number = 1, p_newest,
                NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                p_versions => p_versions, p_look_ahead_s => NULL, p_only => NULL, p_detail => NULL);
            EXIT WHEN v_job IS NULL;
            RETURN NEXT v_job;
            IF (v_job ->> 'crash_count')::integer > 0
               OR (SELECT k.lapse_count FROM workflow_node_jobs k WHERE k.id = v_job ->> 'id') > 0 THEN
                v_due_s := CASE WHEN v_number < p_claim THEN 0 END;
                EXIT;
            END IF;
        END LOOP;
        IF v_job IS NULL AND p_claim > 0 AND p_look_ahead_s IS NOT NULL THEN
            v_due_s := queue_workflows_node_due_in(p_host, p_queue, p_look_ahead_s, NOT p_promote);
        END IF;
        IF v_due_s IS NOT NULL AND p_look_ahead_s IS NOT NULL THEN
            RETURN NEXT json_build_object('due_s', v_due_s);
        END IF;
        RETURN;
    END IF;
    IF p_claim < 1 OR p_obey AND {is_off(p_host, p_queue)} THEN
        RETURN;
    END IF;
    IF p_promote THEN
        {node:promote_due()}
    END IF;
    IF {node:any_kept()} THEN
        v_kept := queue_workflows_node_kept(p_worker, p_host, p_queue, NULL, NULL, p_versions, p_claim);
    END IF;
    IF p_claim > 1 AND (CASE WHEN v_kept = '{}' THEN {node:first_may_kill()} ELSE (
                             SELECT {may_kill(k)} FROM workflow_node_jobs k WHERE k.id = v_kept[1]) END) THEN
        v_room := 1;
    END IF;
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT q.id FROM workflow_node_jobs q
         WHERE {node:claimable(q)} AND (v_room = 1 OR greatest(q.crash_count, q.lapse_count) <= 0)
         ORDER BY q.required_version, q.priority, q.seq LIMIT v_room - cardinality(v_kept)
           FOR UPDATE OF q SKIP LOCKED),
    claimed AS (
        UPDATE workflow_node_jobs j SET {node:to_running(j, p_worker, p_host, p_lease_s, NULL)}
         WHERE j.id = ANY (v_kept || ARRAY(SELECT p.id FROM picked p))
        RETURNING j.*),
    logged AS ({node:note_claim(c)} FROM claimed c)
    SELECT row_to_json(ROW({claimed_columns(c)}, {run_of(c)},
               CASE WHEN c.ref_heads <> '{}' THEN queue_workflows_context_of(c.run_id, c.ref_heads) END
           )::queue_workflows_claimed_node)
      FROM claimed c ORDER BY c.priority, c.seq;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF p_look_ahead_s IS NOT NULL AND v_count < p_claim THEN
        IF p_claim > 1 AND v_count > 0 AND (v_room = 1 OR {node:first_may_kill()}) THEN
            v_due_s := 0;
        ELSE
            v_due_s := queue_workflows_node_due_in(p_host, p_queue, p_look_ahead_s, NOT p_promote);
        END IF;
        IF v_due_s IS NOT NULL THEN
            RETURN NEXT json_build_object('due_s', v_due_s);
        END IF;
    END IF;
END $$;
