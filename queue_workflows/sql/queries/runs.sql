-- Insert, read, start, end, reopen and delete runs.

-- name: submit row
-- Insert a queued run and return its row. It names only columns that a role for `submit` may
-- insert, see docs/security.md.
INSERT INTO workflow_runs (id, workflow_name, parcel_id, out_dir, priority, context, headers)
VALUES (%(run_id)s, %(workflow_name)s, %(parcel_id)s, %(out_dir)s, %(priority)s,
        %(context)s::jsonb, %(headers)s::jsonb)
RETURNING *;

-- name: insert row
-- Insert a run with a status and a mode of the caller's choice and return its row.
INSERT INTO workflow_runs (id, workflow_name, parcel_id, out_dir, priority, context, status, mode,
                           headers)
VALUES (%(run_id)s, %(workflow_name)s, %(parcel_id)s, %(out_dir)s, %(priority)s,
        %(context)s::jsonb, %(status)s, %(mode)s, %(headers)s::jsonb)
RETURNING *;

-- name: get one
-- Return a run. Returns no row if the run does not exist.
SELECT * FROM workflow_runs WHERE id = %(run_id)s;

-- name: output value
-- Return the output of a run. Returns no row if it has none, or has not completed.
SELECT context_delta AS output FROM workflow_node_jobs
 WHERE run_id = %(run_id)s AND node_id = '__output__' AND status = 'completed';

-- name: delete count
-- Delete a run; its jobs, files, events and answers go with it by their foreign keys.
DELETE FROM workflow_runs WHERE id = %(run_id)s;

-- name: update one
-- Set the columns that `given` names and return the row. Returns no row if the run does not exist,
-- or the status of a run that is over would change. `failed` or `cancelled` to `queued` reopens a
-- run. A column that is not given keeps its stored value as it is, also a large one.
UPDATE workflow_runs SET
       {given(parcel_id, text)},
       {given(workflow_name, text)},
       {given(status, text)},
       {given(priority, smallint)},
       {given(current_step_id, text)},
       {given(progress_pct, real)},
       {given(steps_done, jsonb)},
       {given(context, jsonb)},
       {given(input_spec, jsonb)},
       {given(error, text)},
       {given(out_dir, text)},
       {given(mode, text)},
       {given(resume_count, smallint)},
       {given(queued_at, timestamptz)},
       {given(started_at, timestamptz)},
       {given(finished_at, timestamptz)},
       {given(available_at, timestamptz)},
       updated_at = now()
 WHERE id = %(run_id)s
   AND (%(status)s::text IS NULL OR mode <> 'node' OR status = %(status)s::text
        OR NOT queue_workflows_is_terminal_run(status)
        OR (%(status)s::text = 'queued' AND status IN ('failed', 'cancelled')))
RETURNING *;

-- name: startable many prepared
-- Return the queued runs that may start now, in the order in which they should, as `head` returns
-- them, without the runs `set_aside`. `undefined`: also the runs that have no definition yet.
{startable()};

-- name: startable_if_free many prepared
-- Return runs as `startable` does, except locked runs.
{startable()} FOR NO KEY UPDATE SKIP LOCKED;

-- name: undefined column
-- Return the ids of queued runs that may start now and have no definition yet.
SELECT id FROM workflow_runs
 WHERE status = 'queued' AND mode = 'node' AND available_at IS NULL AND definition IS NULL
 ORDER BY priority, queued_at, id LIMIT %(limit)s;

-- name: head one prepared
-- Return a run without its definition and context. Returns no row if the run does not exist. `born`
-- never raises, as the cast of an infinite time would. Each change of the row gives it another
-- `version`. A run that was deleted and submitted again has another `born`.
SELECT {head()}, xmin::text AS version
  FROM workflow_runs WHERE id = %(run_id)s;

-- name: lock one prepared
-- Lock the row of a run against other dispatchers and return it as `head` does. Inserts of rows
-- that reference the run pass this lock. Returns no row if the run does not exist.
SELECT {head()}
  FROM workflow_runs WHERE id = %(run_id)s FOR NO KEY UPDATE;

-- name: lock_if_free one prepared
-- Lock a run as `lock` does. Returns no row if the run does not exist, or another transaction has it locked.
SELECT {head()}
  FROM workflow_runs WHERE id = %(run_id)s FOR NO KEY UPDATE SKIP LOCKED;

-- name: definition value prepared
-- Return the definition of a run, frozen at its first start; NULL before that.
SELECT definition FROM workflow_runs WHERE id = %(run_id)s;

-- name: definition_texts many prepared
-- Return the definitions that these runs have, as text, if they are at most `most` bytes as stored (of any size if
-- NULL). The same definition is always the same text. LIMIT forces a look-up per run, since a plan that was made for a
-- small table would read the whole table later.
SELECT i.id, r.text
  FROM unnest(%(ids)s::text[]) AS i (id)
 CROSS JOIN LATERAL (
       SELECT definition::text AS text FROM workflow_runs
        WHERE id = i.id AND (pg_column_size(definition) > %(most)s::integer) IS NOT TRUE LIMIT 1) r
 WHERE r.text IS NOT NULL;

