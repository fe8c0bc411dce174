-- A gpu claim that knows the fleet: what each worker can hold, what is warm where, how long loads and runs
-- take; a second policy beside the strict one; and gpu jobs that nobody can serve are flagged.

-- What a worker said of itself last. known_models NULL: it can load whatever a job names.
ALTER TABLE workers
    ADD COLUMN IF NOT EXISTS current_model text,
    ADD COLUMN IF NOT EXISTS model_since   timestamptz,
    ADD COLUMN IF NOT EXISTS known_models  text[],
    ADD COLUMN IF NOT EXISTS vram_total_mb integer;

-- A model on a host: its size as registered there, and moving averages of how long loads and runs took.
CREATE TABLE IF NOT EXISTS gpu_models (
    model       text NOT NULL,
    host_label  text NOT NULL,
    est_vram_gb double precision,
    load_s      double precision,
    loads       bigint NOT NULL DEFAULT 0,
    run_s       double precision,
    runs        bigint NOT NULL DEFAULT 0,
    updated_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (model, host_label)
) WITH (fillfactor = 50);

-- The longest wait of each line, beside its best priority.
CREATE INDEX IF NOT EXISTS workflow_node_jobs_age_idx ON workflow_node_jobs (required_model, seq)
    WHERE queue = 'gpu' AND status = 'queued' AND blocked_reason IS NULL;

-- The seconds since a time: 0 for a time ahead, and for an infinite one, which PostgreSQL 16 cannot subtract.
CREATE OR REPLACE FUNCTION queue_workflows_age_s(p_at timestamptz) RETURNS double precision LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN isfinite(p_at) THEN greatest(0, extract(epoch FROM now() - p_at))::float8
                WHEN p_at IS NOT NULL THEN 0 END
$$;

-- A load or a run that was seen; the average follows the last ten or so. A row that another transaction
-- writes is left alone: a lesson missed costs less than a wait inside a claim. Durations are bounded to 0 to 366
-- days, since one NaN would make every later average NaN.
CREATE OR REPLACE FUNCTION queue_workflows_learn(
    p_host text, p_model text, p_load_s double precision, p_run_s double precision)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_host IS NULL OR p_model IS NULL THEN
        RETURN;
    END IF;
    p_load_s := CASE WHEN p_load_s IS NOT NULL THEN least(greatest(p_load_s, 0), 31622400) END;
    p_run_s := CASE WHEN p_run_s IS NOT NULL THEN least(greatest(p_run_s, 0), 31622400) END;
    UPDATE gpu_models g
       SET load_s = CASE WHEN p_load_s IS NULL THEN g.load_s
                         ELSE coalesce(g.load_s, 0)
                              + (p_load_s - coalesce(g.load_s, 0)) / (least(g.loads, 9) + 1) END,
           loads = least(g.loads, 1000000000) + (p_load_s IS NOT NULL)::integer,
           run_s = CASE WHEN p_run_s IS NULL THEN g.run_s
                        ELSE coalesce(g.run_s, 0)
                             + (p_run_s - coalesce(g.run_s, 0)) / (least(g.runs, 9) + 1) END,
           runs = least(g.runs, 1000000000) + (p_run_s IS NOT NULL)::integer,
           updated_at = now()
     WHERE (g.model, g.host_label) = (
           SELECT o.model, o.host_label FROM gpu_models o
            WHERE o.model = p_model AND o.host_label = p_host FOR UPDATE SKIP LOCKED);
    IF NOT FOUND AND NOT EXISTS (
        SELECT FROM gpu_models WHERE model = p_model AND host_label = p_host) THEN
        INSERT INTO gpu_models (model, host_label, load_s, loads, run_s, runs)
        VALUES (p_model, p_host, p_load_s, (p_load_s IS NOT NULL)::integer,
                p_run_s, (p_run_s IS NOT NULL)::integer)
            ON CONFLICT DO NOTHING;
    END IF;
END $$;

-- How long a model takes here: as seen here, else on other hosts, else a minute each.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_times(
    p_host text, p_model text, OUT load_s double precision, OUT run_s double precision)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(g.load_s) FILTER (WHERE g.host_label = p_host), avg(g.load_s), 60),
           coalesce(max(g.run_s) FILTER (WHERE g.host_label = p_host), avg(g.run_s), 60)
      FROM gpu_models g WHERE g.model = p_model
