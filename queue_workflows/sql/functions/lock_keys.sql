-- Admit one job of each lock key at a time: it runs or is claimable. The others wait with
-- blocked_reason 'locked', outside of the claim's index. The admission runs when a transaction commits, in
-- queue_workflows_take_turns and nowhere else. While it runs, the noted keys and partitions are marked as `admits`:
-- so the triggers of the jobs recognise its UPDATEs, and only the tables' owner can write that mark (decision 0024).

-- Note that the waiters of a lock key must be checked before this transaction commits.
CREATE OR REPLACE FUNCTION queue_workflows_ask_turn(p_jobs name, p_key text) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    -- The arguments of a plpgsql function share a collation, here that of `name`, which the index does not have.
    IF p_key IS NOT NULL AND p_jobs IN ('workflow_node_jobs', 'ingest_jobs') AND NOT EXISTS (
        SELECT FROM lock_turns WHERE xid = pg_current_xact_id() AND jobs = p_jobs
           AND lock_key = p_key COLLATE "default" AND NOT admits) THEN
        INSERT INTO lock_turns (jobs, lock_key) VALUES (p_jobs, p_key);
    END IF;
END $$;

-- Take the advisory locks of some keys until the transaction ends, and return the keys whose locks it has. There are
-- 256, so that a bulk insert of many keys does not fill the server's lock table. They are taken in ascending order, so
-- that no two commits deadlock. A commit holds them for milliseconds, but many commits of one key queue for its lock. A
-- transaction that stays open after SET CONSTRAINTS ALL IMMEDIATE holds them for as long as it likes. So a transaction
-- waits up to 1 s in all, or the lock_timeout of its session, and leaves out the locks that are not free then.
CREATE OR REPLACE FUNCTION queue_workflows_take_locks(p_jobs text, p_keys text[]) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    v_class   integer := hashtext('queue_workflows.lock.' || p_jobs);
    v_timeout text := current_setting('lock_timeout');
    v_until   double precision;
    v_left_ms double precision;
    v_place   record;
    v_missing text[];
BEGIN
    FOR v_place IN SELECT (hashtextextended('queue_workflows.lock.' || p_jobs || '.' || key, 0) & 255)::integer AS n,
                          array_agg(key) AS keys
                     FROM unnest(p_keys) AS k (key) GROUP BY 1 ORDER BY 1 LOOP
        CONTINUE WHEN pg_try_advisory_xact_lock(v_class, v_place.n);
        IF v_until IS NULL THEN
            v_until := nullif(current_setting('queue_workflows.locks_until', true), '');
            IF v_until IS NULL THEN
                v_until := extract(epoch FROM clock_timestamp() + least(nullif(v_timeout::interval, '0'), '1 s'));
                PERFORM set_config('queue_workflows.locks_until', v_until::text, true);
            END IF;
        END IF;
        v_left_ms := (v_until - extract(epoch FROM clock_timestamp())) * 1000;
        IF v_left_ms BETWEEN 1 AND 1000 THEN
            BEGIN
                PERFORM set_config('lock_timeout', v_left_ms::integer::text, true);
                PERFORM pg_advisory_xact_lock(v_class, v_place.n);
                PERFORM set_config('lock_timeout', v_timeout, true);
                CONTINUE;
            EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
                NULL;  -- which also sets lock_timeout back
            END;
        END IF;
        v_missing := v_missing || v_place.keys;
    END LOOP;
    RETURN CASE WHEN v_missing IS NULL THEN p_keys
                ELSE ARRAY(SELECT key FROM unnest(p_keys) AS k (key) WHERE key <> ALL (v_missing)) END;
END $$;

-- Admit the next job of each of these keys: the first in claim order, if none is admitted, or if the admitted
-- one is unclaimed and further back. Return how many were admitted. The caller holds the keys' advisory locks and
-- has marked their notes; no row is waited for.
CREATE OR REPLACE FUNCTION queue_workflows_give_turns(p_jobs text, p_keys text[]) RETURNS bigint
LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    v_count bigint;
BEGIN
    -- Once for each table: dynamic SQL for both would be planned again at each commit that has a lock key.
    IF p_jobs = 'ingest_jobs' THEN
        {give_turns(ingest_jobs)}
    ELSE
        {give_turns(workflow_node_jobs)}
    END IF;
    RETURN v_count;
