-- Find runs for lists.

-- Return the ids of all runs whose inputs contain p_input; NULL if there are more than p_most, or if no index serves the
-- search. The index is an app's choice, as each insert of a run pays for it; `queue-workflows doctor` names it.
CREATE OR REPLACE FUNCTION queue_workflows_runs_with_input(p_input jsonb, p_most integer)
RETURNS text[] LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_indexscan = off SET enable_indexonlyscan = off SET enable_bitmapscan = on
SET jit = off AS $$
DECLARE
    v_ids text[];
BEGIN
    IF NOT EXISTS ({input_index()}) THEN
        RETURN NULL;
    END IF;
    v_ids := ARRAY(SELECT r.id FROM workflow_runs r WHERE r.context @> p_input LIMIT p_most + 1);
    RETURN CASE WHEN cardinality(v_ids) <= p_most THEN v_ids END;
END $$;

-- Return up to p_limit runs that fit the filters, the newest first, after the run with p_at and p_id, or from the first
-- if NULL. It examines p_most runs at most, in the order of one index. If that many are not enough, the last row is the
-- run at the place p_most, also if it does not fit, and the search goes on behind it. With a status and a workflow it
-- reads the index by status, or with p_by_workflow the other one. A text that begins an id finds the runs with such ids,
-- whatever their age. p_low and p_high are the first and the last id that the text may begin; NULL if it can only be a
-- whole id. Inputs that few runs have are looked up, if an index serves that, and so are the runs of a schedule with few.
-- p_machine: one that had a node of the run.
CREATE OR REPLACE FUNCTION queue_workflows_find_runs(
    p_status text, p_workflow text, p_since timestamptz, p_until timestamptz, p_text text, p_low text, p_high text,
    p_input jsonb, p_at timestamptz, p_id text, p_limit integer, p_most integer, p_by_workflow boolean,
    p_schedule text, p_machine text)
RETURNS TABLE (run_id text, at timestamptz, fits boolean, place bigint) LANGUAGE plpgsql STABLE ROWS 50
{by_index()} AS $$
DECLARE
    c_few   CONSTANT integer := 2000;
    v_since timestamptz := coalesce(p_since, '-infinity');
    v_until timestamptz := coalesce(least(p_until, p_at), 'infinity');
    v_text  text := lower(p_text);
    v_ids   text[];
BEGIN
    IF p_text IS NOT NULL THEN
        v_ids := ARRAY(SELECT r.id FROM workflow_runs r
                        WHERE r.id >= coalesce(p_low, p_text) AND r.id <= coalesce(p_high, p_text)
                          AND starts_with(r.id, p_text)
                        ORDER BY r.id LIMIT c_few + 1);
        v_ids := ARRAY(SELECT x.id FROM {runs_of(v_ids)} x
                        WHERE cardinality(v_ids) <= c_few AND x.created_at >= v_since
                          AND x.created_at <= coalesce(p_until, 'infinity') AND {fits(x)});
        v_ids := nullif(v_ids, '{}');
    END IF;
    IF v_ids IS NULL AND p_input <> '{}' THEN
        v_ids := queue_workflows_runs_with_input(p_input, c_few);
    END IF;
    IF v_ids IS NULL AND p_schedule IS NOT NULL THEN
        v_ids := ARRAY(SELECT f.run_id FROM schedule_fires f
                        WHERE f.name = p_schedule AND f.run_id IS NOT NULL ORDER BY f.fire_at LIMIT c_few + 1);
        v_ids := CASE WHEN cardinality(v_ids) <= c_few THEN v_ids END;
    END IF;
    IF v_ids IS NOT NULL THEN
        RETURN QUERY
        SELECT x.id, x.created_at, true, 0::bigint FROM {runs_of(v_ids)} x
         WHERE x.created_at >= v_since AND x.created_at <= v_until AND {is_behind(x)} AND {fits(x)}
         ORDER BY x.created_at DESC, {listed_id(x)} LIMIT p_limit;
    ELSIF p_status IS NOT NULL AND NOT (p_by_workflow AND p_workflow IS NOT NULL) THEN
        {examined(r.status, {of_value(r.status, p_status)})}
    ELSIF p_workflow IS NOT NULL THEN
        {examined(r.workflow_name, {of_value(r.workflow_name, p_workflow)})}
    ELSE
        {examined(r.created_at, r.created_at >= v_since AND r.created_at <= v_until)}
    END IF;
END $$;

-- Return the ids of the runs that are queued or running, and were queued at this time or later.
CREATE OR REPLACE FUNCTION queue_workflows_runs_queued_since(p_since timestamptz) RETURNS SETOF text LANGUAGE sql STABLE
SET enable_seqscan = off AS $$
    SELECT id FROM workflow_runs WHERE status IN ('queued', 'running') AND queued_at >= p_since
$$;