$$;

-- The size of a model in GB as its host knows it, else the largest that any host names; NULL or 0: unknown.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_needs(p_host text, p_model text) RETURNS double precision
LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(g.est_vram_gb) FILTER (WHERE g.host_label = p_host), max(g.est_vram_gb))
      FROM gpu_models g WHERE g.model = p_model
$$;

-- Why a worker cannot take jobs of a model: 'model' (it does not know it), 'vram' (its card is too small);
-- NULL: it can. A GB counts 1000 MB, so that what needs 24 GB fits the card that is sold as one of 24.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_misfit(
    p_host text, p_models text[], p_vram_mb integer, p_model text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN coalesce(p_model, '') = '' THEN NULL
                WHEN p_model <> ALL (p_models) THEN 'model'
                WHEN p_vram_mb < 1000 * queue_workflows_gpu_needs(p_host, p_model) THEN 'vram' END
$$;

-- The models that have a line, each found by one step in the index however long the lines are.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_queued() RETURNS SETOF text
LANGUAGE sql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
    WITH RECURSIVE line (model) AS (
        (SELECT j.required_model FROM workflow_node_jobs j
          WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
            AND j.required_model IS NOT NULL
          ORDER BY j.required_model LIMIT 1)
        UNION ALL
        SELECT (SELECT j.required_model FROM workflow_node_jobs j
                 WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
                   AND j.required_model > line.model
                 ORDER BY j.required_model LIMIT 1)
          FROM line WHERE line.model IS NOT NULL)
    SELECT model FROM line WHERE model IS NOT NULL
$$;

-- The models, of those it knows and those that are asked for, that a worker can take jobs of.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_can(p_host text, p_models text[], p_vram_mb integer)
RETURNS text[] LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(m.model), '{}')
      FROM (SELECT unnest(p_models) WHERE p_models IS NOT NULL
            UNION ALL SELECT queue_workflows_gpu_queued() WHERE p_models IS NULL) AS m (model)
     WHERE queue_workflows_gpu_misfit(p_host, p_models, p_vram_mb, m.model) IS NULL
$$;

-- A worker, the model that it holds or loads, in how many seconds it will be free, and what a run takes there.
CREATE TYPE queue_workflows_gpu_holder AS (
    host_label text, model text, free_s double precision, run_s double precision);

-- The other live gpu workers.
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

-- In how many seconds the workers that hold a model will have taken so many jobs of it; NULL: none holds it.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_reach(
    p_fleet queue_workflows_gpu_holder[], p_model text, p_jobs integer)
RETURNS double precision LANGUAGE sql STABLE AS $$
    SELECT avg(f.free_s) + (p_jobs - 1) / sum(1 / greatest(f.run_s, 0.001))
      FROM unnest(p_fleet) f WHERE f.model = p_model
$$;

-- A line of waiting jobs: the first of its best priority, and the one that has waited longest.
CREATE TYPE queue_workflows_gpu_line AS (
    model text, priority smallint, seq bigint, waited_s double precision,
    oldest_seq bigint, oldest_s double precision);

-- BETWEEN, here and below, and the model in ORDER BY: only the indexes by model have that order. With an
-- equality the planner may take the queue's index, and walk past the jobs of all other models.

-- The line of a model, or of the jobs that name none (''); no row when nothing waits.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_line(p_model text)
RETURNS SETOF queue_workflows_gpu_line LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_priority smallint;
    v_seq      bigint;
    v_at       timestamptz;
    v_oldest   bigint;
    v_since    timestamptz;
BEGIN
    IF p_model = '' THEN
        SELECT j.priority, j.seq, j.created_at INTO v_priority, v_seq, v_at FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model IS NULL
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1;
        SELECT j.seq, j.created_at INTO v_oldest, v_since FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model IS NULL
         ORDER BY j.required_model, j.seq LIMIT 1;
    ELSE
        SELECT j.priority, j.seq, j.created_at INTO v_priority, v_seq, v_at FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model BETWEEN p_model AND p_model
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1;
        SELECT j.seq, j.created_at INTO v_oldest, v_since FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model BETWEEN p_model AND p_model
         ORDER BY j.required_model, j.seq LIMIT 1;
    END IF;
    IF v_seq IS NOT NULL THEN
        RETURN QUERY SELECT p_model, v_priority, v_seq,
            greatest(0, extract(epoch FROM now() - v_at))::float8, v_oldest,
            greatest(0, extract(epoch FROM now() - v_since))::float8;
    END IF;
