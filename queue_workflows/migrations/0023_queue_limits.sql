-- Queues that can be paused, and limits of how much of a queue, or of a partition key in it, runs at once or
-- starts in any period. A queue's own pause and limits are looked at before the claim's index is. Jobs of a
-- partition that has limits wait outside of it, with blocked_reason 'limited', until they are let in: no more
-- at a time than may start now.

ALTER TABLE queue_settings
    ADD COLUMN IF NOT EXISTS paused_at    timestamptz,
    -- A pause ends then by itself; NULL: by hand.
    ADD COLUMN IF NOT EXISTS paused_until timestamptz,
    ADD COLUMN IF NOT EXISTS paused_by    text,
    ADD COLUMN IF NOT EXISTS max_running integer CHECK (max_running > 0),
    -- No more than rate_limit starts in any rate_period_s seconds.
    ADD COLUMN IF NOT EXISTS rate_limit    integer CHECK (rate_limit > 0),
    ADD COLUMN IF NOT EXISTS rate_period_s double precision CHECK (rate_period_s > 0),
    -- The same for each of its partition keys, where queue_partitions does not say otherwise.
    ADD COLUMN IF NOT EXISTS partition_max_running   integer CHECK (partition_max_running > 0),
    ADD COLUMN IF NOT EXISTS partition_rate_limit    integer CHECK (partition_rate_limit > 0),
    ADD COLUMN IF NOT EXISTS partition_rate_period_s double precision CHECK (partition_rate_period_s > 0),
    ADD CONSTRAINT queue_settings_rates_check CHECK (
        (rate_limit IS NULL) = (rate_period_s IS NULL)
        AND (partition_rate_limit IS NULL) = (partition_rate_period_s IS NULL));

-- What an operator says about one partition key of a queue; what is NULL is as its queue says of each.
CREATE TABLE IF NOT EXISTS queue_partitions (
    queue         text NOT NULL CHECK (queue <> ''),
    partition_key text NOT NULL,
    paused_at     timestamptz,
    paused_until  timestamptz,
    paused_by     text,
    max_running   integer CHECK (max_running > 0),
    rate_limit    integer CHECK (rate_limit > 0),
    rate_period_s double precision CHECK (rate_period_s > 0),
    updated_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (queue, partition_key),
    CONSTRAINT queue_partitions_rate_check CHECK ((rate_limit IS NULL) = (rate_period_s IS NULL))
);

-- The queues whose partitions have limits.
CREATE OR REPLACE VIEW queue_partition_limits AS
    SELECT s.queue FROM queue_settings s
     WHERE s.partition_max_running IS NOT NULL OR s.partition_rate_limit IS NOT NULL
        OR EXISTS (SELECT FROM queue_partitions p WHERE p.queue = s.queue);

-- The last rate_limit starts, numbered: the n-th may follow when the one of rate_limit before it is as old
-- as the period. Of a queue, and of a partition; no rows without a rate.
CREATE TABLE IF NOT EXISTS queue_starts (
    queue      text NOT NULL,
    n          bigint NOT NULL,
    started_at timestamptz NOT NULL,
    PRIMARY KEY (queue, n)
);
CREATE TABLE IF NOT EXISTS partition_starts (
    queue         text NOT NULL,
    partition_key text NOT NULL,
    n             bigint NOT NULL,
    started_at    timestamptz NOT NULL,
    PRIMARY KEY (queue, partition_key, n)
);

