-- Group the jobs that wait.

-- tables: ingest_jobs workflow_node_jobs
-- Return the queued jobs of a family in buckets. It reads p_most of the blocked jobs with a time, and of those without one,
-- and of each of the first 500 queues p_most of the jobs that a worker may claim, fewer where there are over 20 queues.
-- is_more: whether there are more such jobs. reason: the blocked_reason, or 'run_over'. about: the lock key, the partition
-- if its limits count, the event that is awaited, or the host for which a job is kept. first_id: the job that is due or
-- claimed first.
CREATE OR REPLACE FUNCTION queue_workflows_ingest_waiting(p_most integer)
RETURNS TABLE (queue text, reason text, about text, model text, version text, module text, n bigint, first_id text,
               since timestamptz, is_more boolean) LANGUAGE sql STABLE ROWS 100
{by_index()} AS $$
    WITH RECURSIVE walk (queue) AS (
        (SELECT j.queue::text FROM ingest_jobs j WHERE j.status = 'queued' AND j.blocked_reason IS NULL
          ORDER BY j.queue LIMIT 1)
        UNION ALL
        SELECT (SELECT j.queue::text FROM ingest_jobs j
                 WHERE j.status = 'queued' AND j.blocked_reason IS NULL AND j.queue > w.queue
                 ORDER BY j.queue LIMIT 1)
          FROM walk w WHERE w.queue IS NOT NULL),
    queues AS MATERIALIZED (SELECT w.queue FROM walk w WHERE w.queue IS NOT NULL LIMIT 500),
    chosen AS (
        SELECT c.*, q.queue AS scan, row_number() OVER (PARTITION BY q.queue) >= b.most AS is_last
          FROM (SELECT greatest(40, least(p_most, 20 * p_most / greatest(1, count(*)))) AS most FROM queues) b
         CROSS JOIN queues q
         CROSS JOIN LATERAL (
               SELECT {waiting(j)} FROM ingest_jobs j
                WHERE j.queue = q.queue AND j.status = 'queued' AND j.blocked_reason IS NULL
                ORDER BY
                      j.required_version,  -- nodes only
                      j.priority, j.seq LIMIT b.most) c
        UNION ALL
        SELECT c.*, '', row_number() OVER () >= p_most
          FROM (SELECT {waiting(j)} FROM ingest_jobs j
                 WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL AND j.available_at IS NOT NULL
                 ORDER BY j.available_at LIMIT p_most) c
        UNION ALL
        SELECT c.*, NULL, row_number() OVER () >= p_most
          FROM (SELECT {waiting(j)} FROM ingest_jobs j
                 WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL AND j.available_at IS NULL LIMIT p_most) c)
    SELECT c.queue,
           c.blocked_reason,  -- ingest only
           CASE WHEN NOT {live(c)} THEN 'run_over' ELSE c.blocked_reason END,  -- nodes only
           CASE c.blocked_reason WHEN 'locked' THEN c.lock_key
                WHEN 'limited' THEN c.partition_key
                WHEN 'not_due' THEN CASE
                     WHEN c.resume_until = c.available_at AND c.resume_at <= now() THEN c.resume_host
                     ELSE (SELECT s.name FROM job_steps s
                            WHERE s.job_id = c.id AND s.job_table = 'ingest_jobs' AND s.kind = 'event'
                              AND s.state = 'waiting' AND s.claim_no = c.claim_no ORDER BY s.id LIMIT 1) END
                ELSE (SELECT p.partition_key FROM queue_partitions p
                       WHERE p.queue = c.queue AND p.partition_key = c.partition_key
                         AND queue_workflows_is_paused(p.paused_at, p.paused_until))
           END,
           NULL::text, NULL::text, NULL::text,  -- ingest only
           c.required_model, c.required_version, c.node_module,  -- nodes only
           count(*), (array_agg(c.id ORDER BY c.available_at, c.priority, c.seq))[1], min(c.created_at)::timestamptz,
           bool_or(bool_or(c.is_last)) OVER (PARTITION BY c.scan)
      FROM chosen c
     GROUP BY 1, 2, 3, 4, 5, 6, c.scan
$$;
