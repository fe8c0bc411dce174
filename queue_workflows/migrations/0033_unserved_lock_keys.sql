-- A job that is admitted for its lock key and whose queue nobody serves would keep every other job of the key waiting
-- for ever. It is blocked as 'unserved', outside the line of its key, while a job of the key waits in a served queue.
-- Plans are pinned as docs/decisions/0019 says.

-- Jobs that wait for a lock key, by queue: whether a served queue has one for a key, and what may stand in line again.
-- The last condition is always true: only a statement that has it may use the index. Without statistics others would
-- sort all of it rather than walk the line of a key.
CREATE INDEX IF NOT EXISTS workflow_node_jobs_unserved_idx ON workflow_node_jobs (blocked_reason, queue, lock_key)
    WHERE status = 'queued' AND blocked_reason IN ('locked', 'unserved') AND octet_length(queue) >= 0;
CREATE INDEX IF NOT EXISTS ingest_jobs_unserved_idx ON ingest_jobs (blocked_reason, queue, lock_key)
    WHERE status = 'queued' AND blocked_reason IN ('locked', 'unserved') AND octet_length(queue) >= 0;

-- Return the queues that a live worker takes jobs of, without paused ones. A worker of 0.3.0 has a heartbeat only.
CREATE OR REPLACE FUNCTION queue_workflows_served_queues(p_stale_s double precision) RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(q.queue ORDER BY q.queue), '{}') FROM (
        SELECT w.queue::text FROM workers w
         WHERE w.state NOT IN ('stopped', 'dead', 'parked', 'paused')
           AND w.last_seen > now() - p_stale_s * interval '1 second'
        UNION
        SELECT b.queue::text FROM worker_heartbeats b
         WHERE b.last_seen > now() - p_stale_s * interval '1 second'
           AND NOT EXISTS (SELECT FROM workers w WHERE w.host_label = b.host_label AND w.queue = b.queue)) q
     WHERE NOT EXISTS (
           SELECT FROM queue_settings s WHERE s.queue = q.queue AND s.paused_at IS NOT NULL
              AND (s.paused_until IS NULL OR s.paused_until > now()))
$$;

-- Write these blocked jobs; where one of them raises, each by itself. Return how many were written.
CREATE OR REPLACE FUNCTION queue_workflows_set_blocked(p_jobs text, p_ids text[], p_reason text) RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off AS $$
DECLARE
    v_id    text;
    v_count bigint := 0;
BEGIN
    -- A job whose key was taken off meanwhile needs no turn.
    EXECUTE format('UPDATE %I SET blocked_reason = CASE WHEN lock_key IS NOT NULL THEN $2 END WHERE id = ANY ($1)',
                   p_jobs) USING p_ids, p_reason;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
EXCEPTION WHEN OTHERS THEN
    v_count := 0;
    FOREACH v_id IN ARRAY p_ids LOOP
        BEGIN
            EXECUTE format('UPDATE %I SET blocked_reason = CASE WHEN lock_key IS NOT NULL THEN $2 END WHERE id = $1',
                           p_jobs) USING v_id, p_reason;
            v_count := v_count + 1;
        EXCEPTION WHEN OTHERS THEN
            RAISE WARNING 'job % cannot become %: %', v_id, p_reason, SQLERRM;
        END;
    END LOOP;
    RETURN v_count;
END $$;

-- Put jobs that are 'unserved' back in the line of their lock keys if their queue is served, at most p_limit. The
-- commit gives the turns. Return how many.
CREATE OR REPLACE FUNCTION queue_workflows_unblock_served(p_jobs text, p_served text[], p_limit integer) RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_incremental_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_ids text[];
BEGIN
    EXECUTE format($q$
        SELECT array_agg(u.id) FROM (
            SELECT b.id FROM unnest($1) AS s (queue) CROSS JOIN LATERAL (
                SELECT j.id FROM %1$I j
                 WHERE j.status = 'queued' AND j.blocked_reason = 'unserved' AND j.queue = s.queue
                   AND octet_length(j.queue) >= 0
                 ORDER BY j.lock_key LIMIT $2 FOR UPDATE SKIP LOCKED) b
             LIMIT $2) u
        $q$, p_jobs) USING p_served, p_limit INTO v_ids;
    IF v_ids IS NULL THEN
        RETURN 0;
    END IF;
    RETURN queue_workflows_set_blocked(p_jobs, v_ids, 'locked');