-- When a partition's line is to be looked at again. Rows are only added and deleted, so that an older
-- snapshot may add one, too.
CREATE TABLE IF NOT EXISTS partition_dues (
    id            bigserial PRIMARY KEY,
    queue         text NOT NULL,
    partition_key text NOT NULL,
    due_at        timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS partition_dues_due_idx ON partition_dues (queue, due_at);
CREATE INDEX IF NOT EXISTS partition_dues_partition_idx ON partition_dues (queue, partition_key);

-- As lock_turns: the partitions to be looked at before their transaction commits, and how many of their
-- jobs it has started.
CREATE UNLOGGED TABLE IF NOT EXISTS partition_turns (
    xid           xid8 NOT NULL DEFAULT pg_current_xact_id(),
    queue         text NOT NULL,
    partition_key text NOT NULL,
    starts        integer NOT NULL DEFAULT 0,
    PRIMARY KEY (xid, queue, partition_key)
);

ALTER TABLE ingest_jobs ADD COLUMN IF NOT EXISTS admitted_at timestamptz;
-- Who runs or is let in, and who is in line. A job without a partition key is in neither.
CREATE INDEX IF NOT EXISTS ingest_jobs_partition_idx ON ingest_jobs (queue, partition_key, status)
    WHERE partition_key IS NOT NULL
      AND (status = 'running' OR (status = 'queued' AND (blocked_reason IS NULL OR admitted_at IS NOT NULL)));
CREATE INDEX IF NOT EXISTS ingest_jobs_limited_idx ON ingest_jobs (queue, partition_key, priority, seq)
    WHERE partition_key IS NOT NULL AND status = 'queued' AND blocked_reason = 'limited';

-- A look at this partition's line when the transaction commits.
CREATE OR REPLACE FUNCTION queue_workflows_ask_partition(p_queue text, p_key text, p_starts integer DEFAULT 0)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_starts > 0 THEN
        UPDATE partition_turns SET starts = starts + p_starts
         WHERE xid = pg_current_xact_id() AND queue = p_queue AND partition_key = p_key;
        IF FOUND THEN
            RETURN;
        END IF;
    ELSIF EXISTS (SELECT FROM partition_turns WHERE xid = pg_current_xact_id() AND queue = p_queue
                     AND partition_key = p_key) THEN
        RETURN;
    END IF;
    INSERT INTO partition_turns (queue, partition_key, starts) VALUES (p_queue, p_key, p_starts);
END $$;

-- What its partition's limits make of a job that is inserted (p_old NULL) or changed; NULL: leave the row
-- as it is. A job is not due, then limited, then locked, then free to be claimed: admitted_at says that it
-- has got past the second. 'admitted' and 'held_back' are words of turns that are never stored.
CREATE OR REPLACE FUNCTION queue_workflows_limit_gate(p_old ingest_jobs, p_new ingest_jobs)
RETURNS ingest_jobs LANGUAGE plpgsql AS $$
DECLARE
    v_waits   boolean;
    v_paused  boolean;
    v_rated   boolean;
    v_counted boolean;
BEGIN
    IF p_new.blocked_reason IN ('let_in', 'taken_back') THEN
        RETURN p_new;
    END IF;
    IF p_new.blocked_reason = 'admitted' THEN
        p_new.blocked_reason := NULL;
        p_new.admitted_at := now();
        RETURN p_new;
    END IF;
    IF p_new.blocked_reason = 'held_back' THEN
        p_new.blocked_reason := 'limited';
        p_new.admitted_at := NULL;
        RETURN p_new;
    END IF;
    IF p_old.partition_key IS NOT NULL
       AND (p_old.queue, p_old.partition_key) IS DISTINCT FROM (p_new.queue, p_new.partition_key) THEN
        PERFORM queue_workflows_ask_partition(p_old.queue, p_old.partition_key);
        p_new.admitted_at := NULL;
        IF p_new.blocked_reason = 'limited' THEN
            p_new.blocked_reason := NULL;
        END IF;
    END IF;
    IF p_new.partition_key IS NULL THEN
        RETURN p_new;
    END IF;
    SELECT p.queue IS NOT NULL OR s.partition_max_running IS NOT NULL OR s.partition_rate_limit IS NOT NULL,
           coalesce(p.paused_at IS NOT NULL AND (p.paused_until IS NULL OR p.paused_until > now()), false),
           coalesce(p.rate_limit, s.partition_rate_limit) IS NOT NULL
      INTO v_waits, v_paused, v_rated
      FROM (SELECT) AS one
      LEFT JOIN queue_settings s ON s.queue = p_new.queue
      LEFT JOIN queue_partitions p ON p.queue = p_new.queue AND p.partition_key = p_new.partition_key;
    v_waits := coalesce(v_waits, false);
    v_counted := p_old.status = 'running' OR p_old.admitted_at IS NOT NULL;
    IF p_new.status = 'queued' THEN
        IF p_old.status IS DISTINCT FROM 'queued' THEN
            p_new.admitted_at := NULL;
        END IF;
        IF p_new.available_at > now() THEN
            p_new.admitted_at := NULL;
            IF p_new.blocked_reason = 'limited' THEN
                p_new.blocked_reason := 'not_due';
            END IF;
        ELSIF v_waits AND p_new.admitted_at IS NULL AND (
                  p_new.blocked_reason IS NULL
                  OR p_new.blocked_reason = 'not_due' AND p_new.available_at IS NULL) THEN
            p_new.blocked_reason := 'limited';
        END IF;
        IF p_new.blocked_reason = 'limited' THEN
            p_new.admitted_at := NULL;
        END IF;
        IF v_counted AND p_new.admitted_at IS NULL AND (v_waits OR p_old.admitted_at IS NOT NULL)
           OR p_new.blocked_reason = 'limited' AND p_old.blocked_reason IS DISTINCT FROM 'limited' THEN
            PERFORM queue_workflows_ask_partition(p_new.queue, p_new.partition_key);
        END IF;
    ELSIF p_new.status = 'running' AND p_old.status IS DISTINCT FROM 'running' THEN
        IF v_waits AND p_new.claim_no = p_old.claim_no THEN
            RETURN NULL;  -- a plain UPDATE, which knows no limits
        ELSIF v_waits AND (p_old.admitted_at IS NULL OR v_paused OR v_rated AND p_old.admitted_at > now()) THEN
            -- The last: this transaction is older than that which found room, and its start would be too early.
            p_new := p_old;
            p_new.blocked_reason := 'limited';
            p_new.admitted_at := NULL;
            PERFORM queue_workflows_ask_partition(p_new.queue, p_new.partition_key);
        ELSIF v_waits OR p_old.admitted_at IS NOT NULL THEN
            PERFORM queue_workflows_ask_partition(p_new.queue, p_new.partition_key, 1);
        END IF;
    ELSIF p_new.status <> 'running' AND (v_waits AND v_counted OR p_old.admitted_at IS NOT NULL) THEN
        p_new.admitted_at := NULL;
        PERFORM queue_workflows_ask_partition(p_new.queue, p_new.partition_key);
    END IF;
    RETURN p_new;
END $$;

-- How many of the next p_wanted starts a rate has room for now, and when for one more; NULL: no sooner than
-- one of these starts. p_starts: the starts of p_limit before each of them, oldest first, NULL: none is known.
CREATE OR REPLACE FUNCTION queue_workflows_rate_room(
    p_limit integer, p_period_s double precision, p_wanted integer, p_starts timestamptz[],
    OUT room integer, OUT due_at timestamptz)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    -- A period that is out of its range, of a row from before there was one, must not overflow an interval.
    p_period_s := least(greatest(p_period_s, 0), 31622400);
    room := least(p_wanted, p_limit);
    SELECT least(room, min(s.place) - 1), min(s.at) + p_period_s * interval '1 second' INTO room, due_at
      FROM unnest(p_starts) WITH ORDINALITY AS s (at, place)
     WHERE s.at > now() - p_period_s * interval '1 second';
END $$;

-- Let in what the limits of a partition leave room for, and take back what they do not, of those that no
-- worker has claimed. At commit, with the partition's advisory lock held; no row is waited for.
-- BETWEEN, and the key in ORDER BY: only the indexes by partition have that order.
CREATE OR REPLACE FUNCTION queue_workflows_admit(p_queue text, p_key text, p_starts integer) RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    c_ahead   CONSTANT integer := 256;  -- let in and not claimed: what a batch of a worker may need
    v_paused  boolean;
    v_until   timestamptz;
    v_max     integer;
    v_rate    integer;
    v_period  double precision;
    v_waits   boolean;
    v_last    bigint := 0;
    v_running integer := 0;
    v_ahead   integer;
    v_room    integer := c_ahead;
    v_due     timestamptz;
    v_stale   integer := 0;
    v_count   integer;
BEGIN
    SELECT p.paused_at IS NOT NULL AND (p.paused_until IS NULL OR p.paused_until > now()), p.paused_until,
           coalesce(p.max_running, s.partition_max_running),
           coalesce(p.rate_limit, s.partition_rate_limit),
           CASE WHEN p.rate_limit IS NULL THEN s.partition_rate_period_s ELSE p.rate_period_s END,
           p.queue IS NOT NULL OR s.partition_max_running IS NOT NULL OR s.partition_rate_limit IS NOT NULL
      INTO v_paused, v_until, v_max, v_rate, v_period, v_waits
      FROM (SELECT) AS one
      LEFT JOIN queue_settings s ON s.queue = p_queue
      LEFT JOIN queue_partitions p ON p.queue = p_queue AND p.partition_key = p_key;
    IF v_rate IS NOT NULL THEN
        SELECT coalesce((SELECT n FROM partition_starts WHERE queue = p_queue AND partition_key = p_key
                          ORDER BY queue DESC, partition_key DESC, n DESC LIMIT 1), 0) INTO v_last;
        IF p_starts > 0 THEN
            INSERT INTO partition_starts (queue, partition_key, n, started_at)
            SELECT p_queue, p_key, v_last + i, clock_timestamp() FROM generate_series(1, p_starts) i;
            v_last := v_last + p_starts;
            DELETE FROM partition_starts
             WHERE queue = p_queue AND partition_key = p_key AND n <= v_last - v_rate;
        END IF;
    END IF;
    DELETE FROM partition_dues WHERE queue = p_queue AND partition_key = p_key;

    -- What was free before there were limits is none of those that are let in.
    IF v_waits THEN
        WITH stale AS MATERIALIZED (
            SELECT j.id FROM ingest_jobs j
             WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
               AND j.status = 'queued' AND j.blocked_reason IS NULL AND j.admitted_at IS NULL
             ORDER BY j.partition_key LIMIT 1000 FOR UPDATE SKIP LOCKED)
        UPDATE ingest_jobs j SET blocked_reason = 'held_back' FROM stale WHERE j.id = stale.id;
        GET DIAGNOSTICS v_stale = ROW_COUNT;
    END IF;
    SELECT count(*) INTO v_ahead FROM (
        SELECT FROM ingest_jobs j
         WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
           AND j.status = 'queued' AND (j.blocked_reason IS NULL OR j.admitted_at IS NOT NULL)
         ORDER BY j.partition_key LIMIT 4 * c_ahead) AS let_in;
    IF v_max IS NOT NULL THEN
        SELECT count(*) INTO v_running FROM (
            SELECT FROM ingest_jobs j
             WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
               AND j.status = 'running' ORDER BY j.partition_key LIMIT v_max) AS running;
        v_room := least(v_room, v_max - v_running);
    END IF;
    IF v_rate IS NOT NULL AND v_room > 0 THEN
        SELECT r.room, r.due_at INTO v_room, v_due
          FROM queue_workflows_rate_room(v_rate, v_period, v_room, ARRAY(
                   SELECT s.started_at
                     FROM generate_series(v_last - v_rate + 1, v_last - v_rate + v_room) AS place (n)
                     LEFT JOIN partition_starts s
                       ON s.queue = p_queue AND s.partition_key = p_key AND s.n = place.n
                    ORDER BY place.n)) r;
    END IF;
    IF v_paused THEN
        v_room := 0;
        v_due := coalesce(v_until, 'infinity');
    END IF;
    v_room := v_room - v_ahead;

    -- Taken back: those past the room, and those that others in line now come before.
    IF v_room <= 0 AND v_ahead > 0 THEN
        WITH head AS MATERIALIZED (
            SELECT j.priority, j.seq FROM ingest_jobs j
             WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
               AND j.status = 'queued' AND j.blocked_reason = 'limited'
             ORDER BY j.partition_key, j.priority, j.seq LIMIT 1),
        let_in AS MATERIALIZED (
            SELECT j.id, j.priority, j.seq FROM ingest_jobs j
             WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
               AND j.status = 'queued' AND j.admitted_at IS NOT NULL
             ORDER BY j.partition_key LIMIT 4 * c_ahead FOR UPDATE SKIP LOCKED),
        back AS MATERIALIZED (
            SELECT l.id FROM (SELECT i.*, row_number() OVER (ORDER BY i.priority DESC, i.seq DESC) AS place
                                FROM let_in i) l
             WHERE l.place <= -v_room OR l.place <= 16 AND (l.priority, l.seq) > (
                   SELECT h.priority, h.seq FROM head h))
        UPDATE ingest_jobs j SET blocked_reason = 'held_back' FROM back WHERE j.id = back.id;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_room := v_room + v_count;
    END IF;
    IF v_room > 0 THEN
        WITH heads AS MATERIALIZED (
            SELECT j.id FROM ingest_jobs j
             WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
               AND j.status = 'queued' AND j.blocked_reason = 'limited'
             ORDER BY j.partition_key, j.priority, j.seq LIMIT v_room FOR UPDATE SKIP LOCKED)
        UPDATE ingest_jobs j SET blocked_reason = 'admitted' FROM heads WHERE j.id = heads.id;
    END IF;
    IF v_stale = 1000 THEN
        v_due := now();
    END IF;
    IF v_due IS NOT NULL AND (
        SELECT true FROM ingest_jobs j
         WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
           AND j.status = 'queued' AND j.blocked_reason = 'limited'
         ORDER BY j.partition_key, j.priority, j.seq LIMIT 1) THEN
        INSERT INTO partition_dues (queue, partition_key, due_at) VALUES (p_queue, p_key, v_due);
    END IF;
END $$;

-- As in 0017, with partitions first: whom they let in may ask for the turn of a lock key.
-- Each key by itself, where a waiting job of one raises when it is let in: the next in line goes before it. The
-- caller holds the keys' advisory locks. How many were let in.
CREATE OR REPLACE FUNCTION queue_workflows_give_turns_singly(p_jobs text, p_keys text[]) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_key   text;
    v_id    text;
    v_one   integer;
    v_count bigint := 0;
BEGIN
    FOREACH v_key IN ARRAY p_keys LOOP
        EXECUTE format($q$ SELECT 1 FROM %1$I j WHERE j.lock_key IS NOT NULL AND j.lock_key = $1
                           AND (j.status = 'running' OR (j.status = 'queued' AND j.blocked_reason IS NULL))
                           LIMIT 1 $q$, p_jobs) INTO v_one USING v_key;
        CONTINUE WHEN v_one IS NOT NULL;
        FOR v_id IN EXECUTE format($q$
            SELECT w.id FROM %1$I w WHERE w.lock_key IS NOT NULL AND w.lock_key = $1
               AND w.status = 'queued' AND w.blocked_reason = 'locked'
             ORDER BY w.priority, w.seq LIMIT 100 $q$, p_jobs) USING v_key
        LOOP
            BEGIN
                EXECUTE format('UPDATE %I SET blocked_reason = ''let_in'' WHERE id = $1', p_jobs) USING v_id;
                v_count := v_count + 1;
                EXIT;
            EXCEPTION WHEN OTHERS THEN
                RAISE WARNING 'job % cannot have its turn with lock key %: %', v_id, v_key, SQLERRM;
            END;
        END LOOP;
    END LOOP;
    RETURN v_count;
END $$;

CREATE OR REPLACE FUNCTION queue_workflows_take_turns() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_asked partition_turns[];
    v_one   partition_turns;
    v_turn  record;
BEGIN
    WITH mine AS (DELETE FROM partition_turns WHERE xid = pg_current_xact_id() RETURNING *)
    SELECT array_agg(mine::partition_turns) INTO v_asked FROM mine;
    IF v_asked IS NOT NULL AND current_setting('transaction_isolation') <> 'read committed' THEN
        -- Who was let in meanwhile is not in this snapshot: left to the next who looks.
        INSERT INTO partition_dues (queue, partition_key, due_at)
        SELECT a.queue, a.partition_key, now() FROM unnest(v_asked) a;
        PERFORM pg_notify('ingest_job_ready', a.queue) FROM unnest(v_asked) a GROUP BY a.queue;
    ELSIF v_asked IS NOT NULL THEN
        PERFORM queue_workflows_lock_keys(
            'partitions', ARRAY(SELECT a.queue || '/' || a.partition_key FROM unnest(v_asked) a));
        BEGIN
            FOREACH v_one IN ARRAY v_asked LOOP
                PERFORM queue_workflows_admit(v_one.queue, v_one.partition_key, v_one.starts);
            END LOOP;
        EXCEPTION WHEN OTHERS THEN
            -- A waiting row that cannot be written must not fail the commit of whoever left the partition.
            FOREACH v_one IN ARRAY v_asked LOOP
                BEGIN
                    PERFORM queue_workflows_admit(v_one.queue, v_one.partition_key, v_one.starts);
                EXCEPTION WHEN OTHERS THEN
                    RAISE WARNING 'the line of partition % of queue % is left to the sweep: %',
                        v_one.partition_key, v_one.queue, SQLERRM;
                END;
            END LOOP;
        END;
    END IF;
    FOR v_turn IN
        WITH mine AS (DELETE FROM lock_turns WHERE xid = pg_current_xact_id() RETURNING jobs, lock_key)
        SELECT jobs, array_agg(DISTINCT lock_key) AS keys FROM mine GROUP BY jobs ORDER BY jobs
    LOOP
        PERFORM queue_workflows_lock_keys(v_turn.jobs, v_turn.keys);
        BEGIN
            PERFORM queue_workflows_give_turns(v_turn.jobs, v_turn.keys);
        EXCEPTION WHEN unique_violation THEN
            -- Of a snapshot older than who was let in meanwhile: the net under turns sees to the line.
            NULL;
        WHEN OTHERS THEN
            -- A waiting row that cannot be written must not fail the commit of whoever gave up its turn.
            PERFORM queue_workflows_give_turns_singly(v_turn.jobs, v_turn.keys);
        END;
    END LOOP;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS partition_turns_take ON partition_turns;
CREATE CONSTRAINT TRIGGER partition_turns_take AFTER INSERT ON partition_turns DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_take_turns();

-- As in 0017, and a place under a partition's limits is free again.
CREATE OR REPLACE FUNCTION queue_workflows_jobs_gone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, k.lock_key)
       FROM (SELECT DISTINCT lock_key FROM gone WHERE lock_key IS NOT NULL) k;
    IF TG_TABLE_NAME = 'ingest_jobs' THEN
        PERFORM queue_workflows_ask_partition(k.queue, k.partition_key)
           FROM (SELECT DISTINCT queue::text, partition_key FROM gone
                  WHERE partition_key IS NOT NULL
                    AND (status = 'running' OR status = 'queued' AND admitted_at IS NOT NULL)) k;
    END IF;
    RETURN NULL;
