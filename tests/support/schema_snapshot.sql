-- What tests/support/schema_snapshot.py reads: one query a kind of object, each with the columns name and text.

-- kind: tables
SELECT c.relname AS name, concat_ws(' ', c.relkind, c.relpersistence, c.reloptions::text) AS text
  FROM pg_class c WHERE c.relnamespace = %(schema)s::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S');

-- kind: columns
SELECT c.relname || '.' || a.attname AS name,
       concat_ws(' ', format_type(a.atttypid, a.atttypmod), CASE WHEN a.attnotnull THEN 'NOT NULL' END,
                 'DEFAULT ' || pg_get_expr(d.adbin, d.adrelid)) AS text
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
 WHERE c.relnamespace = %(schema)s::regnamespace AND c.relkind IN ('r', 'p', 'v', 'c');

-- kind: types
SELECT t.typname AS name, concat_ws(' ', t.typtype, format_type(nullif(t.typbasetype, 0), t.typtypmod),
           CASE WHEN t.typnotnull THEN 'NOT NULL' END, 'DEFAULT ' || t.typdefault) AS text
  FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
 WHERE t.typnamespace = %(schema)s::regnamespace AND (t.typtype IN ('d', 'e') OR c.relkind = 'c');

-- kind: constraints
SELECT coalesce(r.conrelid::regclass::text, r.contypid::regtype::text) || '.' || r.conname AS name,
       pg_get_constraintdef(r.oid) AS text
  FROM pg_constraint r WHERE r.connamespace = %(schema)s::regnamespace AND r.contype <> 'n'
   AND r.contype <> 't';

-- kind: indexes
SELECT i.indexrelid::regclass::text AS name, pg_get_indexdef(i.indexrelid) AS text
  FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
 WHERE c.relnamespace = %(schema)s::regnamespace;

-- kind: triggers
SELECT t.tgrelid::regclass::text || '.' || t.tgname AS name, pg_get_triggerdef(t.oid) AS text
  FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
 WHERE c.relnamespace = %(schema)s::regnamespace AND NOT t.tgisinternal;

-- kind: functions
SELECT p.oid::regprocedure::text AS name, pg_get_functiondef(p.oid) AS text
  FROM pg_proc p WHERE p.pronamespace = %(schema)s::regnamespace AND p.prokind = 'f'
   AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = p.oid AND d.deptype = 'e');

-- kind: views
SELECT c.relname AS name, pg_get_viewdef(c.oid) AS text
  FROM pg_class c WHERE c.relnamespace = %(schema)s::regnamespace AND c.relkind = 'v';

-- kind: public rights
SELECT x.name, string_agg(x.privilege_type, ',' ORDER BY x.privilege_type) AS text FROM (
       SELECT c.relname::text AS name, g.privilege_type
         FROM pg_class c CROSS JOIN aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) g
        WHERE c.relnamespace = %(schema)s::regnamespace AND c.relkind IN ('r', 'v') AND g.grantee = 0
       UNION ALL
       SELECT p.oid::regprocedure::text, g.privilege_type
         FROM pg_proc p CROSS JOIN aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) g
        WHERE p.pronamespace = %(schema)s::regnamespace AND g.grantee = 0) x
 GROUP BY x.name;