END $$;

-- Of the lock keys whose admitted job is in a queue that is not served, while one waits in a served queue: block the
-- jobs in queues that are not served, the admitted one first, at most p_limit in all and as many of each key. The
-- commit admits the next in line. Walks from key to key as queue_workflows_mend_turns does. Return how many.
CREATE OR REPLACE FUNCTION queue_workflows_block_unserved(p_jobs text, p_served text[], p_limit integer) RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET enable_incremental_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    c_ahead CONSTANT integer := 10000;  -- so much of a line is read at once; what is behind has its time later
    v_keys  text[];
    v_key   text;
    v_id    text;
    v_ids   text[];
    v_count bigint := 0;
BEGIN
    IF cardinality(p_served) = 0 THEN
        RETURN 0;
    END IF;
    EXECUTE format($q$
        WITH RECURSIVE line (key) AS (
            (SELECT lock_key FROM %1$I WHERE lock_key IS NOT NULL AND status = 'queued'
                AND blocked_reason = 'locked' ORDER BY lock_key LIMIT 1)
            UNION ALL
            SELECT (SELECT w.lock_key FROM %1$I w WHERE w.lock_key IS NOT NULL AND w.status = 'queued'
                       AND w.blocked_reason = 'locked' AND w.lock_key > line.key
                     ORDER BY w.lock_key LIMIT 1)
              FROM line WHERE line.key IS NOT NULL)
        SELECT array_agg(c.key) FROM (
            SELECT line.key FROM line CROSS JOIN LATERAL (
                SELECT j.queue::text FROM %1$I j
                 WHERE j.lock_key IS NOT NULL AND j.lock_key = line.key AND j.status = 'queued'
                   AND j.blocked_reason IS NULL LIMIT 1) a
             WHERE a.queue <> ALL ($1) AND EXISTS (
                   -- The next in this order: said as equal, the line of the key may be read for it as a whole.
                   SELECT FROM unnest($1) AS s (queue) CROSS JOIN LATERAL (
                       SELECT w.queue, w.lock_key FROM %1$I w
                        WHERE w.status = 'queued' AND w.blocked_reason = 'locked' AND octet_length(w.queue) >= 0
                          AND (w.queue, w.lock_key) >= (s.queue, line.key)
                        ORDER BY w.queue, w.lock_key LIMIT 1) o
                    WHERE o.queue = s.queue AND o.lock_key = line.key OFFSET 0)
             LIMIT $2) c
        $q$, p_jobs) USING p_served, p_limit INTO v_keys;
    FOREACH v_key IN ARRAY coalesce(v_keys, '{}') LOOP
        EXECUTE format($q$
            SELECT j.id FROM %1$I j
             WHERE j.lock_key IS NOT NULL AND j.lock_key = $1 AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.queue <> ALL ($2) FOR UPDATE SKIP LOCKED
            $q$, p_jobs) USING v_key, p_served INTO v_id;
        CONTINUE WHEN v_id IS NULL;  -- somebody claims it, or changes it
        EXECUTE format($q$
            SELECT array_agg(u.id) FROM (
                SELECT w.id FROM %1$I w
                 WHERE w.id = ANY (ARRAY(
                       SELECT f.id FROM (
                           SELECT l.id, l.queue::text FROM %1$I l
                            WHERE l.lock_key IS NOT NULL AND l.lock_key = $1 AND l.status = 'queued'
                              AND l.blocked_reason = 'locked'
                            ORDER BY l.priority, l.seq LIMIT $4) f
                        WHERE f.queue <> ALL ($2) LIMIT $3))
                   AND (w.lock_key = $1 AND w.status = 'queued' AND w.blocked_reason = 'locked') IS TRUE
                   FOR UPDATE SKIP LOCKED) u
            $q$, p_jobs)
          USING v_key, p_served, p_limit / cardinality(v_keys) - 1, c_ahead INTO v_ids;
        v_count := v_count + queue_workflows_set_blocked(p_jobs, v_id || coalesce(v_ids, '{}'), 'unserved');
    END LOOP;
    RETURN v_count;