END $$;

-- The partitions of a queue (NULL: of all) that have somebody in line (p_in_line), or that runs or is let in.
-- Walks from one to the next, however long the lines are.
CREATE OR REPLACE FUNCTION queue_workflows_partitions(p_queue text, p_in_line boolean)
RETURNS TABLE (queue text, partition_key text) LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
BEGIN
    IF p_in_line THEN
        RETURN QUERY WITH RECURSIVE line (queue, key) AS (
            (SELECT j.queue::text, j.partition_key FROM ingest_jobs j
              WHERE j.partition_key IS NOT NULL AND j.status = 'queued' AND j.blocked_reason = 'limited'
                AND j.queue >= coalesce(p_queue, '')
              ORDER BY j.queue, j.partition_key LIMIT 1)
            UNION ALL
            SELECT n.queue, n.partition_key FROM line CROSS JOIN LATERAL (
                SELECT j.queue::text, j.partition_key FROM ingest_jobs j
                 WHERE j.partition_key IS NOT NULL AND j.status = 'queued' AND j.blocked_reason = 'limited'
                   AND (j.queue, j.partition_key) > (line.queue, line.key)
                 ORDER BY j.queue, j.partition_key LIMIT 1) n
             WHERE p_queue IS NULL OR line.queue = p_queue)
        SELECT l.queue, l.key FROM line l WHERE p_queue IS NULL OR l.queue = p_queue;
    ELSE
        RETURN QUERY WITH RECURSIVE held (queue, key) AS (
            (SELECT j.queue::text, j.partition_key FROM ingest_jobs j
              WHERE j.partition_key IS NOT NULL AND (j.status = 'running' OR (
                    j.status = 'queued' AND (j.blocked_reason IS NULL OR j.admitted_at IS NOT NULL)))
                AND j.queue >= coalesce(p_queue, '')
              ORDER BY j.queue, j.partition_key LIMIT 1)
            UNION ALL
            SELECT n.queue, n.partition_key FROM held CROSS JOIN LATERAL (
                SELECT j.queue::text, j.partition_key FROM ingest_jobs j
                 WHERE j.partition_key IS NOT NULL AND (j.status = 'running' OR (
                       j.status = 'queued' AND (j.blocked_reason IS NULL OR j.admitted_at IS NOT NULL)))
                   AND (j.queue, j.partition_key) > (held.queue, held.key)
                 ORDER BY j.queue, j.partition_key LIMIT 1) n
             WHERE p_queue IS NULL OR held.queue = p_queue)
        SELECT h.queue, h.key FROM held h WHERE p_queue IS NULL OR h.queue = p_queue;
    END IF;
