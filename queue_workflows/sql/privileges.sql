-- Rights to our functions. This text runs after the functions.

-- Grant each function that this installation adds to the roles that may execute all earlier functions of its kind and of
-- the kinds below: 1 functions that only read, 2 functions that submit, 3 all others. These are the lists of
-- `queue-workflows connect --for read|submit|work`, so that a role with its own grants can work after an upgrade, and no
-- role gets more than its list. A function is new if PUBLIC may still execute it. See decision 0031.
DO $$
DECLARE
    c_submit   CONSTANT text[] := '{submit}';    -- db.functions has the names
    c_internal CONSTANT text[] := '{internal}';
    v_grant    text;
BEGIN
    FOR v_grant IN
        WITH ours AS (
            SELECT p.oid, p.proowner, p.proacl,
                   CASE WHEN p.provolatile <> 'v' THEN 1 WHEN p.proname = ANY (c_submit) THEN 2 ELSE 3 END AS kind,
                   p.proacl IS NULL OR EXISTS (
                       SELECT FROM aclexplode(p.proacl) a WHERE a.grantee = 0) AS is_new
              FROM pg_proc p
             WHERE p.pronamespace = current_schema()::regnamespace AND p.prokind = 'f'
               AND starts_with(p.proname, 'queue_workflows_') AND p.prorettype <> 'trigger'::regtype
               AND p.proname <> ALL (c_internal)),
        held AS (
            SELECT a.grantee, o.kind, count(DISTINCT o.oid) AS functions
              FROM ours o CROSS JOIN LATERAL aclexplode(o.proacl) a
             WHERE NOT o.is_new AND a.privilege_type = 'EXECUTE' AND a.grantee NOT IN (0, o.proowner)
             GROUP BY a.grantee, o.kind),
        complete AS (
            SELECT h.grantee, h.kind
              FROM held h
             WHERE h.functions = (SELECT count(*) FROM ours o WHERE o.kind = h.kind AND NOT o.is_new))
        SELECT format('GRANT EXECUTE ON FUNCTION %s TO %s', o.oid::regprocedure, c.grantee::regrole)
          FROM ours o
          JOIN complete c ON c.kind = o.kind
         WHERE o.is_new
           AND (SELECT count(*) FROM complete b WHERE b.grantee = c.grantee AND b.kind < o.kind) = o.kind - 1
    LOOP
        EXECUTE v_grant;
    END LOOP;
END $$;

-- Revoke EXECUTE on our functions from PUBLIC. A trigger fires without EXECUTE, and
-- `queue-workflows connect --for work|submit` names the functions that a role must be granted. The notify_* names are
-- listed, as an app may have functions that begin so.
DO $$
DECLARE
    c_notifying CONSTANT text[] := '{notifying}';  -- db.functions has the names
    v_function  regprocedure;
BEGIN
    FOR v_function IN
        SELECT p.oid FROM pg_proc p
         WHERE p.pronamespace = current_schema()::regnamespace AND p.prokind = 'f'
           AND (starts_with(p.proname, 'queue_workflows_') OR p.proname = ANY (c_notifying))
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', v_function);
    END LOOP;
END $$;
