-- The installed set of functions and triggers: its record, `queue_schema_objects`, and the catalog.

-- name: recorded many
-- Return what is installed, one row a part.
SELECT part, checksum, package_version, objects FROM queue_schema_objects;

-- name: record none
-- Record that a part is installed; replaces its earlier record.
INSERT INTO queue_schema_objects AS o (part, checksum, package_version, objects)
VALUES (%(part)s, %(checksum)s, %(package_version)s, %(objects)s)
ON CONFLICT (part) DO UPDATE
   SET checksum = EXCLUDED.checksum, package_version = EXCLUDED.package_version,
       objects = EXCLUDED.objects, installed_at = now();

-- name: forget none
-- Delete the record of every part.
DELETE FROM queue_schema_objects;

-- name: settings none
-- Prepare a transaction that creates functions: they may call each other in any order, and `SET
-- search_path FROM CURRENT` stores this path with the functions that run as their owner.
SELECT set_config('check_function_bodies', 'off', true),
       set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- name: limit_lock_wait none
-- Limit the transaction's next statements to half of the server's deadlock_timeout, 100 ms at the
-- most: every writer waits behind a waiting lock, so wait briefly and rarely.
SELECT set_config('statement_timeout', least(greatest(setting::integer / 2, 1), 100)::text, true)
  FROM pg_settings
 WHERE name = 'deadlock_timeout';

-- name: functions many
-- Return the functions of these names, each with a hash of its definition. The source and the
-- settings are hashed, and not pg_get_functiondef(), whose form differs between servers.
SELECT p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')' AS name,
       md5(concat_ws('|', p.prosrc, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
                     l.lanname, p.prosecdef, p.provolatile, p.proconfig::text)) AS hash
  FROM pg_proc p
  JOIN pg_language l ON l.oid = p.prolang
 WHERE p.pronamespace = current_schema()::regnamespace AND p.prokind = 'f'
   AND p.proname = ANY (%(names)s::text[]);

-- name: triggers many
-- Return the triggers of these names, each with a hash of its definition.
SELECT c.relname || '.' || t.tgname AS name,
       md5(concat_ws('|', pg_get_triggerdef(t.oid), t.tgenabled)) AS hash
  FROM pg_trigger t
  JOIN pg_class c ON c.oid = t.tgrelid
 WHERE c.relnamespace = current_schema()::regnamespace AND NOT t.tgisinternal
   AND t.tgname = ANY (%(names)s::text[]);
