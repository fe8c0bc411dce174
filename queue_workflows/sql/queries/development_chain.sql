-- The conversion of a database of a development build. `sql/development_chain.sql` changes its
-- tables.

-- name: is_possible one
-- Return whether a development build may have made this database: it has our ledger, and lacks the
-- table in which a release records its functions and triggers.
SELECT to_regclass('queue_schema_version') IS NOT NULL
       AND to_regclass('queue_schema_objects') IS NULL AS is_possible;

-- name: applied many
-- Return the migrations above 12, lowest first. An older ledger has no column `checksum`.
SELECT l.version, to_jsonb(l) ->> 'checksum' AS checksum
  FROM queue_schema_version l
 WHERE l.version > 12
 ORDER BY l.version;

-- name: forget none
-- Delete the record of the migrations above 12.
DELETE FROM queue_schema_version WHERE version > 12;

-- name: record none
-- Record the migration of the release that these tables amount to.
INSERT INTO queue_schema_version (version, checksum) VALUES (13, %(checksum)s);
