-- Make delayed jobs and runs claimable whose time has come, and admit waiters that were missed.

-- name: due_jobs many
-- tables: ingest_jobs workflow_node_jobs
-- Lock and return up to 1,000 delayed jobs whose time has come, of `ids` (all if NULL) and not in `aside`, the earliest
-- first.
SELECT j.id FROM ingest_jobs j
 WHERE j.status = 'queued' AND j.blocked_reason = 'not_due' AND j.available_at <= now() AND {chosen(j)}
 ORDER BY j.available_at LIMIT 1000 FOR UPDATE SKIP LOCKED;

-- name: promote_jobs many
-- tables: ingest_jobs workflow_node_jobs
-- Make jobs claimable, which the caller has locked; return their ids.
UPDATE ingest_jobs SET blocked_reason = NULL, available_at = NULL
 WHERE id = ANY (%(ids)s::text[]) RETURNING id;

-- name: due_runs many
-- Do as `due_jobs`, for delayed runs.
SELECT r.id FROM workflow_runs r
 WHERE r.status = 'queued' AND r.mode = 'node' AND r.available_at <= now() AND {chosen(r)}
 ORDER BY r.available_at LIMIT 1000 FOR UPDATE SKIP LOCKED;

-- name: promote_runs many
-- Let orchestrators start runs, which the caller has locked; return their ids.
UPDATE workflow_runs SET available_at = NULL WHERE id = ANY (%(ids)s::text[]) RETURNING id;

-- name: admit_missed_waiters value prepared
-- Admit the first waiter of each lock key that no admitted job has, of both job families, and
-- return how many. The families stand in the order in which a commit takes their locks. A commit
-- that gives up a key admits the next waiter; this statement finds the jobs that were missed.
SELECT queue_workflows_mend_turns('ingest_jobs')
       + queue_workflows_mend_turns('workflow_node_jobs') AS n;
