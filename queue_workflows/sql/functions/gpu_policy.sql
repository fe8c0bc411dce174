-- Which model a gpu worker takes next, by the strict and by the balanced policy. Jobs of runs that are over do
-- not count. BETWEEN, and the model in ORDER BY, force the indexes by model: with an equality the planner may
-- take the queue's index and read past the jobs of all other models.

-- Return the other live gpu workers: the model that each has loaded or is loading, the seconds
-- until it is free, and the seconds that a run takes there.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_fleet(p_worker text) RETURNS SETOF queue_workflows_gpu_holder
LANGUAGE sql STABLE AS $$
    SELECT w.host_label, coalesce(j.required_model, w.current_model),
           CASE WHEN j.started_at IS NULL THEN 0
                WHEN w.current_model IS DISTINCT FROM j.required_model AND j.required_model IS NOT NULL
                THEN greatest(0, t.load_s + t.run_s - queue_workflows_age_s(j.started_at))
                ELSE greatest(0, t.run_s - queue_workflows_age_s(greatest(j.started_at, w.model_since))) END,
           t.run_s
      FROM workers w
      LEFT JOIN LATERAL (SELECT r.required_model, r.started_at FROM workflow_node_jobs r
                          WHERE r.worker_id = w.worker_id AND r.status = 'running' LIMIT 1) j ON true
     CROSS JOIN LATERAL queue_workflows_gpu_times(
                w.host_label, coalesce(j.required_model, w.current_model)) t
     WHERE w.queue = 'gpu' AND w.worker_id <> p_worker AND w.state IN ('idle', 'busy')
       AND w.last_seen > now() - interval '30 seconds'
$$;

-- Return in how many seconds the workers that hold a model will have taken `p_jobs` jobs of it, or NULL if no
-- worker holds it.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_reach(
    p_fleet queue_workflows_gpu_holder[], p_model text, p_jobs integer)
RETURNS double precision LANGUAGE sql STABLE AS $$
    SELECT avg(f.free_s) + (p_jobs - 1) / sum(1 / greatest(f.run_s, 0.001))
      FROM unnest(p_fleet) f WHERE f.model = p_model
$$;

-- Return the waiting jobs of a model ('' stands for jobs without one) as one row: the first job of the best
-- priority, and the oldest job. Return no row if nothing waits.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_line(p_model text, p_versions text[] DEFAULT NULL)
RETURNS SETOF queue_workflows_gpu_line LANGUAGE plpgsql STABLE
{by_index()} AS $$
DECLARE
    v_priority smallint;
    v_seq      bigint;
    v_at       timestamptz;
    v_oldest   bigint;
    v_since    timestamptz;
BEGIN
    IF p_model = '' THEN
        SELECT j.priority, j.seq, j.created_at INTO v_priority, v_seq, v_at FROM workflow_node_jobs j
         WHERE {for_gpu(j)} AND j.required_model IS NULL
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1;
        SELECT j.seq, j.created_at INTO v_oldest, v_since FROM workflow_node_jobs j
         WHERE {for_gpu(j)} AND j.required_model IS NULL
         ORDER BY j.required_model, j.seq LIMIT 1;
    ELSE
        SELECT j.priority, j.seq, j.created_at INTO v_priority, v_seq, v_at FROM workflow_node_jobs j
         WHERE {for_gpu(j)} AND j.required_model BETWEEN p_model AND p_model
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1;
        SELECT j.seq, j.created_at INTO v_oldest, v_since FROM workflow_node_jobs j
         WHERE {for_gpu(j)} AND j.required_model BETWEEN p_model AND p_model
         ORDER BY j.required_model, j.seq LIMIT 1;
    END IF;
    IF v_seq IS NOT NULL THEN
        RETURN QUERY SELECT p_model, v_priority, v_seq,
            queue_workflows_age_s(v_at), v_oldest,
            queue_workflows_age_s(v_since);
    END IF;
END $$;

-- Return how a worker that does not hold a model weighs its jobs: how many wait (16: that many or more), for how
-- many seconds together, how long a load and a run take here, and whether they are left to the workers that hold
-- the model.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_weigh(
    p_fleet queue_workflows_gpu_holder[], p_host text, p_model text, p_versions text[],
    OUT jobs integer, OUT waited_s double precision, OUT load_s double precision,
    OUT run_s double precision, OUT reach_s double precision, OUT is_left boolean)
