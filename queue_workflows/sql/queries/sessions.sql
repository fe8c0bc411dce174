-- The settings, the role and the tables of a session. They run on every database, with our schema or without.

-- name: set_up none
-- Set the parameters that an engine session depends on, whatever the environment, the role and the
-- database say: the timeouts (milliseconds, 0 for none), the isolation, and how values become text
-- and back. Compiling (jit) takes longer than our statements do. Without triggers
-- (session_replication_role) no rule holds; only a superuser may set it. A server before version 17
-- has no transaction_timeout. The encoding is in the DSN. Settings that an operator decides stay:
-- search_path, synchronous_commit, default_transaction_read_only and the planner's costs.
-- `is_local`: for this transaction alone, since a pooler gives the session to others after it.
SELECT set_config('statement_timeout', %(statement_ms)s::text, %(is_local)s::bool),
       set_config('lock_timeout', %(lock_ms)s::text, %(is_local)s::bool),
       set_config('idle_in_transaction_session_timeout', %(idle_ms)s::text, %(is_local)s::bool),
       set_config('idle_session_timeout', '0', %(is_local)s::bool),
       CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL
            THEN set_config('transaction_timeout', '0', %(is_local)s::bool) END,
       CASE WHEN current_setting('session_replication_role') = 'replica'
            THEN set_config('session_replication_role', 'origin', %(is_local)s::bool) END,
       set_config('default_transaction_isolation', 'read committed', %(is_local)s::bool),
       set_config('default_transaction_deferrable', 'off', %(is_local)s::bool),
       set_config('TimeZone', 'UTC', %(is_local)s::bool),
       set_config('DateStyle', 'ISO, MDY', %(is_local)s::bool),
       set_config('IntervalStyle', 'postgres', %(is_local)s::bool),
       set_config('extra_float_digits', '1', %(is_local)s::bool),
       set_config('bytea_output', 'hex', %(is_local)s::bool),
       set_config('array_nulls', 'on', %(is_local)s::bool),
       set_config('transform_null_equals', 'off', %(is_local)s::bool),
       set_config('standard_conforming_strings', 'on', %(is_local)s::bool),
       set_config('quote_all_identifiers', 'off', %(is_local)s::bool),
       set_config('plan_cache_mode', 'auto', %(is_local)s::bool),
       set_config('jit', 'off', %(is_local)s::bool);

-- name: set_all none
-- Set these settings, a JSON object, for this transaction (`is_local`) or for the session.
SELECT set_config(s.name, s.value, %(is_local)s::bool) AS value
  FROM jsonb_each_text(%(settings)s::jsonb) AS s (name, value);

-- name: has_table value
-- Return whether there is a table of this name on the search path.
SELECT to_regclass(quote_ident(%(table)s::text)) IS NOT NULL AS found;

-- name: hold none
-- Hold the advisory lock of a name, shared, for as long as the session lives.
SELECT pg_advisory_lock_shared(hashtextextended(%(lock)s::text, 0)) IS NULL AS held;

-- name: role one
-- Return the role and the schema of this session, quoted as SQL needs them.
SELECT quote_ident(current_user) AS role,
       quote_ident(coalesce(current_schema(), 'public')) AS schema;