-- name: context_type value prepared
-- Return the JSON type of a run's context, as `object`.
SELECT jsonb_typeof(context) AS kind FROM workflow_runs WHERE id = %(run_id)s;

-- name: context value prepared
-- Return a run's own context, without the outputs of its nodes.
SELECT context FROM workflow_runs WHERE id = %(run_id)s;

-- name: freeze_definition count prepared
-- Store the definition of a run that has none, and still has this workflow.
UPDATE workflow_runs
   SET definition = %(definition)s::jsonb, definition_hash = %(digest)s, updated_at = now()
 WHERE id = %(run_id)s AND definition IS NULL AND workflow_name = %(workflow)s;

-- name: start count prepared
-- Change a queued run to running.
UPDATE workflow_runs
   SET status = 'running', started_at = coalesce(started_at, now()), error = NULL,
       available_at = NULL, updated_at = now()
 WHERE id = %(run_id)s AND status = 'queued';

-- name: start_again none
-- Queue a run that is not over again, at its place, so that its start opens the remaining items of maps.
UPDATE workflow_runs SET status = 'queued', updated_at = now()
 WHERE id = %(run_id)s AND NOT queue_workflows_is_terminal_run(status);

-- name: start_fresh value prepared
-- Start a run that never started: freeze its definition, change it to running, insert its first nodes. Return how
-- many nodes it inserted, or NULL if the run has changed since the caller read it, or is locked. Returns no row
-- if the run does not exist, its context is no object, or it has changed since the caller read its `version`.
SELECT queue_workflows_start_run(r.id, %(generation)s::integer, %(born)s::bigint,
                                 %(definition)s::jsonb, %(digest)s::text, %(nodes)s::jsonb,
                                 %(out_dir)s::text) AS n
  FROM workflow_runs r
 WHERE r.id = %(run_id)s AND jsonb_typeof(r.context) = 'object' AND r.xmin::text = %(version)s::text;

-- name: set_out_dir value prepared
-- Store the folder of a run that has none, and return the run's folder.
UPDATE workflow_runs SET out_dir = coalesce(out_dir, %(out_dir)s) WHERE id = %(run_id)s
RETURNING out_dir;

-- name: complete count prepared
-- Change a run that has started and is not over to completed.
UPDATE workflow_runs SET {run_completed()}
 WHERE id = %(run_id)s AND status <> 'queued'
   AND NOT queue_workflows_is_terminal_run(status);

-- name: fail count
-- Change a run that is not over to failed; a trigger cancels its waiting nodes.
UPDATE workflow_runs
   SET status = 'failed', finished_at = now(), error = %(error)s, updated_at = now()
 WHERE id = %(run_id)s AND NOT queue_workflows_is_terminal_run(status);

-- name: cancel one
-- Change a run that is not over to cancelled and return its row; a trigger cancels its waiting
-- nodes and requests that the running ones end.
UPDATE workflow_runs SET status = 'cancelled', finished_at = now(), updated_at = now(),
       error = coalesce(%(error)s::text, error)
 WHERE id = %(run_id)s AND NOT queue_workflows_is_terminal_run(status)
RETURNING *;

-- name: running column
-- Return the ids of running runs after the id `after`, in their order. OFFSET 0 keeps it from
-- walking the runs that have ended.
SELECT id FROM (SELECT id FROM workflow_runs
                 WHERE status = 'running' AND mode = 'node' AND id > %(after)s OFFSET 0) r
 ORDER BY id LIMIT %(limit)s;

-- name: stalled column
-- Of these runs, return the ones that cannot move forward; see `queue_workflows_stalled_runs`.
-- `quiet_s`: seconds without an ended node before a run counts.
SELECT run_id FROM queue_workflows_stalled_runs(%(quiet_s)s::float8, %(ids)s::text[]);

-- name: stopper one
-- Return the node that keeps a run from going on, with its status, `deleted` if it has no row any
-- more. A node that ends the run comes first. A failed item is left out, because its map decides
-- whether the run fails. Also left out are nodes of an earlier generation, which run again, and
-- nodes that were deleted before an upgrade, since it queues them again if its definition has them.
SELECT node_id, status, error
  FROM (SELECT j.node_id, j.status::text, j.error
          FROM workflow_runs r
          JOIN workflow_node_jobs j ON j.run_id = r.id
         WHERE r.id = %(run_id)s AND NOT j.status IN ('completed', 'skipped')
           AND j.generation = r.generation
           AND NOT (j.status = 'failed' AND strpos(j.node_id, '[') > 0)
         UNION ALL
        SELECT e.node_id, 'deleted', NULL
          FROM workflow_runs r
          JOIN workflow_node_events e ON e.run_id = r.id
         WHERE r.id = %(run_id)s AND e.event_type = 'cancelled'
           AND e.detail @> jsonb_build_object('reason', 'deleted', 'generation', r.generation,
                                              'revision', r.revision)
           AND NOT EXISTS (SELECT FROM workflow_node_jobs j
                            WHERE j.run_id = r.id AND j.node_id = e.node_id)) s
 ORDER BY CASE status WHEN 'failed' THEN 1 WHEN 'cancelled' THEN 2 WHEN 'deleted' THEN 3 ELSE 4 END,
          node_id
 LIMIT 1;