END $$;

-- The safety net under lines: those that are due, and those in which nobody was let in because the first was
-- locked by somebody. They are looked at when the transaction commits. How many of the latter.
CREATE OR REPLACE FUNCTION queue_workflows_mend_lines() RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off AS $$
DECLARE
    v_count bigint;
BEGIN
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
                      AND j.partition_key IS NOT NULL AND (j.status = 'running' OR (
                          j.status = 'queued' AND (j.blocked_reason IS NULL OR j.admitted_at IS NOT NULL))))
             LIMIT 1000) l;
    RETURN v_count;
END $$;

-- A change of what is said of a queue or partition: its workers look, first at the lines that it concerns.
CREATE OR REPLACE FUNCTION queue_workflows_queue_set() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_queue text := CASE TG_OP WHEN 'DELETE' THEN OLD.queue ELSE NEW.queue END;
    v_key   text;
BEGIN
    IF TG_TABLE_NAME = 'queue_partitions' THEN
        v_key := CASE TG_OP WHEN 'DELETE' THEN OLD.partition_key ELSE NEW.partition_key END;
        INSERT INTO queue_settings (queue) VALUES (v_queue) ON CONFLICT (queue) DO NOTHING;
        INSERT INTO partition_dues (queue, partition_key, due_at) VALUES (v_queue, v_key, now());
    ELSIF TG_OP <> 'UPDATE'
          OR (OLD.partition_max_running, OLD.partition_rate_limit, OLD.partition_rate_period_s)
             IS DISTINCT FROM
             (NEW.partition_max_running, NEW.partition_rate_limit, NEW.partition_rate_period_s) THEN
        INSERT INTO partition_dues (queue, partition_key, due_at)
        SELECT p.queue, p.partition_key, now() FROM queue_workflows_partitions(v_queue, true) p
        UNION
        SELECT p.queue, p.partition_key, now() FROM queue_workflows_partitions(v_queue, false) p;
    END IF;
    PERFORM pg_notify(CASE WHEN v_queue IN ('cpu', 'gpu') THEN 'node_job_ready' ELSE 'ingest_job_ready' END,
                      v_queue)
      WHERE octet_length(v_queue) <= 200;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS queue_settings_set ON queue_settings;
