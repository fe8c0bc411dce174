-- Find what a downgrade would drop, from the catalog.

-- name: columns many
-- Return every column of the schema's tables, with the expression of its default.
SELECT c.table_name, c.column_name, c.column_default
  FROM information_schema.columns c
  JOIN information_schema.tables t USING (table_schema, table_name)
 WHERE c.table_schema = current_schema() AND t.table_type = 'BASE TABLE';

-- name: untouched many
-- Return the relations of the schema that this transaction has not locked for writing.
SELECT c.relname AS name
  FROM pg_class c
 WHERE c.relnamespace = current_schema()::regnamespace
   AND NOT EXISTS (
       SELECT FROM pg_locks l
        WHERE l.pid = pg_backend_pid() AND l.relation = c.oid
          AND l.mode NOT IN ('AccessShareLock', 'RowShareLock'));
