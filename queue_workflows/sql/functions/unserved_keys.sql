-- A job that is admitted for its lock key, in a queue that no worker serves, would block the key forever. It is
-- blocked as 'unserved', outside of the key's waiters, while a job of the key waits in a served queue. Planner
-- settings: decision 0019.

-- Return the queues that a live worker takes jobs of, without paused ones.
CREATE OR REPLACE FUNCTION queue_workflows_served_queues(p_stale_s double precision) RETURNS text[]
LANGUAGE sql STABLE
SET search_path FROM CURRENT AS $$
    SELECT coalesce(array_agg(DISTINCT q.queue ORDER BY q.queue), '{}')
      FROM ({serving(p_stale_s)}) q
     WHERE q.takes_jobs AND NOT EXISTS (
           SELECT FROM queue_settings s
            WHERE s.queue = q.queue AND queue_workflows_is_paused(s.paused_at, s.paused_until))
$$;

-- Set the blocked_reason of these jobs; if one of them raises, set each by itself. Return how many were written.
CREATE OR REPLACE FUNCTION queue_workflows_set_blocked(p_jobs text, p_ids text[], p_reason text) RETURNS bigint
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off
SET search_path FROM CURRENT AS $$
DECLARE
    v_count bigint;
BEGIN
    -- A job that has lost its lock key is claimable at once.
    EXECUTE format('UPDATE %I SET blocked_reason = CASE WHEN lock_key IS NOT NULL THEN $2 END WHERE id = ANY ($1)',
                   p_jobs) USING p_ids, p_reason;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
EXCEPTION WHEN OTHERS THEN
    RETURN queue_workflows_each_apart(
        format('UPDATE %I SET blocked_reason = CASE WHEN lock_key IS NOT NULL THEN %L END WHERE id = $1', p_jobs, p_reason),
        p_ids, cardinality(p_ids));
END $$;

-- Put 'unserved' jobs back among the waiters of their lock keys if their queue is served, at most `p_limit`; the
-- commit admits them. Return how many.
CREATE OR REPLACE FUNCTION queue_workflows_unblock_served(p_jobs text, p_served text[], p_limit integer) RETURNS bigint
LANGUAGE plpgsql
{by_index()}
SET search_path FROM CURRENT AS $$
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

-- Block jobs of lock keys whose admitted job is in a queue that is not served, while another waits in a served
-- queue: the jobs in queues that are not served, the admitted one first, at most `p_limit` in all and as many of
-- each key. The commit admits the next. It walks from key to key as queue_workflows_mend_turns does. Return how
-- many.
CREATE OR REPLACE FUNCTION queue_workflows_block_unserved(p_jobs text, p_served text[], p_limit integer) RETURNS bigint
LANGUAGE plpgsql
{by_index()}
SET search_path FROM CURRENT AS $$
DECLARE
    c_ahead CONSTANT integer := 10000;  -- so many waiters are read at once; the others are read in a later call
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
        {keys_with_waiters()}
        SELECT array_agg(c.key) FROM (
            SELECT line.key FROM line CROSS JOIN LATERAL (
                SELECT j.queue::text FROM %1$I j
                 WHERE {has_key(j, line.key)} AND (j.status = 'queued') IS TRUE LIMIT 1) a
             WHERE a.queue <> ALL ($1) AND EXISTS (
                   -- Use >= and LIMIT 1, since with an equality the planner may read all waiters of the key.
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
             WHERE {has_key(j, $1)} AND (j.status = 'queued') IS TRUE
               AND j.queue <> ALL ($2) FOR UPDATE SKIP LOCKED
            $q$, p_jobs) USING v_key, p_served INTO v_id;
        CONTINUE WHEN v_id IS NULL;  -- another transaction claims or changes it
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
