-- Rows that the engine cannot work on. Each `stuck_` statement returns rows that keep
-- failing, are blocked as `set_aside`, or are due for `late_s` seconds although a sweep takes such
-- rows every few seconds: the id of the run or ingest job to end, and what is wrong. Times are compared only:
-- nothing is computed from a value that could be infinite.

-- name: stuck_starts many
-- Return runs whose start failed.
SELECT id,
       'it could not start ' || start_attempts || ' times: ' || coalesce(left(error, 300), '?')
       AS text
  FROM workflow_runs
 WHERE status = 'queued' AND mode = 'node' AND start_attempts <> 0
 LIMIT %(limit)s;

-- name: stuck_late_starts many
-- Return runs whose delayed start is due.
SELECT id, 'its start is due and was not delayed' AS text
  FROM workflow_runs
 WHERE status = 'queued' AND mode = 'node'
   AND available_at <= now() - %(late_s)s::float8 * interval '1 second'
 LIMIT %(limit)s;

-- name: stuck_events many
-- Return runs with an outbox event that could not be dispatched.
SELECT run_id AS id,
       'the dispatch of ' || kind || ' of node ' || node_id || ' failed ' || attempts
       || ' times: ' || coalesce(left(error, 300), '?') AS text
  FROM workflow_dispatch_events
 WHERE processed_at IS NULL AND attempts <> 0
 LIMIT %(limit)s;

-- name: stuck_answers many
-- Return runs with an answer that could not be taken.
SELECT run_id AS id,
       'the answer ' || id || ' to node ' || node_id || ' was not taken in ' || attempts
       || ' tries: ' || coalesce(left(error, 300), '?') AS text
  FROM workflow_input_submissions
 WHERE status = 'pending' AND attempts <> 0 AND error IS NOT NULL
 LIMIT %(limit)s;

-- name: stuck_input_timeouts many
-- Return runs with an input node whose wait is over and was not ended.
SELECT coalesce(j.run_id, t.job_id) AS id,
       'the wait of node ' || coalesce(j.node_id, '?') || ' is over and could not be ended' AS text
  FROM workflow_input_timeouts t
  LEFT JOIN workflow_node_jobs j ON j.id = t.job_id
 WHERE t.due_at <= now() - %(late_s)s::float8 * interval '1 second'
 LIMIT %(limit)s;

-- name: stuck_delayed many
-- tables: ingest_jobs workflow_node_jobs
-- Return delayed ingest jobs that are due, or the runs of such nodes.
SELECT
       id, 'it'  -- ingest only
       run_id AS id, 'node ' || node_id  -- nodes only
       || ' is due and could not be promoted' AS text
  FROM ingest_jobs
 WHERE status = 'queued' AND blocked_reason = 'not_due'
   AND available_at <= now() - %(late_s)s::float8 * interval '1 second'
 LIMIT %(limit)s;

-- name: stuck_set_aside many
-- tables: ingest_jobs workflow_node_jobs
-- Return ingest jobs, or the runs of nodes, that no claim finds, as they could neither run nor fail.
SELECT
       id, 'it'  -- ingest only
       run_id AS id, 'node ' || node_id  -- nodes only
       || ' is blocked as set_aside: the database refuses to run it and to fail it' AS text
  FROM ingest_jobs
 WHERE status = 'queued' AND blocked_reason = 'set_aside'
 LIMIT %(limit)s;

-- name: stuck_lapsed many
-- tables: ingest_jobs workflow_node_jobs
-- Return running ingest jobs whose lease lapsed, or the runs of such nodes.
SELECT
       id, 'its lapsed lease'  -- ingest only
       run_id AS id, 'the lapsed lease of node ' || node_id  -- nodes only
       || ' could not be taken back' AS text
  FROM ingest_jobs
 WHERE status = 'running'
   AND lease_expires_at <= now() - %(late_s)s::float8 * interval '1 second'
 LIMIT %(limit)s;

