-- Store, read and delete the logs of attempts.

-- name: write count
-- tables: ingest_jobs workflow_node_jobs
-- Store the logs of several attempts, one element of each array an attempt. Jobs that are gone, or
-- that were claimed again, are left out. A head that is NULL is not written again.
INSERT INTO job_attempt_logs AS l (job_table, job_id, claim_no, head, tail, cut_bytes)
SELECT 'ingest_jobs', w.job_id, w.claim_no, coalesce(w.head, ''), w.tail, w.cut
  FROM unnest(%(jobs)s::text[], %(claims)s::bigint[], %(heads)s::text[], %(tails)s::text[],
              %(cuts)s::bigint[]) AS w (job_id, claim_no, head, tail, cut)
  JOIN ingest_jobs j ON j.id = w.job_id AND j.claim_no = w.claim_no
    ON CONFLICT (job_id, claim_no, job_table) DO UPDATE
   SET head = CASE WHEN excluded.head = '' THEN l.head ELSE excluded.head END,
       tail = excluded.tail, cut_bytes = excluded.cut_bytes, updated_at = now();

-- name: prune count
-- Delete up to `batch` logs of attempts that are older than `days` days.
DELETE FROM job_attempt_logs WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM job_attempt_logs WHERE created_at < now() - %(days)s * interval '1 day'
     LIMIT %(batch)s));

-- name: of_jobs many
-- Return the logs of these jobs' attempts, of one job family.
SELECT job_id, claim_no, head, tail, cut_bytes, updated_at
  FROM job_attempt_logs
 WHERE job_id = ANY (%(jobs)s::text[]) AND job_table = %(table)s;

-- name: nodes_that_logged many
-- Return which nodes of a run wrote to a log since a time, the last to write last. If `since` is
-- NULL, the time does not matter; if `nodes` is NULL, all nodes count. `of_jobs` reads the logs,
-- which may be large.
SELECT j.node_id, j.queue::text, l.job_id, max(l.updated_at) AS updated_at
  FROM workflow_node_jobs j
  JOIN job_attempt_logs l ON l.job_id = j.id AND l.job_table = 'workflow_node_jobs'
 WHERE j.run_id = %(run_id)s
   AND (%(since)s::timestamptz IS NULL OR l.updated_at >= %(since)s::timestamptz)
   AND (%(nodes)s::text[] IS NULL OR j.node_id = ANY (%(nodes)s::text[]))
 GROUP BY j.node_id, j.queue, l.job_id, j.seq ORDER BY updated_at, j.seq;
