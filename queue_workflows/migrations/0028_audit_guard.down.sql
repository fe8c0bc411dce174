DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOREACH v_function IN ARRAY ARRAY[
        'queue_workflows_hold_ingest()', 'queue_workflows_hold_until_due()', 'queue_workflows_jobs_gone()',
        'queue_workflows_reopen_ingest()', 'queue_workflows_queue_room(text, integer)',
        'queue_workflows_hold_back(text, integer, integer)', 'queue_workflows_mend_lines()']::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY INVOKER RESET search_path', v_function);
    END LOOP;
    FOREACH v_function IN ARRAY ARRAY[
        'queue_workflows_ask_turn(name, text)', 'queue_workflows_ask_partition(text, text, integer)',
        'queue_workflows_limit_gate(ingest_jobs, ingest_jobs)',
        'queue_workflows_release_key(text)']::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp',
                       v_function, current_schema());
    END LOOP;
END $$;
DROP FUNCTION IF EXISTS queue_workflows_demand(text, text, text);
