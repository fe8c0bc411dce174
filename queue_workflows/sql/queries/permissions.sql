-- Find the rights of a role to the tables and functions of the engine, from the catalog. A table or
-- function that does not exist is left out.

-- name: closed_tables many
-- Return which of these privileges this role lacks, or perhaps has only through a right of PUBLIC
-- in `revoked` (`SELECT workflow_runs`). `privileges` and `tables` are parallel arrays.
SELECT w.privilege AS right, 'TABLE' AS kind, c.oid::regclass::text AS name
  FROM unnest(%(tables)s::text[], %(privileges)s::text[])
       WITH ORDINALITY AS w (name, privilege, place)
  JOIN pg_class c ON c.oid = to_regclass(w.name)
 WHERE NOT has_table_privilege(c.oid, w.privilege)
    OR w.privilege || ' ' || c.oid::regclass::text = ANY (%(revoked)s::text[])
   AND NOT pg_has_role(c.relowner, 'USAGE')
 ORDER BY w.place;

-- name: closed_columns one
-- Return the table, and whether this role may insert every one of these columns. `is_open` is
-- NULL, and `name` too, if there is no such table.
SELECT to_regclass(%(table)s::text)::text AS name,
       bool_and(has_column_privilege(to_regclass(%(table)s::text), c.name, 'INSERT')) AS is_open
  FROM unnest(%(columns)s::text[]) AS c (name)
 WHERE to_regclass(%(table)s::text) IS NOT NULL;

-- name: closed_sequences column
-- Return the sequences of these tables that this role may not use, or perhaps only through a right
-- of PUBLIC in `revoked`.
SELECT s.oid::regclass::text AS name
  FROM pg_class s
  JOIN pg_depend d
    ON d.objid = s.oid AND d.classid = 'pg_class'::regclass AND d.deptype = 'a'
   AND d.refobjid IN (SELECT to_regclass(name) FROM unnest(%(tables)s::text[]) AS t (name))
 WHERE CASE s.relkind WHEN 'S' THEN NOT has_sequence_privilege(s.oid, 'USAGE') ELSE false END
    OR 'USAGE ' || s.oid::regclass::text = ANY (%(revoked)s::text[])
   AND NOT pg_has_role(s.relowner, 'USAGE');

-- name: closed_functions many
-- Return the functions that this role needs and may not call, or perhaps only through a right of
-- PUBLIC in `revoked`. These are the functions that only read, all others for a role that `works`,
-- and the `named` ones. Left out are the `internal` ones, which only functions of the tables' owner
-- call, and trigger functions, to which the caller needs no right.
SELECT 'EXECUTE' AS right, 'FUNCTION' AS kind, p.oid::regprocedure::text AS name
  FROM pg_proc p
  JOIN pg_class c ON c.oid = to_regclass('workflow_runs')
 WHERE p.pronamespace = c.relnamespace AND starts_with(p.proname, 'queue_workflows_')
   AND p.prorettype <> 'trigger'::regtype
   AND p.proname <> ALL (%(internal)s::text[])
   AND (%(works)s::boolean OR p.provolatile <> 'v' OR p.proname = ANY (%(named)s::text[]))
   AND (NOT has_function_privilege(p.oid, 'EXECUTE')
        OR 'EXECUTE ' || p.oid::regprocedure::text = ANY (%(revoked)s::text[])
       AND NOT pg_has_role(p.proowner, 'USAGE'))
 ORDER BY 3;

-- name: of_public many
-- Return the rights that PUBLIC has to functions, tables and sequences of the engine. Migrations
-- give it one right, to read what is installed.
SELECT x.privilege_type AS right, 'FUNCTION' AS kind, p.oid::regprocedure::text AS name,
       'PUBLIC' AS grantee
  FROM pg_proc p
  JOIN pg_class c ON c.oid = to_regclass('workflow_runs')
 CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) x
 WHERE p.pronamespace = c.relnamespace AND p.prokind = 'f' AND x.grantee = 0
   AND (starts_with(p.proname, 'queue_workflows_') OR p.proname = ANY (%(notifying)s::text[]))
UNION ALL
SELECT x.privilege_type, 'TABLE', t.oid::regclass::text, 'PUBLIC'
  FROM pg_class t
 CROSS JOIN LATERAL aclexplode(t.relacl) x
 WHERE t.oid IN (SELECT to_regclass(name) FROM unnest(%(tables)s::text[]) AS n (name))
   AND x.grantee = 0
   AND NOT (t.relname = 'queue_schema_objects' AND x.privilege_type = 'SELECT')
UNION ALL
SELECT x.privilege_type, 'SEQUENCE', s.oid::regclass::text, 'PUBLIC'
  FROM pg_class s
  JOIN pg_depend d
    ON d.objid = s.oid AND d.classid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
   AND d.refobjid IN (SELECT to_regclass(name) FROM unnest(%(tables)s::text[]) AS n (name))
 CROSS JOIN LATERAL aclexplode(CASE s.relkind WHEN 'S' THEN s.relacl END) x
 WHERE x.grantee = 0
 ORDER BY 2, 3, 1;

-- name: others_functions many
-- Return the functions of the engine that another role than the owner of the tables owns, and both
-- owners.
SELECT p.oid::regprocedure::text AS name, quote_ident(pg_get_userbyid(p.proowner)) AS owner,
       quote_ident(pg_get_userbyid(c.relowner)) AS owner_of_tables
  FROM pg_proc p
  JOIN pg_class c ON c.oid = to_regclass('workflow_runs')
 WHERE p.pronamespace = c.relnamespace AND p.prokind = 'f' AND p.proowner <> c.relowner
   AND (starts_with(p.proname, 'queue_workflows_') OR p.proname = ANY (%(notifying)s::text[]))
 ORDER BY 1;

