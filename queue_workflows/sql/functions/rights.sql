-- Check the rights of the caller in functions that run as the tables' owner. The trigger functions do; no role may
-- call them by name. The functions that they call run as the caller. So a role gains no rights by calling a
-- function, or by a trigger on a table of its own.

-- Raise an error if the caller lacks a right on a column. Inside of a SECURITY DEFINER function current_user is
-- the owner, so the caller is the role of SET ROLE, else the login.
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
