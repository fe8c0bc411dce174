-- name: write
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

-- name: prune
-- Delete up to `batch` logs of attempts that are older than `days` days.
DELETE FROM job_attempt_logs WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM job_attempt_logs WHERE created_at < now() - %(days)s * interval '1 day'
     LIMIT %(batch)s));
