-- Each statement returns what breaks the invariant in its comment: the id of a job, run or
-- schedule entry, and how. No row is the proof. `found` is materialized: the plan is then made
-- for all rows, and is fast where there are none.

-- name: parameters row
-- Return the start of the window, `-infinity` for all that is retained, and the time up to which
-- outbox rows may be pruned.
SELECT coalesce(now() - %(since_s)s::float8 * interval '1 second', '-infinity')::text AS since,
       (now() - %(retention_days)s::float8 * interval '1 day')::text AS kept;

-- name: terminal_stays many
-- The status of a terminal job never changes within one generation.
WITH found (id, text) AS MATERIALIZED (
    -- Events do not tell the generations of a retried job apart. An event that an app recorded
    -- carries no claim.
    -- both:
    SELECT e.job_id, e.event_type || ' after ' || x.event_type
      FROM ingest_job_events e
      JOIN ingest_job_events x ON {same_job(x, e)} x.id < e.id
      JOIN ingest_jobs j ON j.id = e.job_id AND j.generation = 0
     WHERE e.created_at >= %(since)s::timestamptz AND x.claim_no IS NOT NULL
       AND x.event_type IN ('completed', 'failed', 'cancelled')
       AND (e.event_type = 'claimed' OR e.claim_no IS NOT NULL AND e.event_type IN
            ('completed', 'failed', 'cancelled', 'requeued', 'reclaimed', 'retried', 'parked'))
    -- end
)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: one_finalisation many
-- A job is finalised at most once per generation, by its highest claim.
WITH sent AS NOT MATERIALIZED ({recently_sent()}),
found (id, text) AS MATERIALIZED (
    SELECT job_id, count(*) || ' finalisations in the outbox'
      FROM sent
     WHERE kind IN ('completed', 'failed') AND job_id IS NOT NULL
     GROUP BY job_id, generation HAVING count(*) > 1
    UNION ALL
    SELECT j.id, 'finalised by claim ' || d.claim_no || ' of ' || j.claim_no
      FROM sent d
      JOIN workflow_node_jobs j ON j.id = d.job_id AND j.generation = d.generation
     WHERE d.kind IN ('completed', 'failed') AND d.claim_no <> j.claim_no
    UNION ALL
    -- both:
    SELECT j.id, 'finalised ' || count(*) || ' times, last by claim ' || max(e.claim_no)
           || ' of ' || j.claim_no
      FROM ingest_job_events e
      JOIN ingest_jobs j ON j.id = e.job_id AND j.generation = 0
     WHERE e.created_at >= %(since)s::timestamptz AND e.claim_no IS NOT NULL
       AND e.event_type IN ('completed', 'failed')
     GROUP BY j.id, j.claim_no HAVING count(*) > 1 OR max(e.claim_no) <> j.claim_no
    -- end
)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: claims_counted many
-- Each claim of a job raises its claim_no by exactly one.
WITH found (id, text) AS MATERIALIZED (
    -- A claim by a plain UPDATE leaves no event. The sweep that takes such a claim back leaves
    -- one without a worker, which fills the gap.
    -- both:
    SELECT e.job_id, 'claim ' || e.claim_no || ' after ' || e.before
      FROM (SELECT c.*, lag(claim_no) OVER (PARTITION BY job_id ORDER BY id) AS before
              FROM ingest_job_events c
             WHERE event_type = 'claimed' AND claim_no IS NOT NULL
               AND created_at >= %(since)s::timestamptz) e
     WHERE e.claim_no <> e.before + 1
       AND (SELECT count(DISTINCT x.claim_no) FROM ingest_job_events x
             WHERE {same_job(x, e)}
                   x.worker_id IS NULL AND x.claim_no > e.before AND x.claim_no < e.claim_no)
           <> e.claim_no - e.before - 1
    UNION ALL
    SELECT j.id, 'claim ' || j.claim_no || ', its last event ' || max(e.claim_no)
      FROM ingest_job_events e
      JOIN ingest_jobs j ON j.id = e.job_id
     WHERE e.event_type = 'claimed' AND e.created_at >= %(since)s::timestamptz
     GROUP BY j.id, j.claim_no, j.status, j.worker_id
    HAVING max(e.claim_no) > j.claim_no
        OR max(e.claim_no) < j.claim_no AND j.status = 'running'
       AND NOT starts_with(j.worker_id, 'legacy:')
    -- end
)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: own_claim_only many
-- No accepted write carries the claim of another worker.
WITH found (id, text) AS MATERIALIZED (
    -- both:
    SELECT e.job_id, e.event_type || ' by ' || e.worker_id || ' under claim ' || x.claim_no
           || ' of ' || x.worker_id
      FROM ingest_job_events e
      JOIN ingest_job_events x ON {same_job(x, e)} x.claim_no = e.claim_no AND x.event_type = 'claimed'
     WHERE e.created_at >= %(since)s::timestamptz AND e.worker_id <> x.worker_id
    -- end
)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: running_is_claimed many
-- A job is running if and only if its claim, lease and worker are all set.
WITH found (id, text) AS MATERIALIZED (
    -- both:
    SELECT j.id, j.status || ', worker ' || coalesce(j.worker_id, '-') || ', claim ' || j.claim_no
           || ', lease ' || coalesce(j.lease_expires_at::text, '-')
      FROM ({touched(id, job_id)}) t
      JOIN ingest_jobs j ON j.id = t.id
     WHERE j.status = 'running'
       AND (j.worker_id IS NULL OR j.lease_expires_at IS NULL OR j.claim_no < 1)
        OR j.status <> 'running' AND (j.worker_id IS NOT NULL OR j.lease_expires_at IS NOT NULL)
    -- end
)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: dependencies_first many
-- A node is queued once per run, and only after all its dependencies are completed or skipped.
WITH touched_runs (id) AS NOT MATERIALIZED (
    SELECT id FROM workflow_runs WHERE %(whole)s::boolean UNION {node:touched(run_id, run_id)}),