LANGUAGE plpgsql STABLE
{by_index()} AS $$
DECLARE
    v_jobs   integer;
    v_waited float8;
BEGIN
    SELECT count(*), coalesce(sum(queue_workflows_age_s(w.created_at)), 0)
      INTO v_jobs, v_waited
      FROM (SELECT j.created_at FROM workflow_node_jobs j
             WHERE {for_gpu(j)} AND j.required_model BETWEEN p_model AND p_model
             ORDER BY j.required_model, j.priority, j.seq LIMIT 16) w;
    jobs := v_jobs;
    waited_s := v_waited;
    SELECT t.load_s, t.run_s INTO load_s, run_s FROM queue_workflows_gpu_times(p_host, p_model) t;
    reach_s := queue_workflows_gpu_reach(p_fleet, p_model, jobs);
    is_left := jobs < 16 AND coalesce(reach_s <= 3 * load_s, false);
END $$;

-- Return whether the workers that hold a model are free for its next job within `p_loads` times the time of a
-- load here.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_is_held(
    p_fleet queue_workflows_gpu_holder[], p_host text, p_model text, p_loads double precision) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce(queue_workflows_gpu_reach(p_fleet, p_model, 1) <= p_loads * t.load_s, false)
      FROM queue_workflows_gpu_times(p_host, p_model) t
$$;

-- By the balanced policy, return the model of which the worker should take a job ('' stands for jobs without
-- one), and the job. No row is locked. `why`: warm, urgent, worth (most waiting per second of load and work),
-- overdue, or left with model NULL if a worker that holds the waiting model is faster. All columns are NULL if
-- no job waits.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_choose(
    p_worker text, p_host text, p_warm text, p_models text[], p_newest boolean,
    p_grace_s double precision, p_bound_s double precision, p_versions text[],
    OUT model text, OUT seq bigint, OUT why text)
LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_lines  queue_workflows_gpu_line[];
    v_chosen queue_workflows_gpu_line;
    v_other  queue_workflows_gpu_line;
    v_fleet  queue_workflows_gpu_holder[];
    v_worst  smallint;
BEGIN
    v_lines := ARRAY(SELECT l FROM unnest(p_models) AS m (model)
                      CROSS JOIN LATERAL queue_workflows_gpu_line(m.model, p_versions) l);
    IF cardinality(v_lines) = 0 THEN
        RETURN;
    END IF;
    SELECT * INTO v_chosen FROM unnest(v_lines) l
     WHERE l.model IN ('', p_warm) ORDER BY l.priority, l.seq LIMIT 1;
    IF FOUND THEN
        v_worst := v_chosen.priority;
        why := 'warm';
    ELSE
        SELECT max(l.priority) INTO v_worst FROM unnest(v_lines) l;
    END IF;
    -- The other workers are read only where the decision needs them.
    IF why IS NULL OR EXISTS (
        SELECT FROM unnest(v_lines) l
         WHERE (p_grace_s >= 0 AND l.priority < v_worst AND l.waited_s > p_grace_s)
            OR l.oldest_s > v_chosen.waited_s + p_bound_s) THEN
        v_fleet := ARRAY(SELECT f FROM queue_workflows_gpu_fleet(p_worker) f);
    END IF;
    IF p_grace_s >= 0 AND v_fleet IS NOT NULL THEN
        SELECT * INTO v_other FROM unnest(v_lines) l
         WHERE l.priority < v_worst AND l.waited_s > p_grace_s
           AND NOT queue_workflows_gpu_is_held(v_fleet, p_host, l.model, 1)
         ORDER BY l.priority, l.seq LIMIT 1;
        IF FOUND THEN
            v_chosen := v_other;
            why := 'urgent';
        END IF;
    END IF;
    IF why IS NULL THEN
        SELECT l.* INTO v_chosen FROM unnest(v_lines) l
         CROSS JOIN LATERAL queue_workflows_gpu_weigh(v_fleet, p_host, l.model, p_versions) w
         WHERE NOT w.is_left
         ORDER BY CASE WHEN NOT p_newest THEN w.waited_s / (w.load_s + w.jobs * w.run_s + 0.001) END DESC,
                  CASE WHEN p_newest THEN l.priority END, CASE WHEN p_newest THEN -l.seq ELSE l.seq END
         LIMIT 1;
        why := CASE WHEN FOUND THEN 'worth' ELSE 'left' END;
    END IF;
    -- A job must not be passed over forever by younger ones. Where it may be, v_fleet is set.
    SELECT * INTO v_other FROM unnest(v_lines) l
     WHERE l.oldest_s > coalesce(v_chosen.waited_s, 0) + p_bound_s
     ORDER BY l.oldest_seq LIMIT 1;
    IF FOUND AND (v_other.model IN ('', p_warm)
                  OR v_other.oldest_s > coalesce(v_chosen.waited_s, 0) + 2 * p_bound_s
                  OR NOT queue_workflows_gpu_is_held(v_fleet, p_host, v_other.model, 3)) THEN
        model := v_other.model;
        seq := v_other.oldest_seq;
        why := 'overdue';
    ELSE
        model := v_chosen.model;
        seq := v_chosen.seq;
    END IF;
