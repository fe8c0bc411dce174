-- Partitions that got limits while jobs waited, and partitions whose check is due. Picked rows are joined by id
-- = ANY (ARRAY(...)), for the reason in decision 0019.

-- Return the partitions of a queue, or of all if NULL, that have waiting jobs (`p_in_line`), or jobs that run
-- or are admitted. It walks from one to the next, however many jobs wait.
CREATE OR REPLACE FUNCTION queue_workflows_partitions(p_queue text, p_in_line boolean)
RETURNS TABLE (queue text, partition_key text) LANGUAGE plpgsql STABLE
{by_index()} AS $$
#variable_conflict use_column
BEGIN
    IF p_in_line THEN
        RETURN QUERY {partitions_of(j.status = 'queued' AND j.blocked_reason = 'limited')};
    ELSE
        RETURN QUERY {partitions_of({has_place(j)})};
    END IF;
END $$;

-- Of the first `p_look` claimable jobs of a queue, block up to `p_most` that were claimable before their
-- partition had limits; return how many. The triggers note their partitions, which are checked when the
-- transaction commits; no row is waited for.
CREATE OR REPLACE FUNCTION queue_workflows_hold_back(p_queue text, p_look integer, p_most integer)
RETURNS integer LANGUAGE plpgsql
{by_index()}
SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    v_all   boolean;
    v_moved bigint;
BEGIN
    PERFORM queue_workflows_demand('UPDATE', 'ingest_jobs', 'status');
    SELECT s.partition_max_running IS NOT NULL OR s.partition_rate_limit IS NOT NULL INTO v_all
      FROM queue_settings s WHERE s.queue = p_queue;
    WITH ahead AS MATERIALIZED (
        SELECT a.id FROM (
            SELECT j.id, j.partition_key, j.admitted_at FROM ingest_jobs j
             WHERE j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
             ORDER BY j.priority, j.seq LIMIT p_look) a
         WHERE a.partition_key IS NOT NULL AND a.admitted_at IS NULL AND (v_all OR EXISTS (
               SELECT FROM queue_partitions p WHERE p.queue = p_queue AND p.partition_key = a.partition_key))
         LIMIT p_most),
    stale AS MATERIALIZED (
        SELECT j.id FROM ingest_jobs j
         WHERE j.id = ANY (ARRAY(SELECT a.id FROM ahead a))
           AND (queue_workflows_is_claimable(j.status, j.blocked_reason) AND j.admitted_at IS NULL) IS TRUE
           FOR UPDATE OF j SKIP LOCKED)
    UPDATE ingest_jobs j SET blocked_reason = 'limited' WHERE j.id = ANY (ARRAY(SELECT s.id FROM stale s));
    GET DIAGNOSTICS v_moved = ROW_COUNT;
    RETURN v_moved;
END $$;

-- Handle a queue whose first job was claimable before its partition had limits (held): block such jobs among the
-- first 500. If all of them were such jobs, lock the first of 20,000 that may be claimed and return its id, so
-- that claims need not wait until the rest is blocked. If id is NULL, the caller claims no job now.
CREATE OR REPLACE FUNCTION queue_workflows_past_lines(p_queue text, OUT held boolean, OUT id text)
LANGUAGE plpgsql
{by_index()} AS $$
#variable_conflict use_column
DECLARE
    c_most  CONSTANT integer := 500;
    v_all   boolean;
    v_moved integer;
BEGIN
    SELECT s.partition_max_running IS NOT NULL OR s.partition_rate_limit IS NOT NULL INTO v_all
      FROM queue_settings s WHERE s.queue = p_queue;
    SELECT j.partition_key IS NOT NULL AND j.admitted_at IS NULL AND (v_all OR EXISTS (
               SELECT FROM queue_partitions p WHERE p.queue = p_queue AND p.partition_key = j.partition_key))
      INTO held
      FROM ingest_jobs j
     WHERE j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
     ORDER BY j.priority, j.seq LIMIT 1;
    IF held IS NOT TRUE THEN
        RETURN;
    END IF;
    v_moved := queue_workflows_hold_back(p_queue, c_most, c_most);
    IF v_moved > 0 AND v_moved < c_most THEN
        RETURN;  -- the next claim finds all of them blocked
    END IF;
    SELECT j.id INTO id FROM ingest_jobs j
     WHERE j.id = ANY (ARRAY(
            SELECT a.id FROM (
                SELECT q.id, q.partition_key, q.admitted_at FROM ingest_jobs q
                 WHERE q.queue = p_queue AND queue_workflows_is_claimable(q.status, q.blocked_reason)
                 ORDER BY q.priority, q.seq LIMIT 20000) a
             WHERE a.partition_key IS NULL OR a.admitted_at IS NOT NULL OR NOT (v_all OR EXISTS (
                   SELECT FROM queue_partitions p
                    WHERE p.queue = p_queue AND p.partition_key = a.partition_key))
             LIMIT 64))
       AND queue_workflows_is_claimable(j.status, j.blocked_reason) IS TRUE
     ORDER BY j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
END $$;

-- Check the partitions that are due, and the ones in which no job was admitted because a transaction had
-- locked the first. They are checked when the transaction commits. Also block some jobs that were claimable
-- before their partition had limits. Return how many partitions had no admitted job.
CREATE OR REPLACE FUNCTION queue_workflows_mend_lines() RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off
SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    v_count bigint;
    v_queue text;
    v_moved integer := 0;
BEGIN
    PERFORM queue_workflows_demand('UPDATE', 'ingest_jobs', 'status');
    PERFORM queue_workflows_ask_partition(d.queue, d.partition_key)
       FROM (SELECT DISTINCT o.queue, o.partition_key FROM (
                 SELECT queue, partition_key FROM partition_dues WHERE due_at <= now() LIMIT 1000) o) d;
    SELECT count(queue_workflows_ask_partition(l.queue, l.partition_key) IS NULL) INTO v_count
      FROM (SELECT p.queue, p.partition_key FROM queue_workflows_partitions(NULL, true) p
             WHERE NOT EXISTS (SELECT FROM partition_dues d
                                WHERE d.queue = p.queue AND d.partition_key = p.partition_key)
               AND NOT EXISTS (
                   SELECT FROM ingest_jobs j
                    WHERE j.queue = p.queue AND j.partition_key = p.partition_key
                      AND j.partition_key IS NOT NULL AND {has_place(j)})
             LIMIT 1000) l;
    FOR v_queue IN SELECT l.queue FROM queue_partition_limits l ORDER BY l.queue LOOP
        EXIT WHEN v_moved >= 1000;
        v_moved := v_moved + queue_workflows_hold_back(v_queue, 20000, 1000 - v_moved);
    END LOOP;
    RETURN v_count;
END $$;
