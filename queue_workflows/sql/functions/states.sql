-- Define the states of jobs and runs. Functions without a SET clause are inlined, so they do not change a query's plan.
-- Four places repeat the conditions instead of a call: predicates of indexes, since an index must not depend on a
-- function that is replaced; WHEN clauses of triggers, and functions of triggers that run as their caller, since a role
-- that writes a row by plain SQL may have no right to call our functions; and texts for EXECUTE, which are planned each
-- time, where each inlined call takes 7 us.

-- Return whether a job of either family has ended: it leaves this state only in a new generation.
CREATE OR REPLACE FUNCTION queue_workflows_is_terminal_job(p_status text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT p_status IN ('completed', 'failed', 'cancelled', 'skipped')
$$;

-- Return whether a run has ended. Its status may be any other text of an app, also 'skipped'.
CREATE OR REPLACE FUNCTION queue_workflows_is_terminal_run(p_status text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT p_status IN ('completed', 'failed', 'cancelled')
$$;

-- Return whether a worker may claim a job, as far as its own columns say.
CREATE OR REPLACE FUNCTION queue_workflows_is_claimable(p_status text, p_blocked_reason text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT p_status = 'queued' AND p_blocked_reason IS NULL
$$;

-- Return when a queued job is due: where it is kept for the host that ran it, from then on for that host.
CREATE OR REPLACE FUNCTION queue_workflows_due_at(
    p_available_at timestamptz, p_resume_at timestamptz, p_resume_until timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN p_resume_until = p_available_at THEN p_resume_at ELSE p_available_at END
$$;

-- Return whether the claim of a job is lost: it runs, and its lease has lapsed, so that a sweep queues it again.
CREATE OR REPLACE FUNCTION queue_workflows_is_lost(p_status text, p_lease_expires_at timestamptz) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT (p_status = 'running' AND p_lease_expires_at < now()) IS TRUE
$$;