CREATE TRIGGER queue_settings_set AFTER INSERT OR UPDATE OR DELETE ON queue_settings
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_queue_set();
DROP TRIGGER IF EXISTS queue_partitions_set ON queue_partitions;
CREATE TRIGGER queue_partitions_set AFTER INSERT OR UPDATE OR DELETE ON queue_partitions
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_queue_set();

-- How many of p_wanted jobs of a queue may be claimed now, and, when none may, in how many seconds one may
-- be (NULL: nobody knows). Claims of a queue that has limits of its own take turns, until they commit.
CREATE OR REPLACE FUNCTION queue_workflows_queue_room(
    p_queue text, p_wanted integer, OUT room integer, OUT wait_s double precision)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_set   queue_settings;
    v_last  bigint;
    v_due   timestamptz;
    v_lines integer;
BEGIN
    SELECT * INTO v_set FROM queue_settings WHERE queue = p_queue;
    room := p_wanted;
    IF v_set.paused_at IS NOT NULL AND (v_set.paused_until IS NULL OR v_set.paused_until > now()) THEN
        room := 0;
        wait_s := extract(epoch FROM v_set.paused_until - now());
        RETURN;
    END IF;
    SELECT count(queue_workflows_ask_partition(p_queue, d.partition_key) IS NULL) INTO v_lines
      FROM (SELECT DISTINCT o.partition_key FROM (
                SELECT partition_key FROM partition_dues WHERE queue = p_queue AND due_at <= now()
                 ORDER BY queue, due_at LIMIT 100) o) d;
    IF v_lines > 0 THEN
        room := 0;
        wait_s := 0;
        RETURN;
    END IF;
    IF v_set.max_running IS NULL AND v_set.rate_limit IS NULL THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtext('queue_workflows.queue'), hashtext(p_queue));
    IF v_set.max_running IS NOT NULL THEN
        room := least(room, v_set.max_running - (
            SELECT count(*) FROM (SELECT FROM ingest_jobs j WHERE j.status = 'running' AND j.queue = p_queue
                                   LIMIT v_set.max_running) AS running));
    END IF;
    IF v_set.rate_limit IS NOT NULL AND room > 0 THEN
        SELECT coalesce((SELECT n FROM queue_starts WHERE queue = p_queue
                          ORDER BY queue DESC, n DESC LIMIT 1), 0) INTO v_last;
        SELECT r.room, r.due_at INTO room, v_due
          FROM queue_workflows_rate_room(v_set.rate_limit, v_set.rate_period_s, room, ARRAY(
                   SELECT s.started_at
                     FROM generate_series(v_last - v_set.rate_limit + 1,
                                          v_last - v_set.rate_limit + room) AS place (n)
                     LEFT JOIN queue_starts s ON s.queue = p_queue AND s.n = place.n
                    ORDER BY place.n)) r;
        wait_s := extract(epoch FROM v_due - now());
    END IF;
    room := greatest(room, 0);