-- name: delay_start value
-- Count a start that failed and make the run due `after_s` seconds from now. Return how many
-- starts failed. A count that no engine wrote never overflows.
UPDATE workflow_runs
   SET error = %(error)s, start_attempts = least(greatest(start_attempts, 0), 999999) + 1,
       available_at = now() + %(after_s)s * interval '1 second', updated_at = now()
 WHERE id = %(run_id)s AND status = 'queued'
RETURNING start_attempts;

-- name: reopen one
-- Queue a failed or cancelled run again and return its row; a trigger raises its generation.
UPDATE workflow_runs SET status = 'queued', updated_at = now()
 WHERE id = %(run_id)s AND status IN ('failed', 'cancelled')
RETURNING *;

-- name: reopen_two_generations_on one
-- Queue a run that is over again, two generations on, and return its row. The nodes that
-- `cancel_nodes_again` changes get the generation in between.
UPDATE workflow_runs
   SET status = 'queued', generation = generation + 2, finished_at = NULL, error = NULL,
       start_attempts = 0, available_at = NULL, queued_at = now(), updated_at = now()
 WHERE id = %(run_id)s AND queue_workflows_is_terminal_run(status)
RETURNING *;

-- name: cancel_nodes_again none
-- Change nodes of a reopened run to cancelled in an earlier generation, so that its start opens
-- them. No other write could take them out of a terminal state.
UPDATE workflow_node_jobs SET status = 'cancelled', generation = %(generation)s
 WHERE run_id = %(run_id)s AND node_id = ANY (%(nodes)s) AND status <> 'running';

-- name: withdraw_cancel_requests none
-- Let the nodes of a reopened run that still run go on, as the guard of a reopened run does.
UPDATE workflow_node_jobs SET cancel_requested_at = NULL
 WHERE run_id = %(run_id)s AND status = 'running' AND cancel_requested_at IS NOT NULL;

-- name: requeue_running column
-- Queue every running run again, at the front, and count a resume of each; return their ids.
UPDATE workflow_runs
   SET status = 'queued', priority = least(priority, 10),
       resume_count = least(greatest(resume_count, 0), 29999) + 1, queued_at = now(),
       updated_at = now()
 WHERE status = 'running' AND mode = 'node'
RETURNING id;

-- name: newest many unprepared
-- Return a page of the newest runs, each with `nodes`, the number of its nodes by status, and `nodes_total`, the number
-- of the nodes of its definition and of the items of its maps. A filter that is NULL matches every run; `low` and `high`
-- are the range of UUIDs that begin with `text`. `before`, `before_id`: only runs after this one in the order of the
-- list. `most`: how many runs are examined at most. If these are not enough, the last row is the one at the `place`
-- `most`, which is in the list only if it `fits`. `by_workflow`: they are of the workflow and not of the status, if both
-- are given. A plan that was kept would be the one of a smaller table.
SELECT f.fits, f.place, f.at AS last_at, f.run_id AS last_id, r.id, r.workflow_name, r.status, r.priority, r.error, r.out_dir,
       r.mode, r.created_at, r.started_at, r.finished_at, r.generation, coalesce(n.counts, '{}') AS nodes,
       r.own_nodes + coalesce(n.of_items, 0) AS nodes_total
  FROM queue_workflows_find_runs(
           %(status)s, %(workflow)s, coalesce(%(since)s, now() - %(since_ago)s::interval),
           coalesce(%(until)s, now() - %(until_ago)s::interval), %(text)s, %(low)s, %(high)s, %(inputs)s::jsonb,
           %(before)s, %(before_id)s, %(limit)s, %(most)s, %(by_workflow)s, %(schedule)s, %(machine)s) f
  LEFT JOIN LATERAL (
       SELECT id, workflow_name, status, priority, error, out_dir, mode, created_at, started_at, finished_at, generation,
              CASE jsonb_typeof(definition -> 'nodes') WHEN 'array' THEN jsonb_array_length(definition -> 'nodes') END
              AS own_nodes
         FROM workflow_runs WHERE id = f.run_id LIMIT 1) r ON f.fits
  LEFT JOIN LATERAL (
       SELECT jsonb_object_agg(c.status, c.n) AS counts, sum(c.items)::bigint AS of_items
         FROM (SELECT status::text, count(*) AS n, count(*) FILTER (WHERE strpos(node_id, '[') > 0) AS items
                 FROM workflow_node_jobs WHERE run_id = f.run_id GROUP BY 1) c) n ON f.fits
 ORDER BY f.at DESC, f.run_id COLLATE "C";