END $$;

-- A model's line as a cold worker weighs it: how many wait (16: that many or more) and for how many seconds
-- together, what a load and a run take here, and whether the line is left to those that hold the model.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_weigh(
    p_fleet queue_workflows_gpu_holder[], p_host text, p_model text,
    OUT jobs integer, OUT waited_s double precision, OUT load_s double precision,
    OUT run_s double precision, OUT reach_s double precision, OUT is_left boolean)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_jobs   integer;
    v_waited float8;
BEGIN
    SELECT count(*), coalesce(sum(greatest(0, extract(epoch FROM now() - w.created_at))), 0)
      INTO v_jobs, v_waited
      FROM (SELECT j.created_at FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.required_model BETWEEN p_model AND p_model
             ORDER BY j.required_model, j.priority, j.seq LIMIT 16) w;
    jobs := v_jobs;
    waited_s := v_waited;
    SELECT t.load_s, t.run_s INTO load_s, run_s FROM queue_workflows_gpu_times(p_host, p_model) t;
    reach_s := queue_workflows_gpu_reach(p_fleet, p_model, jobs);
    is_left := jobs < 16 AND coalesce(reach_s <= 3 * load_s, false);
END $$;

-- Whether those that hold a model are free for its next job within so many times a load here.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_is_held(
    p_fleet queue_workflows_gpu_holder[], p_host text, p_model text, p_loads double precision) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce(queue_workflows_gpu_reach(p_fleet, p_model, 1) <= p_loads * t.load_s, false)
      FROM queue_workflows_gpu_times(p_host, p_model) t
$$;

-- The balanced policy: the line to take from, of those that a worker can serve ('' stands for jobs without a
-- model), and how: the first of its best priority, or its oldest. No row is locked. `why`: warm, urgent,
-- worth (most waiting per second of load and work), overdue; or left, with model NULL: whoever holds what
-- waits gets there first. All NULL: nothing waits.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_choose(
    p_worker text, p_host text, p_warm text, p_models text[], p_newest boolean,
    p_grace_s double precision, p_bound_s double precision,
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
                      CROSS JOIN LATERAL queue_workflows_gpu_line(m.model) l);
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
    -- Who else holds what is looked up for those that need to know.
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
         CROSS JOIN LATERAL queue_workflows_gpu_weigh(v_fleet, p_host, l.model) w
         WHERE NOT w.is_left
         ORDER BY CASE WHEN NOT p_newest THEN w.waited_s / (w.load_s + w.jobs * w.run_s + 0.001) END DESC,
                  CASE WHEN p_newest THEN l.priority END, CASE WHEN p_newest THEN -l.seq ELSE l.seq END
         LIMIT 1;
        why := CASE WHEN FOUND THEN 'worth' ELSE 'left' END;
    END IF;
    -- Nobody is passed over for ever by those that have waited less. Where somebody may be, the fleet is known.
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

-- Lock and return the job to claim of a line ('' stands for jobs without a model), or NULL: the first of the
-- best priority, the newest of priority p_band, or the oldest up to p_seq.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_take(p_model text, p_how text, p_band smallint, p_seq bigint)
RETURNS text LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_id text;
BEGIN
    IF p_how = 'oldest' AND p_model = '' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model IS NULL AND j.seq <= p_seq
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled'))
         ORDER BY j.required_model, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_how = 'oldest' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model BETWEEN p_model AND p_model AND j.seq <= p_seq
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled'))
         ORDER BY j.required_model, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_how = 'newest' AND p_model = '' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model IS NULL AND j.priority BETWEEN p_band AND p_band
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled'))
         ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_how = 'newest' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND (j.required_model, j.priority) >= (p_model, p_band)
           AND (j.required_model, j.priority) <= (p_model, p_band)
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled'))
         ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_model = '' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model IS NULL
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled'))
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSE
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
           AND j.required_model BETWEEN p_model AND p_model
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND r.status NOT IN ('completed', 'failed', 'cancelled'))
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    END IF;
    RETURN v_id;
END $$;