END $$;

-- Execute a statement for each of these jobs, `$1` in its text, until it has changed `p_most` rows; return how many. A job for
-- which it raises is passed over: a waiting row that cannot be written must not fail the commit of another job.
CREATE OR REPLACE FUNCTION queue_workflows_each_apart(p_statement text, p_ids text[], p_most bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_id    text;
    v_one   bigint;
    v_count bigint := 0;
BEGIN
    FOREACH v_id IN ARRAY coalesce(p_ids, '{}') LOOP
        EXIT WHEN v_count >= p_most;
        BEGIN
            EXECUTE p_statement USING v_id;
            GET DIAGNOSTICS v_one = ROW_COUNT;
            v_count := v_count + v_one;
        EXCEPTION WHEN OTHERS THEN
            RAISE WARNING 'job % cannot be admitted or blocked: %', v_id, SQLERRM;
        END;
    END LOOP;
    RETURN v_count;
END $$;

-- Admit the next job of each key by itself, after a waiting job of one key has raised: the next of that key is
-- admitted instead. Return how many were admitted. The caller is as for queue_workflows_give_turns.
CREATE OR REPLACE FUNCTION queue_workflows_give_turns_singly(p_jobs text, p_keys text[]) RETURNS bigint
LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    v_key   text;
    v_ids   text[];
    v_one   integer;
    v_count bigint := 0;
BEGIN
    FOREACH v_key IN ARRAY p_keys LOOP
        EXECUTE format($q$ SELECT 1 FROM %1$I j WHERE {has_key(j, $1)} LIMIT 1 $q$, p_jobs) INTO v_one USING v_key;
        CONTINUE WHEN v_one IS NOT NULL;
        EXECUTE format($q$ SELECT array_agg(h.id) FROM (
            SELECT w.id FROM %1$I w WHERE w.lock_key IS NOT NULL AND w.lock_key = $1
               AND w.status = 'queued' AND w.blocked_reason = 'locked'
             ORDER BY w.priority, w.seq LIMIT 100) h $q$, p_jobs) INTO v_ids USING v_key;
        v_count := v_count + queue_workflows_each_apart(
            format($q$ UPDATE %I SET blocked_reason = NULL
                        WHERE id = $1 AND (status = 'queued' AND blocked_reason = 'locked') IS TRUE $q$, p_jobs), v_ids, 1);
    END LOOP;
    RETURN v_count;
END $$;

-- Check the noted partitions and lock keys at commit, when every row has its final value. The first noted row of a
-- transaction does it for all: it marks the notes, admits jobs, and deletes the notes that it marked. The other rows
-- find their notes gone. Otherwise each row would read all notes of the transaction again, while it holds the
-- advisory locks: for 4,000 keys that took over a minute. Partitions come first, since a job that they admit may
-- wait for a lock key. Those whose locks another transaction keeps are left to a later claim or sweep.
CREATE OR REPLACE FUNCTION queue_workflows_take_turns() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off AS $$
DECLARE
    v_asked partition_turns[];
    v_one   partition_turns;
    v_turn  record;
    v_ours  text[];
BEGIN
    IF TG_TABLE_NAME = 'lock_turns' THEN
        IF NOT EXISTS (SELECT FROM lock_turns t WHERE t.id = NEW.id) THEN
            RETURN NULL;
        END IF;
    ELSIF NOT EXISTS (SELECT FROM partition_turns t
                       WHERE t.xid = NEW.xid AND t.queue = NEW.queue AND t.partition_key = NEW.partition_key
                         AND NOT t.admits) THEN
        RETURN NULL;
    END IF;
    WITH mine AS (
        UPDATE partition_turns SET admits = true WHERE xid = pg_current_xact_id() AND NOT admits RETURNING *)
    SELECT array_agg(mine::partition_turns) INTO v_asked FROM mine;
    IF v_asked IS NOT NULL AND current_setting('transaction_isolation') <> 'read committed' THEN
        -- This snapshot lacks jobs that were admitted meanwhile: leave the check to the next claim.
        PERFORM queue_workflows_leave_partition(a.queue, a.partition_key, a.starts, '0') FROM unnest(v_asked) a;
    ELSIF v_asked IS NOT NULL THEN
        v_ours := queue_workflows_take_locks(
            'partitions', ARRAY(SELECT a.queue || '/' || a.partition_key FROM unnest(v_asked) a));
        -- Not at once, since each claim of the queue would wait for these locks again, and claim no job.
        PERFORM queue_workflows_leave_partition(a.queue, a.partition_key, a.starts, '1 s') FROM unnest(v_asked) a
          WHERE a.queue || '/' || a.partition_key <> ALL (v_ours);
        BEGIN
            FOREACH v_one IN ARRAY v_asked LOOP
                CONTINUE WHEN v_one.queue || '/' || v_one.partition_key <> ALL (v_ours);
                PERFORM queue_workflows_admit(v_one.queue, v_one.partition_key, v_one.starts);
            END LOOP;
        EXCEPTION WHEN OTHERS THEN
            -- A waiting row that cannot be written must not fail the commit of another job's transaction.
            FOREACH v_one IN ARRAY v_asked LOOP
                CONTINUE WHEN v_one.queue || '/' || v_one.partition_key <> ALL (v_ours);
                BEGIN
                    PERFORM queue_workflows_admit(v_one.queue, v_one.partition_key, v_one.starts);
                EXCEPTION WHEN OTHERS THEN
                    RAISE WARNING 'the waiting jobs of partition % of queue % are left to a later sweep: %',
                        v_one.partition_key, v_one.queue, SQLERRM;
                    PERFORM queue_workflows_leave_partition(v_one.queue, v_one.partition_key, v_one.starts, '5 s');
                END;
            END LOOP;
        END;
    END IF;
    IF v_asked IS NOT NULL THEN
        DELETE FROM partition_turns t
         WHERE t.xid = pg_current_xact_id() AND t.admits
           AND (t.queue, t.partition_key) IN (SELECT a.queue, a.partition_key FROM unnest(v_asked) a);
    END IF;
    FOR v_turn IN
        WITH mine AS (
            UPDATE lock_turns SET admits = true WHERE xid = pg_current_xact_id() AND NOT admits
            RETURNING id, jobs, lock_key)
        SELECT jobs, array_agg(DISTINCT lock_key) AS keys, array_agg(id) AS notes
          FROM mine GROUP BY jobs ORDER BY jobs
    LOOP
        v_ours := queue_workflows_take_locks(v_turn.jobs, v_turn.keys);
        IF cardinality(v_ours) < cardinality(v_turn.keys)
           AND current_setting('queue_workflows.mends', true) IS DISTINCT FROM 'on' THEN
            PERFORM pg_notify('orchestrator_work', 'left');
        END IF;
        BEGIN
            PERFORM queue_workflows_give_turns(v_turn.jobs, v_ours);
        EXCEPTION WHEN unique_violation THEN
            -- This snapshot is older than an admission: queue_workflows_mend_turns checks the key later.
            NULL;
        WHEN OTHERS THEN
            -- A waiting row that cannot be written must not fail the commit of another job's transaction.
            PERFORM queue_workflows_give_turns_singly(v_turn.jobs, v_ours);
        END;
        DELETE FROM lock_turns WHERE id = ANY (v_turn.notes);
    END LOOP;
    RETURN NULL;
END $$;

-- Clean up after deleted jobs. It notes their lock keys and partitions, which are free now, and deletes their logs.
-- The history records each deleted ingest job, unless retention deletes it, which sets queue_workflows.retention. It
-- also records each node that had not ended, if its run is running. It runs as its owner, because a role that may
-- delete a job needs no right to its logs and history.
CREATE OR REPLACE FUNCTION queue_workflows_jobs_gone() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off AS $$
BEGIN
    PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, k.lock_key)
       FROM (SELECT DISTINCT lock_key FROM gone WHERE lock_key IS NOT NULL) k;
    IF TG_TABLE_NAME = 'ingest_jobs' THEN
        PERFORM queue_workflows_ask_partition(k.queue, k.partition_key)
           FROM (SELECT DISTINCT queue::text, partition_key FROM gone
                  WHERE partition_key IS NOT NULL
                    AND (status = 'running' OR status = 'queued' AND admitted_at IS NOT NULL)) k;
        IF coalesce(current_setting('queue_workflows.retention', true), '') <> 'on' THEN
            INSERT INTO ingest_job_events
                   (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, error, detail, actor)
            SELECT id, attempts, 'deleted', claim_no, worker_id, claimed_by, queue, error,
                   jsonb_strip_nulls(jsonb_build_object('task_name', task_name, 'status', status, 'reason', reason,
                       'created_at', created_at, 'idempotency_key', idempotency_key, 'lock_key', lock_key,
                       'partition_key', partition_key)),
                   queue_workflows_actor()
              FROM gone;
        END IF;
    ELSE
        -- Without this row, a deleted node would look like one that was never queued. The engine itself deletes
        -- only nodes of queued runs, whose start queues the missing nodes.
        INSERT INTO workflow_node_events (run_id, node_id, job_id, attempt, event_type, queue, claim_no, detail)
        SELECT g.run_id, g.node_id, g.id, least(greatest(g.attempts, 0), 32767), 'cancelled', g.queue, g.claim_no,
               jsonb_build_object('reason', 'deleted', 'generation', g.generation, 'revision', r.revision)
          FROM gone g
          JOIN workflow_runs r ON r.id = g.run_id AND r.mode = 'node' AND r.status = 'running'
         WHERE NOT queue_workflows_is_terminal_job(g.status);
    END IF;
    DELETE FROM job_attempt_logs l USING gone WHERE l.job_id = gone.id AND l.job_table = TG_TABLE_NAME;
    PERFORM queue_workflows_forget_steps(TG_TABLE_NAME, ARRAY(SELECT id FROM gone));
    PERFORM queue_workflows_forget_parts(TG_TABLE_NAME, ARRAY(SELECT id FROM gone));
    RETURN NULL;