END $$;

DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOREACH v_function IN ARRAY ARRAY[
        'queue_workflows_served_queues(double precision)', 'queue_workflows_set_blocked(text, text[], text)',
        'queue_workflows_unblock_served(text, text[], integer)',
        'queue_workflows_block_unserved(text, text[], integer)']::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', v_function, current_schema());
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', v_function);
    END LOOP;
END $$;

-- to sql/functions/history.sql

-- Return whether a job that leaves its claim must end as cancelled: its cancellation was requested, or its run is over.
CREATE OR REPLACE FUNCTION queue_workflows_must_end(job ingest_jobs) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN job.cancel_requested_at IS NOT NULL;
END $$;

CREATE OR REPLACE FUNCTION queue_workflows_must_end(job workflow_node_jobs) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN job.cancel_requested_at IS NOT NULL OR EXISTS (
        SELECT FROM workflow_runs r WHERE r.id = job.run_id AND r.status IN ('completed', 'failed', 'cancelled'));
END $$;

-- Append the event of a transition to the history of its job, and to the outbox if the run of a node follows from it.
-- For the statement that makes the transition, which calls this in RETURNING. `job`: the row as it is now. `event`: the
-- type of the event. `host`: the host label that the job had before, as a queued job has none. `worker`: the worker that
-- held the claim; NULL: an operator or the engine made the transition. Returns `job`.
CREATE OR REPLACE FUNCTION queue_workflows_record(
    job ingest_jobs, event text, host text DEFAULT NULL, worker text DEFAULT NULL,
    seconds double precision DEFAULT NULL, error text DEFAULT NULL, detail jsonb DEFAULT NULL)
RETURNS ingest_jobs LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ingest_job_events
           (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, error, detail, actor)
    VALUES (job.id, job.attempts, event, job.claim_no, worker, coalesce(job.claimed_by, host), job.queue, seconds,
            coalesce(error, job.error), coalesce(detail, '{}'),
            CASE WHEN worker IS NULL THEN queue_workflows_actor() END);
    RETURN job;
END $$;

CREATE OR REPLACE FUNCTION queue_workflows_record(
    job workflow_node_jobs, event text, host text DEFAULT NULL, worker text DEFAULT NULL,
    seconds double precision DEFAULT NULL, error text DEFAULT NULL, detail jsonb DEFAULT NULL)
RETURNS workflow_node_jobs LANGUAGE plpgsql AS $$
BEGIN
    -- An attempt is a smallint in this history and an integer in the job: no counter may keep a job from its end.
    INSERT INTO workflow_node_events
           (run_id, node_id, model, job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s,
            error, detail)
    VALUES (job.run_id, job.node_id, job.required_model, job.id, greatest(0, least(job.attempts, 32767)), event,
            job.claim_no, worker, coalesce(job.claimed_by, host), job.queue, seconds,
            coalesce(error, job.error), coalesce(detail, '{}'));
    IF job.status IN ('completed', 'failed', 'awaiting_input') THEN
        INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no, generation)
        VALUES (job.run_id, job.node_id, job.status, job.id, job.claim_no, job.generation);
    END IF;
    RETURN job;
END $$;

REVOKE ALL ON FUNCTION queue_workflows_must_end(ingest_jobs) FROM PUBLIC;
REVOKE ALL ON FUNCTION queue_workflows_must_end(workflow_node_jobs) FROM PUBLIC;
REVOKE ALL ON FUNCTION queue_workflows_record(
    ingest_jobs, text, text, text, double precision, text, jsonb) FROM PUBLIC;
REVOKE ALL ON FUNCTION queue_workflows_record(
    workflow_node_jobs, text, text, text, double precision, text, jsonb) FROM PUBLIC;