-- name: not_owned many
-- Return the obstacles to a migration by this role: tables and functions that it does not own, and
-- a schema in which it may not create.
SELECT 'OWNER' AS right, 'TABLE' AS kind, c.oid::regclass::text AS name
  FROM pg_class c
 WHERE c.oid IN (SELECT to_regclass(name) FROM unnest(%(tables)s::text[]) AS t (name))
   AND NOT pg_has_role(c.relowner, 'USAGE')
UNION ALL
SELECT 'OWNER', 'FUNCTION', p.oid::regprocedure::text
  FROM pg_proc p
  JOIN pg_class c ON c.oid = to_regclass('workflow_runs')
 WHERE p.pronamespace = c.relnamespace AND p.prokind = 'f'
   AND (starts_with(p.proname, 'queue_workflows_') OR p.proname = ANY (%(notifying)s::text[]))
   AND NOT pg_has_role(p.proowner, 'USAGE')
UNION ALL
SELECT 'CREATE', 'SCHEMA', current_schema()
 WHERE NOT has_schema_privilege(current_schema(), 'CREATE');

-- name: excessive many
-- Return the rights other than SELECT that this role has and does not need, and the grantee of each:
-- this role, PUBLIC, or a role that this one is a member of. `allowed` are the columns that it
-- inserts, as `table.column`; `filled` are their tables. The owner of an object and a superuser get
-- no row, since their rights cannot be revoked.
WITH granted ("right", kind, name, grantee, owner) AS (
    SELECT x.privilege_type, 'TABLE', c.oid::regclass::text, x.grantee, c.relowner
      FROM unnest(%(tables)s::text[]) AS t (name)
      JOIN pg_class c ON c.oid = to_regclass(t.name)
     CROSS JOIN LATERAL aclexplode(c.relacl) x
     WHERE x.privilege_type <> 'SELECT'
    UNION ALL
    SELECT x.privilege_type || ' (' || quote_ident(a.attname) || ')', 'TABLE',
           c.oid::regclass::text, x.grantee, c.relowner
      FROM unnest(%(tables)s::text[]) AS t (name)
      JOIN pg_class c ON c.oid = to_regclass(t.name)
      JOIN pg_attribute a ON a.attrelid = c.oid
     CROSS JOIN LATERAL aclexplode(a.attacl) x
     WHERE x.privilege_type IN ('UPDATE', 'REFERENCES')
        OR x.privilege_type = 'INSERT'
       AND c.relname || '.' || a.attname <> ALL (%(allowed)s::text[])
    UNION ALL
    SELECT x.privilege_type, 'FUNCTION', p.oid::regprocedure::text, x.grantee, p.proowner
      FROM pg_proc p
      JOIN pg_class c ON c.oid = to_regclass('workflow_runs')
     CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) x
     WHERE p.pronamespace = c.relnamespace AND starts_with(p.proname, 'queue_workflows_')
       AND (p.provolatile = 'v' OR p.proname = ANY (%(internal)s::text[]))
       AND p.proname <> ALL (%(callable)s::text[])
    UNION ALL
    SELECT x.privilege_type, 'SEQUENCE', s.oid::regclass::text, x.grantee, s.relowner
      FROM pg_class s
      JOIN pg_depend d
        ON d.objid = s.oid AND d.classid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
      JOIN pg_class c ON c.oid = d.refobjid
      JOIN pg_class r ON r.oid = to_regclass('workflow_runs') AND r.relnamespace = c.relnamespace
     CROSS JOIN LATERAL aclexplode(CASE s.relkind WHEN 'S' THEN s.relacl END) x
     WHERE (c.relname = ANY (%(tables)s::text[]) OR c.relname = 'lock_turns')
       AND (x.privilege_type = 'UPDATE'
            OR x.privilege_type = 'USAGE' AND c.relname <> ALL (%(filled)s::text[]))
    UNION ALL
    SELECT x.privilege_type, 'SCHEMA', quote_ident(n.nspname), x.grantee, c.relowner
      FROM pg_class c
      JOIN pg_namespace n ON n.oid = c.relnamespace
     CROSS JOIN LATERAL aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) x
     WHERE c.oid = to_regclass('workflow_runs') AND x.privilege_type = 'CREATE'
       AND NOT pg_has_role(n.nspowner, 'USAGE'))
SELECT "right", kind, name,
       CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END AS grantee
  FROM granted
 WHERE NOT pg_has_role(owner, 'USAGE') AND (grantee = 0 OR pg_has_role(grantee, 'USAGE'));

-- name: submitters column
-- Return at most 10 roles that may insert runs and neither own the tables nor work on jobs,
-- without superusers and the roles that PostgreSQL brings.
SELECT r.rolname
  FROM pg_roles r, pg_class c
 WHERE c.oid = to_regclass('workflow_runs') AND NOT r.rolsuper AND r.rolname !~ '^pg_'
   AND NOT pg_has_role(r.oid, c.relowner, 'USAGE')
   AND has_any_column_privilege(r.oid, c.oid, 'INSERT')
   AND NOT has_table_privilege(r.oid, to_regclass('workflow_node_jobs'), 'UPDATE')
 ORDER BY 1
 LIMIT 10;

-- name: public_may_create value
-- Return the schema of the engine if every role may create functions in it.
SELECT quote_ident(n.nspname) AS name
  FROM pg_namespace n
 WHERE n.nspname = current_schema()
   AND EXISTS (
       SELECT FROM aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a
        WHERE a.grantee = 0 AND a.privilege_type = 'CREATE');