found (id, text) AS MATERIALIZED (
    SELECT x.id, x.node_id || ' of ' || t.id || ' is ' || x.status || ' before ' || x.dep
      FROM touched_runs t
     CROSS JOIN LATERAL (
           SELECT j.id, j.node_id, j.status, dep.id AS dep
             FROM workflow_runs r,
                  -- A definition may be forged: what is no array has no elements.
                  jsonb_array_elements(CASE jsonb_typeof(r.definition -> 'nodes')
                      WHEN 'array' THEN r.definition -> 'nodes' END) AS n (node),
                  jsonb_array_elements_text(CASE jsonb_typeof(n.node -> 'deps')
                      WHEN 'array' THEN n.node -> 'deps' END) AS dep (id),
                  workflow_node_jobs j
            WHERE r.id = t.id AND j.run_id = t.id AND j.node_id = n.node ->> 'id'
              AND j.status IN ('queued', 'running', 'awaiting_input', 'completed', 'failed')
              -- A dependency of a later generation was retried after the node had run.
              AND NOT EXISTS (
                  SELECT FROM workflow_node_jobs d
                   WHERE d.run_id = t.id AND d.node_id = dep.id
                     AND (d.status IN ('completed', 'skipped') OR d.generation > j.generation))
           -- The planner guesses a hundred nodes a run, and as many dependencies of each: OFFSET 0
           -- has it look at each run by itself.
           OFFSET 0) x
    UNION ALL
    SELECT x.id, x.node_id || ' of ' || t.id || ' has ' || x.n || ' jobs'
      FROM touched_runs t
     CROSS JOIN LATERAL (
           SELECT max(j.id) AS id, j.node_id, count(*) AS n
             FROM workflow_node_jobs j
            WHERE j.run_id = t.id
            GROUP BY j.node_id HAVING count(*) > 1
           OFFSET 0) x)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: outbox_agrees many
-- A completed or failed node has exactly one outbox event of that kind, from the same commit.
WITH touched (id) AS ({node:touched(id, job_id)}),
sent AS NOT MATERIALIZED ({recently_sent()}),
found (id, text) AS MATERIALIZED (
    SELECT j.id, j.status || ' with ' || count(d.id) || ' such outbox rows'
      FROM touched t
      JOIN workflow_node_jobs j ON j.id = t.id
      LEFT JOIN sent d
        ON d.run_id = j.run_id AND d.node_id = j.node_id AND d.kind = j.status
       AND (d.job_id IS NULL OR d.generation = j.generation)
     WHERE j.status IN ('completed', 'failed')
       AND j.finished_at >= greatest(%(since)s::timestamptz, %(kept)s::timestamptz)
     GROUP BY j.id, j.status HAVING count(d.id) <> 1
    UNION ALL
    -- `created_at` and `finished_at` are now() of their transactions: equal in the same commit.
    SELECT j.id, j.status || ' with an outbox row ' || d.kind
           || CASE WHEN j.status = d.kind THEN ' of another commit' ELSE '' END
      FROM sent d
      JOIN workflow_node_jobs j ON j.id = d.job_id AND j.generation = d.generation
     WHERE d.kind IN ('completed', 'failed')
       AND (j.status <> d.kind OR j.finished_at <> d.created_at))
