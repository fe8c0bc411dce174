-- Store and read the parts that handlers stream under the claims of their jobs.

-- name: add row
-- tables: ingest_jobs workflow_node_jobs
-- Add parts, one element of each array a part, from number `first` on, and wake the readers. Return
-- whether the claim holds, and whether the earlier parts are stored; if not, no part is added. The
-- first part of a claim deletes those of all earlier claims but the last two that have any, so a job
-- that runs again and again stores no more than three attempts.
WITH held AS MATERIALIZED (SELECT j.id FROM ingest_jobs j WHERE {held(j)} FOR SHARE),
stored AS MATERIALIZED (
    SELECT coalesce(max(s.seq), 0) AS last FROM job_parts s
     WHERE s.job_table = 'ingest_jobs' AND s.job_id = %(job)s AND s.claim_no = %(claim)s),
gone AS (
    DELETE FROM job_parts p
     USING held
     WHERE %(first)s = 1 AND p.job_table = 'ingest_jobs' AND p.job_id = held.id
       AND p.claim_no < (
           SELECT max(b.claim_no) FROM job_parts b
            WHERE b.job_table = 'ingest_jobs' AND b.job_id = %(job)s AND b.claim_no < (
                  SELECT max(a.claim_no) FROM job_parts a
                   WHERE a.job_table = 'ingest_jobs' AND a.job_id = %(job)s
                     AND a.claim_no < %(claim)s))),
added AS (
    INSERT INTO job_parts (job_table, job_id, claim_no, seq, name, part)
    SELECT 'ingest_jobs', held.id, %(claim)s, %(first)s + given.n - 1, given.name, given.part::jsonb
      FROM held, stored,
           unnest(%(names)s::text[], %(parts)s::text[]) WITH ORDINALITY AS given (name, part, n)
     WHERE %(first)s <= stored.last + 1
        ON CONFLICT (job_id, job_table, claim_no, seq) DO NOTHING),
notified AS MATERIALIZED (
    SELECT pg_notify('job_parts', left(held.id, 1000)) FROM held)
SELECT EXISTS (SELECT FROM held) AS held, %(first)s <= stored.last + 1 AS follows,
       (SELECT count(*) FROM notified) AS notified
  FROM stored;

-- name: behind many
-- Return the next parts of a job behind a claim and number, of a name if it is given, with the job's status and
-- claim and the place of its last part, as of the same snapshot. Parts beyond `bytes` are left out; `found`
-- counts them too. Returns one row without a part if there is none, and no row if the job does not exist.
SELECT j.status, j.claim_no AS job_claim, e.last_claim, e.last_seq, p.*
  FROM (SELECT 'ingest_jobs' AS job_table, i.id, i.status, i.claim_no FROM ingest_jobs i
         WHERE i.id = %(job)s
         UNION ALL
        SELECT 'workflow_node_jobs', n.id, n.status, n.claim_no FROM workflow_node_jobs n
         WHERE n.id = %(job)s) j
  LEFT JOIN LATERAL (
       SELECT l.claim_no AS last_claim, l.seq AS last_seq
         FROM job_parts l
        WHERE l.job_table = j.job_table AND l.job_id = j.id
        ORDER BY l.claim_no DESC, l.seq DESC
        LIMIT 1) e ON true
  LEFT JOIN LATERAL (
       SELECT d.claim_no, d.seq, d.name, d.part, d.created_at, d.found
         FROM (SELECT c.*, count(*) OVER () AS found,
                      sum(octet_length(c.part)) OVER (ORDER BY c.claim_no, c.seq)
                      - octet_length(c.part) AS bytes_before
                 FROM (SELECT b.claim_no, b.seq, b.name, b.part::text AS part, b.created_at
                         FROM job_parts b
                        WHERE b.job_table = j.job_table AND b.job_id = j.id
                          AND (b.claim_no, b.seq) > (%(claim)s::bigint, %(seq)s::integer)
                          AND (%(name)s::text IS NULL OR b.name = %(name)s::text)
                        ORDER BY b.claim_no, b.seq
                        LIMIT %(limit)s) c) d
        WHERE d.bytes_before < %(bytes)s::bigint) p ON true
 ORDER BY p.claim_no, p.seq;

-- name: job_of_node value
-- Return the id of the job of a node; no row: the run or its node does not exist yet.
SELECT id FROM workflow_node_jobs WHERE run_id = %(run_id)s AND node_id = %(node_id)s;

-- name: streaming_nodes many
-- Return the nodes of a run that have streamed, with the place of the last part of each. `live`: only
-- nodes that have not ended, or ended in the last 10 s. Only `nodes`, unless it is NULL.
SELECT j.id AS job_id, j.node_id, e.claim_no, e.seq
  FROM workflow_node_jobs j
 CROSS JOIN LATERAL (
       SELECT l.claim_no, l.seq
         FROM job_parts l
        WHERE l.job_table = 'workflow_node_jobs' AND l.job_id = j.id
        ORDER BY l.claim_no DESC, l.seq DESC
        LIMIT 1) e
 WHERE j.run_id = %(run_id)s AND j.claim_no > 0
   AND (NOT %(live)s::boolean OR j.finished_at IS NULL OR j.finished_at > now() - interval '10 s')
   AND (%(nodes)s::text[] IS NULL OR j.node_id = ANY (%(nodes)s::text[]))
 ORDER BY j.seq;