-- What waits and no live worker takes: the model ('' stands for none), why in a word (no_worker, off, vram,
-- model), and in a sentence. A worker of 0.3.0 has a heartbeat only.
CREATE OR REPLACE FUNCTION queue_workflows_gpu_unserved()
RETURNS TABLE (model text, reason text, detail text) LANGUAGE sql STABLE AS $$
    WITH live AS MATERIALIZED (
        SELECT w.host_label, w.known_models, w.vram_total_mb,
               w.state IN ('idle', 'busy', 'throttled') AS is_serving
          FROM workers w
         WHERE w.queue = 'gpu' AND w.state NOT IN ('stopped', 'dead')
           AND w.last_seen > now() - interval '30 seconds'
        UNION ALL
        SELECT h.host_label, nullif(h.known_models, '{}'), h.vram_total_mb, true
          FROM worker_heartbeats h
         WHERE h.queue = 'gpu' AND h.last_seen > now() - interval '30 seconds'
           AND NOT EXISTS (SELECT FROM workers w WHERE w.host_label = h.host_label AND w.queue = 'gpu')),
    waiting AS MATERIALIZED (
        SELECT q.model FROM queue_workflows_gpu_queued() AS q (model)
        UNION ALL SELECT l.model FROM queue_workflows_gpu_line('') l),
    judged AS (
        SELECT w.model, l.host_label, l.vram_total_mb, l.is_serving,
               queue_workflows_gpu_misfit(l.host_label, l.known_models, l.vram_total_mb, w.model) AS misfit,
               queue_workflows_gpu_needs(l.host_label, w.model) AS needs_gb
          FROM waiting w LEFT JOIN live l ON true),
    told AS (
        SELECT j.model, count(j.host_label) AS alive, max(j.vram_total_mb) AS vram_mb,
               max(j.needs_gb) AS needs_gb,
               bool_or(j.misfit IS NULL AND j.is_serving) AS is_served,
               string_agg(DISTINCT j.host_label, ', ' ORDER BY j.host_label)
                   FILTER (WHERE j.misfit IS NULL) AS off,
               bool_or(j.misfit = 'vram') AS is_large
          FROM judged j GROUP BY j.model)
    SELECT t.model,
           CASE WHEN t.alive = 0 THEN 'no_worker' WHEN t.off IS NOT NULL THEN 'off'
                WHEN t.is_large THEN 'vram' ELSE 'model' END,
           CASE WHEN t.alive = 0 THEN 'no gpu worker is alive'
                WHEN t.off IS NOT NULL THEN 'every box that can take it is off: ' || t.off
                WHEN t.is_large THEN format('it needs %s GB, and the largest card has %s GB',
                                            t.needs_gb, t.vram_mb / 1000)
                ELSE 'no live gpu worker knows the model' END
      FROM told t WHERE t.is_served IS NOT TRUE
$$;

-- The lines that are said to be unassignable. One row a model, not a job: a line may be long.
CREATE TABLE IF NOT EXISTS gpu_unassignable (
    model  text PRIMARY KEY,
    reason text NOT NULL,
    detail text NOT NULL,
    since  timestamptz NOT NULL DEFAULT now()
);
ALTER DOMAIN queue_workflows_node_event DROP CONSTRAINT queue_workflows_node_event_check;
-- Not valid: a wider set needs no look at the rows that are there.
ALTER DOMAIN queue_workflows_node_event ADD CONSTRAINT queue_workflows_node_event_check CHECK (VALUE IN (
    'claimed', 'model_load_start', 'model_load_done', 'progress_beat', 'stall_suspected',
    'stall_trip', 'gpu_health_trip', 'budget_trip', 'requeued', 'reassigned', 'lease_renew',
    'completed', 'failed', 'cancelled', 'error',
    'parked', 'reclaimed', 'retried', 'skipped', 'death', 'unassignable', 'assignable')) NOT VALID;

-- What a worker would claim next, of the models that it can take and '' (jobs without one); no row is locked.
-- how: the 'first' of the line of `model` (that of seq), the 'newest' of priority `band` in it, or the 'oldest'.
-- `why`: as queue_workflows_gpu_choose() says, or first (strict). model NULL: nothing now.
-- strict: the best priority first; inside it the warm model, then age (an overflow host: newest first).
CREATE OR REPLACE FUNCTION queue_workflows_gpu_next(
    p_worker text, p_host text, p_model text, p_models text[], p_newest boolean,
    p_policy text, p_grace_s double precision, p_bound_s double precision,
    OUT model text, OUT how text, OUT band smallint, OUT seq bigint, OUT why text)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_choice text;
    v_band   smallint;
    v_place  bigint;
