-- Rows that the engine cannot work on: whether a run or an ingest job ends, its id, the command that ends it, and the
-- fault. Times are compared only: nothing is computed from a value that could be infinite.

-- name: stuck many
-- Return rows that keep failing, are blocked as `set_aside`, or are due for `late_s` seconds although a sweep takes such rows
-- every few seconds, at most `limit` of each cause.
(SELECT 'run' AS kind, id, 'cancel' AS command,
        'it could not start ' || start_attempts || ' times: ' || coalesce(left(error, 300), '?') AS text
   FROM workflow_runs
  WHERE status = 'queued' AND mode = 'node' AND start_attempts <> 0
  LIMIT %(limit)s)
UNION ALL
(SELECT 'run', id, 'cancel', 'its start is due and was not delayed'
   FROM workflow_runs
  WHERE status = 'queued' AND mode = 'node' AND {is_late(available_at)}
  LIMIT %(limit)s)
UNION ALL
(SELECT 'run', run_id, 'cancel', 'the dispatch of ' || kind || ' of node ' || node_id || ' failed ' || attempts
        || ' times: ' || coalesce(left(error, 300), '?')
   FROM workflow_dispatch_events
  WHERE processed_at IS NULL AND attempts <> 0
  LIMIT %(limit)s)
UNION ALL
(SELECT 'run', run_id, 'cancel', 'the answer ' || id || ' to node ' || node_id || ' was not taken in ' || attempts
        || ' tries: ' || coalesce(left(error, 300), '?')
   FROM workflow_input_submissions
  WHERE status = 'pending' AND attempts <> 0 AND error IS NOT NULL
  LIMIT %(limit)s)
UNION ALL
(SELECT 'run', coalesce(j.run_id, t.job_id), 'cancel',
        'the wait of node ' || coalesce(j.node_id, '?') || ' is over and could not be ended'
   FROM workflow_input_timeouts t
   LEFT JOIN workflow_node_jobs j ON j.id = t.job_id
  WHERE {is_late(t.due_at)}
  LIMIT %(limit)s)
UNION ALL
-- both:
(SELECT {owner()} 'is due and could not be promoted'
   FROM ingest_jobs
  WHERE status = 'queued' AND blocked_reason = 'not_due' AND {is_late(available_at)}
  LIMIT %(limit)s)
UNION ALL
(SELECT {owner()} 'is blocked as set_aside: the database refuses to run it and to fail it'
   FROM ingest_jobs
  WHERE status = 'queued' AND blocked_reason = 'set_aside'
  LIMIT %(limit)s)
UNION ALL
(SELECT
        'job', id, 'jobs cancel', 'its lapsed lease'  -- ingest only
        'run', run_id, 'cancel', 'the lapsed lease of node ' || node_id  -- nodes only
        || ' could not be taken back'
   FROM ingest_jobs
  WHERE status = 'running' AND {is_late(lease_expires_at)}
  LIMIT %(limit)s)
-- end
ORDER BY kind DESC;

-- name: out_of_range many
-- Return rows that have not ended and have a time, counter or payload out of range. Reads `examined` rows of each table.
(SELECT 'run' AS kind, t.id, 'cancel' AS command, {why_bad(c)} AS text
   FROM (SELECT * FROM workflow_runs
          WHERE mode = 'node' AND NOT queue_workflows_is_terminal_run(status)
          LIMIT %(examined)s) t
  CROSS JOIN LATERAL (
        SELECT * FROM (VALUES
               ('created_at', t.created_at, NULL::bigint, NULL::jsonb), ('queued_at', t.queued_at, NULL, NULL),
               ('available_at', t.available_at, NULL, NULL), ('started_at', t.started_at, NULL, NULL),
               ('generation', NULL, t.generation, NULL), ('start_attempts', NULL, t.start_attempts, NULL),
               ('context', NULL, NULL, t.context), ('definition', NULL, NULL, t.definition)) v (name, at, n, value)
         WHERE {is_bad(v)} LIMIT 1) c
  LIMIT %(limit)s)
UNION ALL
(SELECT 'run', t.run_id, 'cancel', {why_bad(c)}
   FROM (SELECT * FROM workflow_input_submissions
          WHERE status IN ('pending', 'processing')
          LIMIT %(examined)s) t
  CROSS JOIN LATERAL (
        SELECT * FROM (VALUES
               ('created_at', t.created_at, NULL::bigint, NULL::jsonb), ('available_at', t.available_at, NULL, NULL),
               ('claimed_at', t.claimed_at, NULL, NULL), ('attempts', NULL, t.attempts, NULL),
               ('value', NULL, NULL, t.value)) v (name, at, n, value)
         WHERE {is_bad(v)} LIMIT 1) c
  LIMIT %(limit)s)
UNION ALL
-- both:
(SELECT
        'job', t.id, 'jobs delete',  -- ingest only
        'run', t.run_id, 'cancel',  -- nodes only
        {why_bad(c)}
   FROM (SELECT * FROM ingest_jobs
          WHERE status IN ('queued', 'running', 'awaiting_input')
          LIMIT %(examined)s) t
  CROSS JOIN LATERAL (
        SELECT * FROM (VALUES
               ('created_at', t.created_at, NULL::bigint, NULL::jsonb), ('available_at', t.available_at, NULL, NULL),
               ('started_at', t.started_at, NULL, NULL), ('lease_expires_at', t.lease_expires_at, NULL, NULL),
               ('claim_no', NULL, t.claim_no, NULL), ('attempts', NULL, t.attempts, NULL),
               ('crash_count', NULL, t.crash_count, NULL), ('lapse_count', NULL, t.lapse_count, NULL),
               ('generation', NULL, t.generation, NULL), ('policy', NULL, NULL, t.policy),
               ('args', NULL, NULL, t.args), ('headers', NULL, NULL, t.headers)) v (name, at, n, value)  -- ingest only
               ('inputs', NULL, NULL, t.inputs), ('input_template', NULL, NULL, t.input_template)) v (name, at, n, value)  -- nodes only
         WHERE {is_bad(v)} LIMIT 1) c
  LIMIT %(limit)s)
-- end
ORDER BY kind DESC;