END $$;

-- Jobs of a queue that were claimed now, for its rate.
CREATE OR REPLACE FUNCTION queue_workflows_note_starts(p_queue text, p_starts integer) RETURNS void
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v_limit integer := (SELECT rate_limit FROM queue_settings WHERE queue = p_queue);
    v_last  bigint;
BEGIN
    IF v_limit IS NULL OR p_starts < 1 THEN
        RETURN;
    END IF;
    SELECT coalesce((SELECT n FROM queue_starts WHERE queue = p_queue
                      ORDER BY queue DESC, n DESC LIMIT 1), 0) INTO v_last;
    IF v_last NOT BETWEEN 0 AND 1000000000000000 THEN  -- no number that was counted: begin anew
        DELETE FROM queue_starts WHERE queue = p_queue;
        v_last := 0;
    END IF;
    p_starts := least(p_starts, v_limit);  -- no more are ever looked at
    INSERT INTO queue_starts (queue, n, started_at)
    SELECT p_queue, v_last + i, clock_timestamp() FROM generate_series(1, p_starts) i;
    DELETE FROM queue_starts WHERE queue = p_queue AND n <= v_last + p_starts - v_limit;
END $$;

-- As in 0022, and a job whose partition has limits waits to be let in.
CREATE OR REPLACE FUNCTION queue_workflows_hold_ingest() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    IF NEW.partition_key IS NOT NULL AND NEW.status = 'queued'
       AND EXISTS (SELECT FROM queue_partition_limits l WHERE l.queue = NEW.queue) THEN
        NEW := queue_workflows_limit_gate(NULL, NEW);
    END IF;
    IF NEW.lock_key IS NOT NULL AND NEW.status = 'queued' THEN
        IF NEW.blocked_reason IS NULL THEN
            NEW.blocked_reason := 'locked';
        END IF;
        PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
    END IF;
    IF NEW.idempotency_key IS NOT NULL AND NOT NEW.idempotency_released THEN
        IF NOT coalesce(NEW.idempotency_window_s, 0) BETWEEN 0 AND 31622400 THEN
            RAISE EXCEPTION 'idempotency_window_s must be 0 to 31622400 (366 days), not %',
                NEW.idempotency_window_s USING ERRCODE = 'check_violation';
        END IF;
        PERFORM queue_workflows_release_key(NEW.idempotency_key);
    END IF;
    RETURN NEW;
END $$;