BEGIN
    how := CASE WHEN p_newest THEN 'newest' ELSE 'first' END;
    IF p_policy = 'balanced' THEN
        SELECT c.model, c.seq, c.why INTO model, seq, why
          FROM queue_workflows_gpu_choose(
                   p_worker, p_host, p_model, p_models, p_newest, p_grace_s, p_bound_s) c;
        IF why = 'overdue' THEN
            how := 'oldest';
        ELSIF p_newest THEN
            SELECT l.priority INTO band FROM queue_workflows_gpu_line(model) l;
        END IF;
        RETURN;
    END IF;
    -- Heads of each line, best first.
    SELECT head.model, head.priority, head.place INTO v_choice, v_band, v_place
      FROM (SELECT m.model, j.priority,
                   CASE WHEN NOT p_newest THEN j.seq
                        WHEN m.model <> '' THEN -(
                            SELECT k.seq FROM workflow_node_jobs k
                             WHERE (k.required_model, k.priority) >= (m.model, j.priority)
                               AND (k.required_model, k.priority) <= (m.model, j.priority)
                               AND k.queue = 'gpu' AND k.status = 'queued'
                               AND k.blocked_reason IS NULL
                             ORDER BY k.required_model DESC, k.priority DESC, k.seq DESC LIMIT 1)
                        ELSE -(
                            SELECT k.seq FROM workflow_node_jobs k
                             WHERE k.required_model IS NULL AND k.priority BETWEEN j.priority AND j.priority
                               AND k.queue = 'gpu' AND k.status = 'queued'
                               AND k.blocked_reason IS NULL
                             ORDER BY k.required_model DESC, k.priority DESC, k.seq DESC LIMIT 1) END AS place
              FROM unnest(p_models) AS m(model)
             CROSS JOIN LATERAL (
                   (SELECT k.priority, k.seq FROM workflow_node_jobs k
                     WHERE m.model <> '' AND k.required_model BETWEEN m.model AND m.model
                       AND k.queue = 'gpu' AND k.status = 'queued' AND k.blocked_reason IS NULL
                     ORDER BY k.required_model, k.priority, k.seq LIMIT 1)
                   UNION ALL
                   (SELECT k.priority, k.seq FROM workflow_node_jobs k
                     WHERE m.model = '' AND k.required_model IS NULL AND k.queue = 'gpu'
                       AND k.status = 'queued' AND k.blocked_reason IS NULL
                     ORDER BY k.required_model, k.priority, k.seq LIMIT 1)) j) head
     ORDER BY head.priority, (head.model IS DISTINCT FROM p_model), head.place LIMIT 1;
    model := v_choice;
    band := v_band;
    seq := abs(v_place);
    why := CASE WHEN v_choice = p_model THEN 'warm' ELSE 'first' END;
END $$;

-- The gpu job to claim, locked, or NULL: as in 0016, but for what does not fit the worker, and the policy.
-- p_models NULL: whatever model; the strict policy then needs no look at each line.
DROP FUNCTION IF EXISTS queue_workflows_pick_gpu(text, text[], boolean);
CREATE OR REPLACE FUNCTION queue_workflows_pick_gpu(
    p_worker text, p_host text, p_model text, p_models text[], p_newest boolean,
    p_policy text, p_grace_s double precision, p_bound_s double precision)
RETURNS text LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_vram   integer := (SELECT w.vram_total_mb FROM workers w WHERE w.worker_id = p_worker);
    v_models text[];
    v_band   smallint;
    v_choice text;
    v_seq    bigint;
    v_how    text;
    v_id     text;
