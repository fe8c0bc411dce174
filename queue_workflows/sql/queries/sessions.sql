-- The settings and the role of a session. They run on every database, with our schema or without.

-- name: limit
-- Set the timeouts of an engine session in milliseconds. Compiling (jit) takes longer than our
-- statements do.
SELECT set_config('statement_timeout', %(statement_ms)s::text, false),
       set_config('lock_timeout', %(lock_ms)s::text, false),
       set_config('idle_in_transaction_session_timeout', %(idle_ms)s::text, false),
       set_config('jit', 'off', false);

-- name: role
-- Return the role and the schema of this session, quoted as SQL needs them.
SELECT quote_ident(current_user) AS role,
       quote_ident(coalesce(current_schema(), 'public')) AS schema;
