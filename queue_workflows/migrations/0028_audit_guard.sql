-- Who runs as the tables' owner: the functions of triggers, which nobody can call by name, and those below them have
-- no rights of their own. So whoever calls one of those by name, or from a trigger on a table of his own, can do no
-- more with it than without.

-- Refuse a caller who lacks a right on a table. current_user is the owner inside of a SECURITY DEFINER function, so
-- the caller is whom SET ROLE names, else who logged in.
CREATE OR REPLACE FUNCTION queue_workflows_demand(p_right text, p_table text, p_column text) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    IF NOT has_column_privilege(v_caller, p_table, p_column, p_right) THEN
        RAISE EXCEPTION 'role % lacks % on % (%)', v_caller, p_right, p_table, p_column
            USING ERRCODE = 'insufficient_privilege',
                  HINT = '`queue-workflows connect --for work|submit` names the GRANTs that a role needs.';
    END IF;
END $$;

DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOREACH v_function IN ARRAY ARRAY[
        'queue_workflows_hold_ingest()', 'queue_workflows_hold_until_due()', 'queue_workflows_jobs_gone()',
        'queue_workflows_reopen_ingest()', 'queue_workflows_queue_room(text, integer)',
        'queue_workflows_hold_back(text, integer, integer)', 'queue_workflows_mend_lines()']::regprocedure[]
    LOOP
        -- A session's temporary tables come first where they are not named.
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp',
                       v_function, current_schema());
    END LOOP;
    FOREACH v_function IN ARRAY ARRAY[
        'queue_workflows_ask_turn(name, text)', 'queue_workflows_ask_partition(text, text, integer)',
        'queue_workflows_limit_gate(ingest_jobs, ingest_jobs)',
        'queue_workflows_release_key(text)']::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY INVOKER RESET search_path', v_function);
    END LOOP;
END $$;
