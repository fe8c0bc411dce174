-- Block the jobs of lock keys in queues without workers, and release them.

-- name: served value prepared
-- Return the queues that are not paused and have a live worker that takes jobs, as one array.
-- A worker that was not seen for `stale_s` seconds is not live.
SELECT queue_workflows_served_queues(%(stale_s)s::float8) AS queues;

-- name: block_unserved value prepared
-- Block up to `batch` jobs of a table that hold a lock key for which jobs in these served queues
-- wait, and that are in other queues themselves; return how many.
SELECT queue_workflows_block_unserved(%(table)s, %(queues)s::text[], %(batch)s) AS n;

-- name: unblock_served value prepared
-- Let up to `batch` blocked jobs of a table that are in these served queues wait for their
-- lock keys again; return how many.
SELECT queue_workflows_unblock_served(%(table)s, %(queues)s::text[], %(batch)s) AS n;
