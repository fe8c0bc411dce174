-- The lock and the ledger of a chain of migrations. Each statement runs without our schema.
-- `ledger` is the name of the chain's table, as it is stored in the catalog.

-- name: try_lock value
-- Take the advisory lock of a chain if it is free, for this session or for this transaction
-- (`is_local`); return whether it is ours.
SELECT CASE WHEN %(is_local)s::bool THEN pg_try_advisory_xact_lock(c.key)
            ELSE pg_try_advisory_lock(c.key) END AS is_ours
  FROM hashtextextended('queue_workflows.schema.' || %(ledger)s::text, 0) AS c (key);

-- name: lock_holders many
-- Return the sessions of this database that hold the advisory lock of a chain.
SELECT a.pid, a.usename
  FROM pg_locks l
  JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND ((l.classid::bigint << 32) | l.objid::bigint)
       = hashtextextended('queue_workflows.schema.' || %(ledger)s::text, 0);

-- name: unlock none
-- Release every advisory lock of this session.
SELECT pg_advisory_unlock_all();

-- name: ledger_is_whole value
-- Return whether a ledger exists and has every column that this code reads.
SELECT count(*) = 4 AS is_whole
  FROM pg_attribute
 WHERE attrelid = to_regclass(quote_ident(%(ledger)s::text))
   AND attname IN ('version', 'applied_at', 'checksum', 'compatible_with');

-- name: of_others many
-- Return the versions above 12 in the ledger of our own chain, lowest first, if other code has
-- applied the first of them. Ours records a checksum; the ledger of 0.3.0 has no such column.
SELECT l.version
  FROM queue_schema_version l
 WHERE l.version > 12
   AND (SELECT to_jsonb(f) ->> 'checksum' IS NULL
          FROM queue_schema_version f WHERE f.version > 12 ORDER BY f.version LIMIT 1)
 ORDER BY l.version;
