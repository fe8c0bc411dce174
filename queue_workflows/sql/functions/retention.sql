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