END $$;

-- Return the job that a worker would claim next, of the models that it can take and '' (jobs without one); no row is
-- locked. how: the 'first' job of the model, the 'newest' of priority `band`, or the 'oldest' up to `seq`. `why`: as
-- queue_workflows_gpu_choose returns it, or first (strict). The model is NULL if it claims no job now. The strict
-- policy takes the best priority first, then the loaded model, then the oldest job (an overflow host: the newest).
CREATE OR REPLACE FUNCTION queue_workflows_gpu_next(
    p_worker text, p_host text, p_model text, p_models text[], p_newest boolean,
    p_policy text, p_grace_s double precision, p_bound_s double precision, p_versions text[],
    OUT model text, OUT how text, OUT band smallint, OUT seq bigint, OUT why text)
LANGUAGE plpgsql STABLE
{by_index()} AS $$
DECLARE
    v_choice text;
    v_band   smallint;
    v_place  bigint;
BEGIN
    how := CASE WHEN p_newest THEN 'newest' ELSE 'first' END;
    IF p_policy = 'balanced' THEN
        SELECT c.model, c.seq, c.why INTO model, seq, why
          FROM queue_workflows_gpu_choose(
                   p_worker, p_host, p_model, p_models, p_newest, p_grace_s, p_bound_s,
                   p_versions) c;
        IF why = 'overdue' THEN
            how := 'oldest';
        ELSIF p_newest THEN
            SELECT l.priority INTO band FROM queue_workflows_gpu_line(model, p_versions) l;
        END IF;
        RETURN;
    END IF;
    -- The first job of each model, best first.
    SELECT head.model, head.priority, head.place INTO v_choice, v_band, v_place
      FROM (SELECT m.model, j.priority,
                   CASE WHEN NOT p_newest THEN j.seq
                        WHEN m.model <> '' THEN -(
                            SELECT k.seq FROM workflow_node_jobs k
                             WHERE (k.required_model, k.priority) >= (m.model, j.priority)
                               AND (k.required_model, k.priority) <= (m.model, j.priority)
                               AND {for_gpu(k)}
                             ORDER BY k.required_model DESC, k.priority DESC, k.seq DESC LIMIT 1)
                        ELSE -(
                            SELECT k.seq FROM workflow_node_jobs k
                             WHERE k.required_model IS NULL AND k.priority BETWEEN j.priority AND j.priority
                               AND {for_gpu(k)}
                             ORDER BY k.required_model DESC, k.priority DESC, k.seq DESC LIMIT 1) END AS place
              FROM unnest(p_models) AS m(model)
             CROSS JOIN LATERAL (
                   (SELECT k.priority, k.seq FROM workflow_node_jobs k
                     WHERE m.model <> '' AND k.required_model BETWEEN m.model AND m.model
                       AND {for_gpu(k)}
                     ORDER BY k.required_model, k.priority, k.seq LIMIT 1)
                   UNION ALL
                   (SELECT k.priority, k.seq FROM workflow_node_jobs k
                     WHERE m.model = '' AND k.required_model IS NULL
                       AND {for_gpu(k)}
                     ORDER BY k.required_model, k.priority, k.seq LIMIT 1)) j) head
     ORDER BY head.priority, (head.model <> coalesce(p_model, '')), head.place LIMIT 1;
    model := v_choice;
    band := v_band;
    seq := abs(v_place);
    why := CASE WHEN v_choice = p_model THEN 'warm' ELSE 'first' END;
END $$;