END $$;

-- Note every key that has waiters and no admitted job, because the first was locked by a transaction when its turn
-- came. The commit admits the next job of each. It walks from key to key, however many jobs wait. Return how many
-- keys it noted. Its commit does not wake the orchestrator for keys that it leaves: that one comes again in a second.
CREATE OR REPLACE FUNCTION queue_workflows_mend_turns(p_jobs text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT
{by_index()} AS $$
DECLARE
    v_keys text[];
BEGIN
    PERFORM queue_workflows_demand('UPDATE', p_jobs, 'status');
    EXECUTE format($q$
        {keys_with_waiters()}
        SELECT array_agg(key) FROM line
         WHERE key IS NOT NULL AND NOT EXISTS (
               SELECT FROM %1$I j WHERE {has_key(j, line.key)} OFFSET 0)
        $q$, p_jobs) INTO v_keys;
    PERFORM set_config('queue_workflows.mends', 'on', true);
    PERFORM queue_workflows_ask_turn(p_jobs, k.key) FROM unnest(v_keys) k (key);
    RETURN coalesce(cardinality(v_keys), 0);
END $$;

-- Return whether a job of either family waits for a lock key or is 'unserved', and whether one waits for the limit of
-- its partition. Sorts are off, since without statistics a sort of all blocked jobs costs as little as the first
-- entry of the index that has the order (decision 0019).
CREATE OR REPLACE FUNCTION queue_workflows_has_waiters(OUT locked boolean, OUT limited boolean)
LANGUAGE plpgsql STABLE
{by_index()}
SET search_path FROM CURRENT AS $$
BEGIN
    locked := coalesce(
        (SELECT true FROM workflow_node_jobs
          WHERE lock_key IS NOT NULL AND status = 'queued' AND blocked_reason = 'locked'
          ORDER BY lock_key LIMIT 1),
        (SELECT true FROM ingest_jobs
          WHERE lock_key IS NOT NULL AND status = 'queued' AND blocked_reason = 'locked'
          ORDER BY lock_key LIMIT 1),
        (SELECT true FROM workflow_node_jobs
          WHERE status = 'queued' AND blocked_reason = 'unserved' AND octet_length(queue) >= 0
          ORDER BY queue LIMIT 1),
        (SELECT true FROM ingest_jobs
          WHERE status = 'queued' AND blocked_reason = 'unserved' AND octet_length(queue) >= 0
          ORDER BY queue LIMIT 1), false);
    limited := coalesce(
        (SELECT true FROM ingest_jobs
          WHERE partition_key IS NOT NULL AND status = 'queued' AND blocked_reason = 'limited'
          ORDER BY queue, partition_key LIMIT 1), false);
END $$;
