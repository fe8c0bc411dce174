-- Block the jobs of lock keys in queues without workers, and release them.

-- name: served value prepared
-- Return the queues that are not paused and have a live worker that takes jobs, as one array.
-- A worker that was not seen for `stale_s` seconds is not live.
SELECT queue_workflows_served_queues(%(stale_s)s::float8) AS queues;

-- name: block_unserved value prepared
-- Block up to `batch` jobs of a table that keep a lock key from jobs in these served queues
-- and are in none of these queues themselves; return how many.
SELECT queue_workflows_block_unserved(%(table)s, %(queues)s::text[], %(batch)s) AS n;

-- name: unblock_served value prepared
-- Let up to `batch` blocked jobs of a table that are in these served queues wait for their
-- lock keys again; return how many.
SELECT queue_workflows_unblock_served(%(table)s, %(queues)s::text[], %(batch)s) AS n;

-- name: count_by_queue many
-- Return the queues with jobs that are blocked as unserved, by name, and how many jobs of each there are, up to `most` of each
-- family. Those that are served now are left out: their jobs stay blocked until the next sweep. Walks an index from queue to
-- queue, up to 100 of each family.
WITH found AS (
    -- both:
    SELECT * FROM (
        WITH RECURSIVE q (queue) AS (
            (SELECT queue::text FROM ingest_jobs
              WHERE status = 'queued' AND blocked_reason = 'unserved' AND octet_length(queue) >= 0
              ORDER BY blocked_reason, ingest_jobs.queue LIMIT 1)
            UNION ALL
            SELECT (SELECT j.queue::text FROM ingest_jobs j
                     WHERE j.status = 'queued' AND j.blocked_reason = 'unserved'
                       AND octet_length(j.queue) >= 0 AND j.queue > q.queue
                     ORDER BY j.blocked_reason, j.queue LIMIT 1)
              FROM q WHERE q.queue IS NOT NULL)
        SELECT q.queue,
               (SELECT count(*) FROM (
                    SELECT FROM ingest_jobs j
                     WHERE j.status = 'queued' AND j.blocked_reason = 'unserved'
                       AND octet_length(j.queue) >= 0 AND j.queue = q.queue
                     LIMIT %(most)s) c) AS n
          FROM q WHERE q.queue IS NOT NULL LIMIT 100) of_family
    -- end
)
SELECT queue, sum(n)::bigint AS n
  FROM found
 WHERE queue <> ALL ((SELECT queue_workflows_served_queues(%(stale_s)s::float8))::text[])
 GROUP BY queue ORDER BY queue;
