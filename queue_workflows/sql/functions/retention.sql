-- Which finished jobs and runs are old enough to be deleted.

-- Return whether an ingest job or a run with this status has ended more than p_days days ago; 0 keeps it forever. The
-- bounds keep a NaN, and an age that no interval can hold, from ending all pruning. Without a SET clause, so that it is
-- inlined.
CREATE OR REPLACE FUNCTION queue_workflows_is_past_retention(
    p_status text, p_ended_at timestamptz, p_days double precision)
RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT queue_workflows_is_terminal_run(p_status) AND p_days > 0
       AND p_ended_at < now() - least(greatest(p_days, 0), 36500) * interval '1 day'
$$;

-- Return one row, true, if retention may delete a run that ended at `p_ended_at`: it is past its retention, has no open
-- outbox row, and each of its nodes has ended. It returns rows because only such a function is inlined with an EXISTS
-- in it: call it in FROM. OFFSET 0 makes each EXISTS a look-up per run (decision 0019).
CREATE OR REPLACE FUNCTION queue_workflows_prunable_run(
    p_run text, p_status text, p_ended_at timestamptz, p_days double precision)
RETURNS SETOF boolean LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT true
     WHERE queue_workflows_is_past_retention(p_status, p_ended_at, p_days)
       AND NOT EXISTS (SELECT FROM workflow_dispatch_events e
                        WHERE e.run_id = p_run AND e.processed_at IS NULL OFFSET 0)
       AND NOT EXISTS (SELECT FROM workflow_node_jobs n
                        WHERE n.run_id = p_run AND n.status IN ('queued', 'running', 'awaiting_input') OFFSET 0)
$$;