SELECT id, text FROM found LIMIT %(limit)s;

-- name: run_agrees many
-- A completed run has only completed or skipped nodes, but for items that may fail, and no node
-- waits under a terminal run after a sweep.
WITH touched_runs (id) AS NOT MATERIALIZED (
    SELECT id FROM workflow_runs WHERE %(whole)s::boolean UNION {node:touched(run_id, run_id)}),
found (id, text) AS MATERIALIZED (
    SELECT r.id, r.status || ' with node ' || j.node_id || ' ' || j.status
      FROM touched_runs t
      JOIN workflow_runs r ON r.id = t.id
      JOIN workflow_node_jobs j ON j.run_id = r.id
     WHERE r.mode = 'node'
       AND (r.status = 'completed' AND j.status NOT IN ('completed', 'skipped')
           AND NOT EXISTS (
               SELECT FROM workflow_map_items i
                WHERE i.run_id = r.id AND i.state = 'failed'
                  AND starts_with(j.node_id, i.map_id || '[' || i.key || ']/'))
            OR r.status IN ('failed', 'cancelled') AND j.status IN ('queued', 'awaiting_input')
           AND greatest(r.finished_at, j.created_at)
               <= now() - %(sweep_s)s::float8 * interval '1 second')
    UNION ALL
    SELECT r.id, 'completed with nodes missing'
      FROM touched_runs t
      JOIN workflow_runs r ON r.id = t.id
     WHERE r.mode = 'node' AND r.status = 'completed' AND r.definition IS NOT NULL
       AND (SELECT count(*) FROM workflow_node_jobs j
             WHERE j.run_id = r.id AND strpos(j.node_id, '[') = 0)
           < CASE jsonb_typeof(r.definition -> 'nodes')
                 WHEN 'array' THEN jsonb_array_length(r.definition -> 'nodes') END)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: cancel_holds many
-- After a cancel is acknowledged, no node of the run is claimed.
WITH found (id, text) AS MATERIALIZED (
    SELECT e.job_id, 'claimed at ' || e.created_at::text || ' after its run ' || r.id
           || ' was cancelled at ' || r.finished_at::text
      FROM workflow_node_events e
      JOIN workflow_runs r ON r.id = e.run_id
     WHERE e.event_type = 'claimed' AND e.created_at >= %(since)s::timestamptz
       AND r.mode = 'node' AND r.status = 'cancelled'
       AND e.created_at > r.finished_at + %(commit_s)s::float8 * interval '1 second')
SELECT id, text FROM found LIMIT %(limit)s;

-- name: one_job_per_key many
-- One idempotency key gives one job.
WITH touched (id) AS ({ingest:touched(id, job_id)}),
found (id, text) AS MATERIALIZED (
    SELECT max(j.id), count(*) || ' jobs have the key ' || j.idempotency_key
      FROM touched t
      JOIN ingest_jobs j ON j.id = t.id
     WHERE j.idempotency_key IS NOT NULL
       AND (NOT j.idempotency_released OR j.status IN ('queued', 'running'))
     GROUP BY j.idempotency_key HAVING count(*) > 1)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: one_fire many
-- A schedule entry fires at most once for each instant.
WITH found (id, text) AS MATERIALIZED (
    SELECT name, count(*) || ' fires at ' || fire_at
      FROM schedule_fires
     GROUP BY name, fire_at HAVING count(*) > 1
    UNION ALL
    SELECT min(name), count(*) || ' fires made the one job ' || job_id
      FROM schedule_fires
     WHERE job_id IS NOT NULL
     GROUP BY job_id HAVING count(*) > 1)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: attempts_bounded many
