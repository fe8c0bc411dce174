-- List the databases of a server, and lock the ones that tests create.

-- name: projects many
-- Return every database that people use, with the folder that its comment names and its size.
SELECT d.datname AS name, shobj_description(d.oid, 'pg_database') AS folder,
       pg_database_size(d.oid) AS size_bytes
  FROM pg_database d
 WHERE NOT d.datistemplate AND d.datname <> 'postgres'
 ORDER BY d.datname;

-- name: unfinished value
-- Return how many runs are in no terminal state.
SELECT count(*) AS n
  FROM workflow_runs
 WHERE status NOT IN ('completed', 'failed', 'cancelled');

-- name: matching many
-- Return the databases whose names match a regular expression.
SELECT datname AS name FROM pg_database WHERE datname ~ %(pattern)s::text;

-- name: try_lock value
-- Take the advisory lock of a database's name for this session; return whether it was free.
SELECT pg_try_advisory_lock(hashtextextended(%(name)s::text, 0)) AS is_free;

-- name: unlock none
-- Release the advisory lock of a database's name.
SELECT pg_advisory_unlock(hashtextextended(%(name)s::text, 0));

-- name: tables many
-- Return the tables of the current schema.
SELECT c.relname AS name
  FROM pg_class c
 WHERE c.relkind IN ('r', 'p') AND c.relnamespace = current_schema()::regnamespace;