-- As in 0017, and the limits of a partition have their say.
CREATE OR REPLACE FUNCTION queue_workflows_job_changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_let_in boolean := false;
BEGIN
    IF NEW.partition_key IS NOT NULL OR OLD.partition_key IS NOT NULL THEN
        IF TG_TABLE_NAME = 'ingest_jobs' THEN
            IF OLD.admitted_at IS NOT NULL OR NEW.blocked_reason IN ('limited', 'admitted', 'held_back')
               OR EXISTS (SELECT FROM queue_partition_limits l WHERE l.queue IN (OLD.queue, NEW.queue)) THEN
                DECLARE
                    v_passed ingest_jobs;  -- here, as each call of its block makes room for a row
                BEGIN
                    v_passed := queue_workflows_limit_gate(OLD, NEW);
                    IF v_passed.id IS NULL THEN
                        RETURN NULL;
                    END IF;
                    NEW := v_passed;
                END;
            END IF;
        END IF;
    END IF;
    -- What the steps of 0016 write is whole.
    IF NEW.lock_key IS NULL AND OLD.lock_key IS NULL
       AND (OLD.status = 'queued' AND NEW.status = 'running' AND NEW.claim_no > OLD.claim_no
            OR OLD.status = 'running' AND NEW.status = 'completed'
               AND NEW.worker_id IS NULL AND NEW.lease_expires_at IS NULL) THEN
        RETURN NEW;
    END IF;
    IF OLD.lock_key IS NOT NULL OR NEW.lock_key IS NOT NULL THEN
        -- Two words that are never stored: a turn that was given, and one that was taken away.
        IF NEW.blocked_reason = 'taken_back' THEN
            NEW.blocked_reason := 'locked';
            RETURN NEW;
        END IF;
        IF NEW.blocked_reason = 'let_in' THEN
            NEW.blocked_reason := NULL;
            v_let_in := true;
        END IF;
    END IF;
    IF NEW.status = OLD.status THEN
        IF NEW.status = 'queued' THEN
            IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
                NEW.blocked_reason := 'not_due';
            ELSIF NEW.lock_key IS NOT NULL AND NOT v_let_in AND (
                      NEW.blocked_reason IS NULL
                      AND (OLD.blocked_reason IS NOT NULL OR NEW.lock_key IS DISTINCT FROM OLD.lock_key)
                      OR NEW.available_at IS NULL AND NEW.blocked_reason = 'not_due') THEN
                NEW.blocked_reason := 'locked';
            ELSIF NEW.available_at IS NULL AND NEW.blocked_reason = 'not_due' THEN
                NEW.blocked_reason := NULL;
                PERFORM pg_notify(TG_ARGV[0], NEW.queue);
            ELSIF NEW.blocked_reason IS NULL AND OLD.blocked_reason IS NOT NULL THEN
                PERFORM pg_notify(TG_ARGV[0], NEW.queue);
            END IF;
        ELSIF NEW.status = 'running' AND NEW.cancel_requested_at IS NOT NULL
              AND OLD.cancel_requested_at IS NULL THEN
            PERFORM pg_notify('job_cancel', left(NEW.id, 1000));
        END IF;
        IF NOT v_let_in AND (OLD.lock_key IS NOT NULL OR NEW.lock_key IS NOT NULL)
           AND (NEW.lock_key IS DISTINCT FROM OLD.lock_key
                OR NEW.blocked_reason IS DISTINCT FROM OLD.blocked_reason) THEN
            PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, OLD.lock_key);
            PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
        END IF;
        RETURN NEW;
    END IF;
    IF OLD.status IN ('completed', 'failed', 'cancelled', 'skipped')
       AND NEW.generation <= OLD.generation THEN
        RAISE EXCEPTION 'job % is % and stays so; retry_job() or retry_run() reopens it', OLD.id, OLD.status
            USING ERRCODE = 'QW002';
    END IF;
    IF NEW.status = 'running' THEN
        IF NEW.claim_no = OLD.claim_no THEN
            IF OLD.blocked_reason IN ('locked', 'limited') OR EXISTS (
                SELECT FROM queue_settings s
                 WHERE s.queue = OLD.queue
                   AND (s.paused_at IS NOT NULL AND (s.paused_until IS NULL OR s.paused_until > now())
                        OR s.max_running IS NOT NULL OR s.rate_limit IS NOT NULL)) THEN
                RETURN NULL;  -- who knows no lock keys and no limits finds no job
            END IF;
            NEW.claim_no := OLD.claim_no + 1;
            NEW.worker_id := 'legacy:' || coalesce(NEW.claimed_by, 'unknown');
            NEW.lease_expires_at := coalesce(NEW.lease_expires_at, now() + interval '600 seconds');
            NEW.blocked_reason := NULL;
            NEW.available_at := NULL;
        END IF;
        RETURN NEW;
    END IF;
    -- Our own statements take the worker off; what leaves it on is a plain UPDATE, which knows no claim.
    IF OLD.status = 'running' AND NEW.worker_id = OLD.worker_id
       AND NEW.status IN ('completed', 'failed', 'awaiting_input')
       AND NOT starts_with(OLD.worker_id, 'legacy:') THEN
        RAISE EXCEPTION 'claim % of job % is held by %; mark_completed() and mark_failed() end it by hand',
            OLD.claim_no, OLD.id, OLD.worker_id USING ERRCODE = 'QW001';
    END IF;
    NEW.worker_id := NULL;
    NEW.lease_expires_at := NULL;
    IF OLD.lock_key IS NOT NULL OR NEW.lock_key IS NOT NULL THEN
        PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, OLD.lock_key);
        IF NEW.lock_key IS DISTINCT FROM OLD.lock_key THEN
            PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
        END IF;
    END IF;
    IF OLD.status = 'running' AND TG_TABLE_NAME = 'ingest_jobs' THEN
        PERFORM pg_notify(TG_ARGV[0], s.queue) FROM queue_settings s
          WHERE s.queue = OLD.queue AND s.max_running IS NOT NULL;
    END IF;
    IF NEW.status = 'awaiting_input' AND NEW.policy ? 'timeout_s' THEN
        INSERT INTO workflow_input_timeouts AS t (job_id, claim_no, due_at)
        VALUES (NEW.id, NEW.claim_no,
                now() + (NEW.policy ->> 'timeout_s')::float8 * interval '1 second')
            ON CONFLICT (job_id) DO UPDATE SET claim_no = EXCLUDED.claim_no, due_at = EXCLUDED.due_at;
    END IF;
    IF NEW.status = 'queued' THEN
        IF NEW.available_at > now() THEN
            NEW.blocked_reason := 'not_due';
        ELSIF NEW.lock_key IS NOT NULL AND NEW.blocked_reason IS NULL THEN
            NEW.blocked_reason := 'locked';
        ELSIF NEW.blocked_reason IS NULL THEN
            PERFORM pg_notify(TG_ARGV[0], NEW.queue);
        END IF;
    END IF;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS ingest_jobs_changed ON ingest_jobs;
CREATE TRIGGER ingest_jobs_changed
    BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at, lock_key, partition_key, queue,
        claim_no, worker_id, lease_expires_at, heartbeat_at, started_at, finished_at, seconds ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_job_changed('ingest_job_ready');

-- As in 0016, and the queue's limits come first. p_tell: where nothing was claimed of a queue that has
-- settings, one row without an id, whose wait_s says in how many seconds a limit lets the next in, or NULL.
DROP FUNCTION IF EXISTS queue_workflows_ingest_step(
    text, text, text, double precision, integer, boolean, boolean, jsonb);
CREATE OR REPLACE FUNCTION queue_workflows_ingest_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim integer, p_obey boolean, p_promote boolean, p_done jsonb, p_tell boolean DEFAULT false)
RETURNS TABLE (
    id text, task_name text, queue text, reason text, priority smallint, seq bigint, args jsonb,
    claim_no bigint, worker_id text, claimed_by text, attempts integer, max_attempts integer,
    crash_count integer, timeout_s double precision, headers jsonb, partition_key text, lock_key text,
    wait_s double precision)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_count   bigint;
    v_row     ingest_jobs;
    v_limited boolean := EXISTS (SELECT FROM queue_settings s WHERE s.queue = p_queue);
    v_room    integer := p_claim;
    v_wait_s  double precision;