-- The attempts, crashes and lapses of a job stay within their limits.
WITH found (id, text) AS MATERIALIZED (
    -- both:
    SELECT j.id, j.status || ' after ' || j.attempts || ' attempts (of ' || j.max_attempts
           || '), ' || j.crash_count || ' crashes and ' || j.lapse_count || ' lapses in a row'
      FROM ({touched(id, job_id)}) t
      JOIN ingest_jobs j ON j.id = t.id
     WHERE j.attempts > greatest(j.max_attempts, 1)
        OR j.crash_count > %(max_crashes)s::integer OR j.lapse_count > %(max_lapses)s::integer
        OR j.status IN ('queued', 'running')
       AND (j.attempts >= greatest(j.max_attempts, 1)
            OR j.crash_count >= %(max_crashes)s::integer
            OR j.lapse_count >= %(max_lapses)s::integer)
    -- end
)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: off_holds many
-- A worker that is switched OFF claims nothing.
WITH found (id, text) AS MATERIALIZED (
    -- both:
    SELECT e.job_id, 'claimed on ' || e.host_label || ' ' || e.queue || ' at '
           || e.created_at::text || ', OFF since ' || c.updated_at::text
      FROM worker_controls c
      JOIN ingest_job_events e
        ON e.host_label = c.host_label AND c.queue IN (e.queue, 'all') AND e.event_type = 'claimed'
       AND e.created_at >= %(since)s::timestamptz
       AND e.created_at > c.updated_at + %(commit_s)s::float8 * interval '1 second'
       AND (c.until_at IS NULL OR e.created_at < c.until_at)
     WHERE c.desired_state = 'off'
    -- end
)
SELECT id, text FROM found LIMIT %(limit)s;

-- name: runs_advance many
-- A running run has a node, an outbox event or an answer that moves it forward.
WITH found (id, text) AS MATERIALIZED (
    SELECT run_id,
           'running, but nothing of it is queued, running, waiting for input or to be dispatched'
      FROM queue_workflows_stalled_runs(%(sweep_s)s::float8, NULL))
SELECT id, text FROM found LIMIT %(limit)s;

-- name: maps_agree many
-- The counters of a map are those of its items, and a map that ended has no open item.
WITH found (id, text) AS MATERIALIZED (
    SELECT m.run_id, 'map ' || m.node_id || ' counts ' || m.done_items || ' done and ' || m.failed_items
           || ' failed of ' || m.total || ', its items are ' || c.done || ' and ' || c.failed || ' of ' || c.n
      FROM workflow_runs r
      JOIN workflow_run_maps m ON m.run_id = r.id AND m.generation = r.generation
     CROSS JOIN LATERAL (
           SELECT count(*) AS n, count(*) FILTER (WHERE i.state = 'done') AS done,
                  count(*) FILTER (WHERE i.state = 'failed') AS failed
             FROM workflow_map_items i WHERE i.run_id = m.run_id AND i.map_id = m.node_id) c
     WHERE (%(whole)s::boolean OR r.updated_at >= %(since)s::timestamptz OR r.status = 'running')
       AND ((m.done_items, m.failed_items, m.total) IS DISTINCT FROM (c.done, c.failed, c.n)
            OR m.open_items > m.total - m.done_items - m.failed_items)
    UNION ALL
    SELECT m.run_id, 'map ' || m.node_id || ' is completed with ' || m.done_items || ' done and '
           || m.failed_items || ' failed of ' || m.total
      FROM workflow_runs r
      JOIN workflow_run_maps m ON m.run_id = r.id AND m.generation = r.generation
      JOIN workflow_node_jobs j ON j.run_id = m.run_id AND j.node_id = m.node_id
     WHERE (%(whole)s::boolean OR r.updated_at >= %(since)s::timestamptz OR r.status = 'running')
       AND j.status = 'completed' AND j.generation = m.generation
       AND (m.open_items > 0 OR m.done_items + m.failed_items < m.total))
SELECT id, text FROM found LIMIT %(limit)s;

