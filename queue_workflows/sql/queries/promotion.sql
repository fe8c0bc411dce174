-- Make delayed jobs and runs claimable whose time has come, and admit waiters that were missed.

-- name: promote_jobs many
-- tables: ingest_jobs workflow_node_jobs
-- Promote up to 1,000 delayed jobs whose time has come, the earliest first: they can be claimed
-- from now on. Return their ids.
WITH due AS MATERIALIZED (
    SELECT id FROM ingest_jobs
     WHERE status = 'queued' AND blocked_reason = 'not_due' AND available_at <= now()
     ORDER BY available_at LIMIT 1000 FOR UPDATE SKIP LOCKED)
UPDATE ingest_jobs j SET blocked_reason = NULL, available_at = NULL
 WHERE j.id = ANY (ARRAY(SELECT id FROM due))
RETURNING j.id;

-- name: due_jobs many
-- tables: ingest_jobs workflow_node_jobs
-- Return the ids that `promote_jobs` would promote, without those of `aside`.
SELECT id FROM ingest_jobs
 WHERE status = 'queued' AND blocked_reason = 'not_due' AND available_at <= now()
   AND id <> ALL (%(aside)s::text[])
 ORDER BY available_at LIMIT 1000;

-- name: promote_these_jobs many
-- tables: ingest_jobs workflow_node_jobs
-- Promote those of these jobs whose time has come. Return their ids.
WITH due AS MATERIALIZED (
    SELECT id FROM ingest_jobs
     WHERE id = ANY (%(ids)s::text[])
       AND (status = 'queued' AND blocked_reason = 'not_due' AND available_at <= now()) IS TRUE
       FOR UPDATE SKIP LOCKED)
UPDATE ingest_jobs j SET blocked_reason = NULL, available_at = NULL
 WHERE j.id = ANY (ARRAY(SELECT id FROM due))
RETURNING j.id;

-- name: promote_runs many
-- Promote up to 1,000 delayed runs whose time has come, the earliest first: an orchestrator may
-- start them from now on. Return their ids.
WITH due AS MATERIALIZED (
    SELECT id FROM workflow_runs
     WHERE status = 'queued' AND mode = 'node' AND available_at <= now()
     ORDER BY available_at LIMIT 1000 FOR UPDATE SKIP LOCKED)
UPDATE workflow_runs r SET available_at = NULL
 WHERE r.id = ANY (ARRAY(SELECT id FROM due))
RETURNING r.id;

-- name: due_runs many
-- Return the ids that `promote_runs` would promote, without those of `aside`.
SELECT id FROM workflow_runs
 WHERE status = 'queued' AND mode = 'node' AND available_at <= now()
   AND id <> ALL (%(aside)s::text[])
 ORDER BY available_at LIMIT 1000;

-- name: promote_these_runs many
-- Promote those of these runs whose time has come. Return their ids.
WITH due AS MATERIALIZED (
    SELECT id FROM workflow_runs
     WHERE id = ANY (%(ids)s::text[])
       AND (status = 'queued' AND mode = 'node' AND available_at <= now()) IS TRUE
       FOR UPDATE SKIP LOCKED)
UPDATE workflow_runs r SET available_at = NULL
 WHERE r.id = ANY (ARRAY(SELECT id FROM due))
RETURNING r.id;

-- name: admit_missed_waiters value prepared
-- Admit the first waiter of each lock key that no admitted job has, of both job families, and
-- return how many. The families stand in the order in which a commit takes their locks.
-- A commit that gives up a key admits the next waiter; this statement finds what it missed.
SELECT queue_workflows_mend_turns('ingest_jobs')
       + queue_workflows_mend_turns('workflow_node_jobs') AS n;