BEGIN
    IF p_done IS NOT NULL THEN
        WITH done AS (
            UPDATE ingest_jobs j
               SET status = 'completed', result = f.result, error = NULL, seconds = f.seconds,
                   finished_at = now(), worker_id = NULL, lease_expires_at = NULL
              FROM jsonb_to_recordset(p_done) AS f (id text, claim_no bigint, result jsonb, seconds float8)
             WHERE j.id = f.id AND j.worker_id IS NOT DISTINCT FROM p_worker
               AND j.claim_no = f.claim_no AND j.status = 'running'
            RETURNING j.id, j.claim_no, j.attempts, j.queue, j.seconds, j.claimed_by)
        INSERT INTO ingest_job_events
               (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s)
        SELECT id, attempts, 'completed', claim_no, p_worker, claimed_by, queue, seconds FROM done;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count <> jsonb_array_length(p_done) THEN
            RAISE EXCEPTION '% of % claims are no longer held', jsonb_array_length(p_done) - v_count,
                jsonb_array_length(p_done) USING ERRCODE = 'QW001';
        END IF;
        IF v_limited AND p_claim < 1 THEN
            PERFORM pg_notify('ingest_job_ready', p_queue) FROM queue_settings s
              WHERE s.queue = p_queue AND s.max_running IS NOT NULL;
        END IF;
    END IF;
    IF p_claim < 1 OR (p_obey AND EXISTS (
        SELECT FROM worker_controls c WHERE c.host_label = p_host AND c.queue IN (p_queue, 'all')
           AND c.desired_state = 'off' AND (c.until_at IS NULL OR c.until_at > now()))) THEN
        RETURN;
    END IF;
    IF p_promote THEN
        WITH due AS MATERIALIZED (
            SELECT j.id FROM ingest_jobs j
             WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL AND j.available_at <= now()
               AND j.blocked_reason = 'not_due' AND j.queue = p_queue
             ORDER BY j.available_at LIMIT 100 FOR UPDATE SKIP LOCKED)
        UPDATE ingest_jobs j SET blocked_reason = NULL, available_at = NULL
          FROM due WHERE j.id = due.id;
    END IF;
    IF v_limited THEN
        SELECT r.room, r.wait_s INTO v_room, v_wait_s FROM queue_workflows_queue_room(p_queue, p_claim) r;
    END IF;
    v_count := 0;
    -- What may have killed its worker is claimed alone, so that it takes no neighbours with it.
    IF v_room = 1 OR (v_room > 1 AND (SELECT q.crash_count > 0 FROM ingest_jobs q
                        WHERE q.queue = p_queue AND q.status = 'queued' AND q.blocked_reason IS NULL
                        ORDER BY q.priority, q.seq LIMIT 1)) THEN
        UPDATE ingest_jobs j
           SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
               lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
               started_at = now(), available_at = NULL, error = NULL, progress = NULL
         WHERE j.id = (SELECT q.id FROM ingest_jobs q
                        WHERE q.queue = p_queue AND q.status = 'queued' AND q.blocked_reason IS NULL
                        ORDER BY q.priority, q.seq LIMIT 1 FOR UPDATE SKIP LOCKED)
        RETURNING * INTO v_row;
        IF v_row.status = 'running' THEN
            v_count := 1;
            INSERT INTO ingest_job_events
                   (job_id, attempt, event_type, claim_no, worker_id, host_label, queue)
            VALUES (v_row.id, v_row.attempts, 'claimed', v_row.claim_no, p_worker, p_host, v_row.queue);
            RETURN QUERY SELECT v_row.id, v_row.task_name, v_row.queue::text, v_row.reason, v_row.priority,
                v_row.seq, v_row.args, v_row.claim_no, v_row.worker_id, v_row.claimed_by,
                v_row.attempts, v_row.max_attempts, v_row.crash_count, v_row.timeout_s,
                v_row.headers, v_row.partition_key, v_row.lock_key, NULL::float8;
        ELSIF v_row.id IS NOT NULL THEN
            v_wait_s := 0;  -- its partition has limits since: it went to its line
        END IF;
    ELSIF v_room > 1 THEN
        RETURN QUERY
        WITH picked AS MATERIALIZED (
            SELECT j.id FROM ingest_jobs j
             WHERE j.queue = p_queue AND j.status = 'queued' AND j.blocked_reason IS NULL
               AND j.crash_count = 0
             ORDER BY j.priority, j.seq LIMIT v_room FOR UPDATE SKIP LOCKED),
        changed AS (
            UPDATE ingest_jobs j
               SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
                   lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
                   started_at = now(), available_at = NULL, error = NULL, progress = NULL
              FROM picked WHERE j.id = picked.id
            RETURNING j.id, j.task_name, j.queue::text, j.reason, j.priority, j.seq, j.args, j.claim_no,
                      j.worker_id, j.claimed_by, j.attempts, j.max_attempts, j.crash_count,
                      j.timeout_s, j.headers, j.partition_key, j.lock_key, j.status),
        claimed AS (SELECT * FROM changed c WHERE c.status = 'running'),
        logged AS (
            INSERT INTO ingest_job_events
                   (job_id, attempt, event_type, claim_no, worker_id, host_label, queue)
            SELECT d.id, d.attempts, 'claimed', d.claim_no, p_worker, p_host, d.queue FROM claimed d)
        SELECT d.id, d.task_name, d.queue, d.reason, d.priority, d.seq, d.args, d.claim_no, d.worker_id,
               d.claimed_by, d.attempts, d.max_attempts, d.crash_count, d.timeout_s, d.headers,
               d.partition_key, d.lock_key, NULL::float8 FROM claimed d;
        GET DIAGNOSTICS v_count = ROW_COUNT;
    END IF;
    IF v_limited AND v_count > 0 THEN
        PERFORM queue_workflows_note_starts(p_queue, v_count::integer);
    ELSIF v_limited AND p_tell THEN
        IF v_room > 0 AND v_wait_s IS NULL THEN
            SELECT extract(epoch FROM d.due_at - now()) INTO v_wait_s FROM partition_dues d
             WHERE d.queue = p_queue AND d.due_at < 'infinity' ORDER BY d.queue, d.due_at LIMIT 1;
        END IF;
        RETURN QUERY SELECT NULL, NULL, NULL, NULL, NULL::smallint, NULL::bigint, NULL::jsonb, NULL::bigint,
            NULL, NULL, NULL::integer, NULL::integer, NULL::integer, NULL::float8, NULL::jsonb, NULL, NULL,
            v_wait_s;
    END IF;
END $$;

DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOREACH v_function IN ARRAY ARRAY[
        'queue_workflows_ask_partition(text, text, integer)', 'queue_workflows_take_turns()',
        'queue_workflows_limit_gate(ingest_jobs, ingest_jobs)', 'queue_workflows_queue_set()']::regprocedure[]
    LOOP
        -- A session's temporary tables come first where they are not named.
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp',
                       v_function, current_schema());
    END LOOP;
END $$;
REVOKE ALL ON FUNCTION queue_workflows_queue_set() FROM PUBLIC;