-- name: streams_numbered many
-- The parts of a stream are numbered without a gap from 1 within a claim of its job, and none is
-- stored after that claim has ended.
WITH touched (job_table, id) AS MATERIALIZED (
    SELECT DISTINCT job_table, job_id FROM job_parts WHERE %(whole)s::boolean
    UNION SELECT 'workflow_node_jobs', job_id FROM workflow_node_events
     WHERE NOT %(whole)s::boolean AND job_id IS NOT NULL AND created_at >= %(since)s::timestamptz
    UNION SELECT 'ingest_jobs', job_id FROM ingest_job_events
     WHERE NOT %(whole)s::boolean AND job_id IS NOT NULL AND created_at >= %(since)s::timestamptz
    UNION SELECT 'workflow_node_jobs', id FROM workflow_node_jobs WHERE status = 'running'
    UNION SELECT 'ingest_jobs', id FROM ingest_jobs WHERE status = 'running'),
parts AS MATERIALIZED (
    SELECT t.job_table, t.id, x.*
      FROM touched t
     CROSS JOIN LATERAL (
           SELECT p.claim_no, count(*) AS n, max(p.seq) AS last, max(p.created_at) AS at
             FROM job_parts p
            WHERE p.job_id = t.id AND p.job_table = t.job_table
            GROUP BY p.claim_no OFFSET 0) x),
found (id, text) AS MATERIALIZED (
    SELECT id, 'claim ' || claim_no || ' has ' || n || ' parts up to number ' || last
      FROM parts WHERE n <> last
    UNION ALL
    SELECT p.id, 'it has parts of claim ' || p.claim_no || ', its last claim is '
           || coalesce(j.claim_no::text, 'none')
      FROM parts p
      LEFT JOIN LATERAL ({claim_of(p.job_table, p.id)}) j ON true
     WHERE j.claim_no IS NULL OR p.claim_no > j.claim_no
    UNION ALL
    SELECT p.id, 'a part of claim ' || p.claim_no || ' at ' || p.at::text || ', which ended at '
           || e.ended::text
      FROM parts p
     CROSS JOIN LATERAL (
           SELECT max(v.created_at) AS ended
             FROM workflow_node_jobs j
             JOIN workflow_node_events v
               ON v.run_id = j.run_id AND v.node_id = j.node_id AND v.job_id = j.id
            WHERE p.job_table = 'workflow_node_jobs' AND j.id = p.id AND v.claim_no = p.claim_no
              AND v.event_type IN ('completed', 'failed')
           UNION ALL
           SELECT max(v.created_at) FROM ingest_job_events v
            WHERE p.job_table = 'ingest_jobs' AND v.job_id = p.id AND v.claim_no = p.claim_no
              AND v.event_type IN ('completed', 'failed')) e
     WHERE p.at > e.ended + %(commit_s)s::float8 * interval '1 second')
SELECT id, text FROM found LIMIT %(limit)s;

-- name: steps_agree many
-- A step belongs to a claim that its job has had, one that is done has its end, and no wait outlasts its event.
WITH found (id, text) AS MATERIALIZED (
    SELECT s.job_id, 'step ' || s.name || ' of ' || s.job_table
           || CASE WHEN j.claim_no IS NULL THEN ' outlived its job'
                   WHEN s.claim_no NOT BETWEEN 1 AND j.claim_no
                   THEN ' has claim ' || s.claim_no || ' of ' || j.claim_no
                   WHEN s.crashes > s.attempts
                   THEN ' has ' || s.crashes || ' crashes in ' || s.attempts || ' attempts'
                   ELSE ' is done without an end' END
      FROM job_steps s
      LEFT JOIN LATERAL ({claim_of(s.job_table, s.job_id)}) j ON true
     WHERE (%(whole)s::boolean OR s.started_at >= %(since)s::timestamptz
            OR s.ended_at >= %(since)s::timestamptz)
       AND (j.claim_no IS NULL OR s.claim_no NOT BETWEEN 1 AND j.claim_no OR s.crashes > s.attempts
            OR s.state = 'done' AND s.ended_at IS NULL)
    UNION ALL
    SELECT s.job_id, 'waits for event ' || s.name || ', which was sent at ' || e.created_at::text
      FROM job_steps s
      JOIN events e ON e.name = s.name AND e.key = s.key
     WHERE s.kind = 'event' AND s.state = 'waiting'
       AND greatest(s.started_at, e.created_at)
           <= now() - %(sweep_s)s::float8 * interval '1 second')
SELECT id, text FROM found LIMIT %(limit)s;