BEGIN
    IF p_policy <> 'balanced' AND p_models IS NULL AND v_vram IS NULL THEN
        SELECT j.priority INTO v_band FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
         ORDER BY j.priority, j.seq LIMIT 1;
        IF v_band IS NULL THEN
            RETURN NULL;
        END IF;
        IF p_model IS NOT NULL THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND (j.required_model, j.priority) >= (p_model, v_band)
               AND (j.required_model, j.priority) <= (p_model, v_band)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NULL AND p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.priority = v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NULL THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        RETURN v_id;
    END IF;

    v_models := array_append(queue_workflows_gpu_can(p_host, p_models, v_vram), '');
    WHILE cardinality(v_models) > 0 LOOP
        SELECT n.model, n.how, n.band, n.seq INTO v_choice, v_how, v_band, v_seq
          FROM queue_workflows_gpu_next(
                   p_worker, p_host, p_model, v_models, p_newest, p_policy, p_grace_s, p_bound_s) n;
        IF v_choice IS NULL THEN
            RETURN NULL;
        END IF;
        v_id := queue_workflows_gpu_take(v_choice, v_how, v_band, v_seq);
        IF v_id IS NULL AND v_how = 'newest' THEN
            v_id := queue_workflows_gpu_take(v_choice, 'first', NULL, NULL);
        END IF;
        IF v_id IS NOT NULL THEN
            RETURN v_id;
        END IF;
        -- Others have locked all of it.
        v_models := array_remove(v_models, v_choice);
    END LOOP;
    RETURN NULL;
END $$;

-- As in 0016, and a completed gpu job teaches how long its model runs, and the gpu claim has a policy.
-- Returns the claimed job as JSON; its `context` holds what the ref_heads of its template name.
-- NULL: nothing to claim. SQLSTATE QW001: the finished claim was lost, nothing was written.
-- p_job NULL: nothing to finish. p_next and p_end: what the worker knows to follow from its node (rows of
-- a plan, the end of the run); taken only if nobody else holds the run, which is live and in
-- p_generation, and then its event is closed at once.
DROP FUNCTION IF EXISTS queue_workflows_node_step(
    text, text, text, double precision, boolean, boolean, boolean, boolean, text, text[], smallint, text,
    bigint, jsonb, double precision, integer, jsonb, integer, jsonb, boolean);
CREATE OR REPLACE FUNCTION queue_workflows_node_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim boolean, p_obey boolean, p_promote boolean, p_newest boolean,
    p_model text, p_models text[], p_lane smallint,
    p_job text, p_claim_no bigint, p_delta jsonb, p_seconds double precision, p_rss integer,
    p_resolved jsonb, p_generation integer, p_next jsonb, p_end boolean,
    p_policy text DEFAULT 'strict', p_grace_s double precision DEFAULT 300,
    p_bound_s double precision DEFAULT 2400)
RETURNS json LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_id  text;
    v_old record;
    v_new queue_workflows_claimed_node;
    v_ahead boolean := false;