-- name: out_of_range_runs many
-- Return unfinished runs that have a time, counter or payload out of range. Reads `examined`
-- of them.
SELECT b.id, b.text
  FROM (SELECT t.id, coalesce(
              (SELECT c.name || ' is out of range: ' || c.value
                 FROM (VALUES ('created_at', t.created_at), ('queued_at', t.queued_at),
                              ('available_at', t.available_at), ('started_at', t.started_at)) c (name, value)
                WHERE {is_no_time(c.value)} LIMIT 1),
              (SELECT c.name || ' is out of range: ' || c.value
                 FROM (VALUES ('generation', t.generation), ('start_attempts', t.start_attempts)) c (name, value)
                WHERE {is_no_count(c.value)} LIMIT 1),
              (SELECT c.name || ' is nested too deep, or has a number of too many digits'
                 FROM (VALUES ('context', t.context), ('definition', t.definition)) c (name, value)
                WHERE {is_too_deep(c.value)} LIMIT 1)) AS text
          FROM (SELECT * FROM workflow_runs
                 WHERE mode = 'node' AND NOT queue_workflows_is_terminal_run(status)
                 LIMIT %(examined)s) t) b
 WHERE b.text IS NOT NULL
 LIMIT %(limit)s;

-- name: out_of_range_jobs many
-- tables: ingest_jobs workflow_node_jobs
-- As `out_of_range_runs`, for ingest jobs and nodes that have not ended. Of nodes returns the runs.
SELECT b.id, b.text
  FROM (SELECT
               t.run_id AS  -- nodes only
               id, coalesce(
              (SELECT c.name || ' is out of range: ' || c.value
                 FROM (VALUES ('created_at', t.created_at), ('available_at', t.available_at),
                              ('started_at', t.started_at), ('lease_expires_at', t.lease_expires_at)) c (name, value)
                WHERE {is_no_time(c.value)} LIMIT 1),
              (SELECT c.name || ' is out of range: ' || c.value
                 FROM (VALUES ('claim_no', t.claim_no), ('attempts', t.attempts), ('crash_count', t.crash_count),
                              ('lapse_count', t.lapse_count), ('generation', t.generation)) c (name, value)
                WHERE {is_no_count(c.value)} LIMIT 1),
              (SELECT c.name || ' is nested too deep, or has a number of too many digits'
                 FROM (VALUES
                              ('args', t.args), ('headers', t.headers),  -- ingest only
                              ('inputs', t.inputs), ('input_template', t.input_template),  -- nodes only
                              ('policy', t.policy)) c (name, value)
                WHERE {is_too_deep(c.value)} LIMIT 1)) AS text
          FROM (SELECT * FROM ingest_jobs
                 WHERE status IN ('queued', 'running', 'awaiting_input')
                 LIMIT %(examined)s) t) b
 WHERE b.text IS NOT NULL
 LIMIT %(limit)s;

-- name: out_of_range_answers many
-- As `out_of_range_runs`, for answers that are not taken yet. Returns the runs of their
-- nodes.
SELECT b.id, b.text
  FROM (SELECT t.run_id AS id, coalesce(
              (SELECT c.name || ' is out of range: ' || c.value
                 FROM (VALUES ('created_at', t.created_at), ('available_at', t.available_at),
                              ('claimed_at', t.claimed_at)) c (name, value)
                WHERE {is_no_time(c.value)} LIMIT 1),
              CASE WHEN {is_no_count(t.attempts)} THEN 'attempts is out of range: ' || t.attempts END,
              CASE WHEN {is_too_deep(t.value)}
                   THEN 'value is nested too deep, or has a number of too many digits' END) AS text
          FROM (SELECT * FROM workflow_input_submissions
                 WHERE status IN ('pending', 'processing')
                 LIMIT %(examined)s) t) b
 WHERE b.text IS NOT NULL
 LIMIT %(limit)s;