BEGIN
    IF p_job IS NOT NULL THEN
        UPDATE workflow_node_jobs
           SET status = 'completed', context_delta = p_delta, error = NULL, seconds = p_seconds,
               vm_rss_mb_peak = p_rss, resolved_inputs = coalesce(p_resolved, resolved_inputs),
               finished_at = now(), worker_id = NULL, lease_expires_at = NULL
         WHERE id = p_job AND worker_id IS NOT DISTINCT FROM p_worker AND claim_no = p_claim_no
           AND status = 'running'
        RETURNING run_id, node_id, generation, attempts, claimed_by, queue, required_model, started_at
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
              WHERE id = v_old.run_id AND generation = p_generation AND mode = 'node'
                AND status NOT IN ('queued', 'completed', 'failed', 'cancelled')
                FOR NO KEY UPDATE SKIP LOCKED;
            v_ahead := FOUND;
        END IF;
        INSERT INTO workflow_dispatch_events
               (run_id, node_id, kind, job_id, claim_no, generation, processed_at)
        VALUES (v_old.run_id, v_old.node_id, 'completed', p_job, p_claim_no, v_old.generation,
                CASE WHEN v_ahead THEN now() END);
        IF v_ahead AND p_next IS NOT NULL THEN
            PERFORM queue_workflows_insert_nodes(v_old.run_id, p_next);
        END IF;
        IF v_ahead AND p_end THEN
            UPDATE workflow_runs
               SET status = 'completed', finished_at = now(), progress_pct = 100, error = NULL,
                   updated_at = now()
             WHERE id = v_old.run_id;
        END IF;
    END IF;
    IF p_claim THEN
        IF p_promote THEN
            WITH due AS MATERIALIZED (
                SELECT j.id FROM workflow_node_jobs j
                 WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL AND j.available_at <= now()
                   AND j.blocked_reason = 'not_due' AND j.queue = p_queue
                 ORDER BY j.available_at LIMIT 100 FOR UPDATE SKIP LOCKED)
            UPDATE workflow_node_jobs j SET blocked_reason = NULL, available_at = NULL
              FROM due WHERE j.id = due.id;
        END IF;
        IF p_queue = 'gpu' THEN
            v_id := queue_workflows_pick_gpu(p_worker, p_host, p_model, p_models, p_newest,
                                             p_policy, p_grace_s, p_bound_s);
        ELSIF p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = p_queue AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.priority = (SELECT k.priority FROM workflow_node_jobs k
                                  WHERE k.queue = p_queue AND k.status = 'queued' AND k.blocked_reason IS NULL
                                  ORDER BY k.priority, k.seq LIMIT 1)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND r.status NOT IN ('completed', 'failed', 'cancelled'))
             ORDER BY j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        -- An overflow host finds its band empty when what is in it is locked, or left of a run that is over.
        UPDATE workflow_node_jobs j
           SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
               host_label = p_host, worker_lane = coalesce(p_lane, j.worker_lane),
               lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
               started_at = now(), available_at = NULL, error = NULL, progress = NULL,
               resolved_inputs = CASE WHEN j.ref_heads = '{}' THEN j.inputs ELSE j.resolved_inputs END
         WHERE j.id = (
               SELECT CASE WHEN p_obey AND EXISTS (
                                SELECT FROM worker_controls c
                                 WHERE c.host_label = p_host AND c.queue IN (p_queue, 'all')
                                   AND c.desired_state = 'off'
                                   AND (c.until_at IS NULL OR c.until_at > now())) THEN NULL
                           WHEN v_id IS NOT NULL OR p_queue = 'gpu' THEN v_id
                           ELSE (SELECT q.id FROM workflow_node_jobs q
                                  WHERE q.queue = p_queue AND q.status = 'queued' AND q.blocked_reason IS NULL
                                    AND EXISTS (SELECT FROM workflow_runs o WHERE o.id = q.run_id
                                                AND o.status NOT IN ('completed', 'failed', 'cancelled'))
                                  ORDER BY q.priority, q.seq LIMIT 1 FOR UPDATE OF q SKIP LOCKED) END)
        RETURNING j.id, j.run_id, j.node_id, j.node_module, j.queue, j.required_model, j.status,
                  j.pipeline_name, j.priority, j.seq, j.claim_no, j.worker_id, j.claimed_by, j.generation,
                  j.attempts, j.max_attempts, j.crash_count, j.watchdog_retries, j.timeout_s, j.inputs,
                  j.input_template, j.ref_heads,
                  (SELECT json_build_object(
                              'id', r.id, 'out_dir', r.out_dir, 'workflow_name', r.workflow_name,
                              'generation', r.generation,
                              'born', queue_workflows_born(r.created_at))
                     FROM workflow_runs r WHERE r.id = j.run_id),
                  NULL::jsonb
          INTO v_new;
    END IF;
    IF p_job IS NOT NULL THEN
        INSERT INTO workflow_node_events
               (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, elapsed_s,
                worker_id, claim_no)
        VALUES (v_old.run_id, v_old.node_id, p_job, v_old.attempts, 'completed', v_old.claimed_by,
                v_old.queue, v_old.required_model, p_seconds, p_worker, p_claim_no);
    END IF;
    IF v_new.id IS NULL THEN
        RETURN NULL;
    END IF;
    INSERT INTO workflow_node_events
           (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, worker_id, claim_no)
    VALUES (v_new.run_id, v_new.node_id, v_new.id, v_new.attempts, 'claimed', p_host, v_new.queue,
            v_new.required_model, p_worker, v_new.claim_no);
    IF v_new.ref_heads <> '{}' THEN
        SELECT coalesce((SELECT jsonb_object_agg(head, r.context -> head)
                           FROM unnest(v_new.ref_heads) head WHERE r.context ? head), '{}')
            || coalesce((SELECT jsonb_object_agg(d.node_id, d.context_delta)
                           FROM workflow_node_jobs d
                          WHERE d.run_id = v_new.run_id AND d.status = 'completed'
                            AND d.node_id = ANY (v_new.ref_heads)), '{}')
          INTO v_new.context FROM workflow_runs r WHERE r.id = v_new.run_id;
    END IF;
    RETURN row_to_json(v_new);
END $$;
