-- Limits of a queue's partitions. Jobs of a partition that has limits wait with blocked_reason 'limited',
-- outside of the claim's index, until they are admitted: no more at a time than may start now. Picked rows are
-- joined by id = ANY (ARRAY(...)), for the reason in decision 0019.

-- Note that a partition must be checked before this transaction commits, and how many of its jobs the
-- transaction started.
CREATE OR REPLACE FUNCTION queue_workflows_ask_partition(p_queue text, p_key text, p_starts integer DEFAULT 0)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_starts > 0 THEN
        UPDATE partition_turns SET starts = starts + p_starts
         WHERE xid = pg_current_xact_id() AND queue = p_queue AND partition_key = p_key AND NOT admits;
        IF FOUND THEN
            RETURN;
        END IF;
    ELSIF EXISTS (SELECT FROM partition_turns WHERE xid = pg_current_xact_id() AND queue = p_queue
                     AND partition_key = p_key AND NOT admits) THEN
        RETURN;
    END IF;
    INSERT INTO partition_turns (queue, partition_key, starts) VALUES (p_queue, p_key, p_starts);
END $$;

-- Leave a partition that this commit cannot check to a claim or sweep after `p_after`. Add starts,
-- which its rate then counts. Their numbers are far above the numbers that a check of the partition
-- assigns under its lock.
CREATE OR REPLACE FUNCTION queue_workflows_leave_partition(
    p_queue text, p_key text, p_starts integer, p_after interval) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO partition_dues (queue, partition_key, due_at) VALUES (p_queue, p_key, clock_timestamp() + p_after);
    INSERT INTO partition_starts (queue, partition_key, n, started_at)
    SELECT p_queue, p_key, 2000000000000000 + nextval(pg_get_serial_sequence('partition_dues', 'id')), clock_timestamp()
      FROM (SELECT coalesce((SELECT p.rate_limit FROM queue_partitions p
                              WHERE p.queue = p_queue AND p.partition_key = p_key),
                            (SELECT s.partition_rate_limit FROM queue_settings s WHERE s.queue = p_queue)) AS most) r
     CROSS JOIN LATERAL generate_series(1, CASE WHEN r.most IS NULL THEN 0 ELSE least(p_starts, r.most) END);
    PERFORM pg_notify('ingest_job_ready', p_queue);
END $$;

-- Return a job as its partition's limits change it; `p_old` is NULL for an INSERT. Return NULL to leave the row as
-- it is. A job is first not due, then limited, then locked, then claimable; admitted_at says that it has passed the
-- limits. A write of the admission itself is not checked again, since it holds the partition's lock and has
-- counted.
CREATE OR REPLACE FUNCTION queue_workflows_limit_gate(p_old ingest_jobs, p_new ingest_jobs)
RETURNS ingest_jobs LANGUAGE plpgsql AS $$
DECLARE
    v_waits   boolean;
    v_paused  boolean;
    v_rated   boolean;
    v_counted boolean;
BEGIN
    IF p_old.status = 'queued' AND p_new.status = 'queued'
       AND (p_old.admitted_at IS NULL) <> (p_new.admitted_at IS NULL)
       AND 'limited' IN (p_old.blocked_reason, p_new.blocked_reason) THEN
        IF EXISTS (SELECT FROM partition_turns t WHERE t.xid = pg_current_xact_id() AND t.admits
                      AND t.queue = p_new.queue AND t.partition_key = p_new.partition_key) THEN
            RETURN p_new;
        END IF;
    END IF;
    IF p_old.admitted_at IS NULL THEN
        p_new.admitted_at := NULL;  -- only the admission sets it: else a plain UPDATE would pass the limits
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
           coalesce(queue_workflows_is_paused(p.paused_at, p.paused_until), false),
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
            -- The last condition: now() of this older transaction is before the time for which room was found.
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

-- Return how many of the next `p_wanted` starts a rate has room for now, and when for one more, or NULL if that
-- depends on one of these starts. `p_starts`: for each of them the start `p_limit` places earlier, oldest
-- first, or NULL if unknown.
CREATE OR REPLACE FUNCTION queue_workflows_rate_room(
    p_limit integer, p_period_s double precision, p_wanted integer, p_starts timestamptz[],
    OUT room integer, OUT due_at timestamptz)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    -- A period that an older version stored out of range must not overflow an interval.
    p_period_s := least(greatest(p_period_s, 0), 31622400);
    room := least(p_wanted, p_limit);
    SELECT least(room, min(s.place) - 1), min(s.at) + p_period_s * interval '1 second' INTO room, due_at
      FROM unnest(p_starts) WITH ORDINALITY AS s (at, place)
     WHERE s.at > now() - p_period_s * interval '1 second';
END $$;

-- Admit the jobs for which a partition's limits leave room. Block admitted jobs again if there is no room and no
-- worker has claimed them. It runs at commit, with the partition's advisory lock held; no row is waited for.
-- BETWEEN, and the key in ORDER BY, force the indexes by partition.
CREATE OR REPLACE FUNCTION queue_workflows_admit(p_queue text, p_key text, p_starts integer) RETURNS void
LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    c_ahead   CONSTANT integer := 256;  -- admitted and not claimed: as many as a worker's batch may need
    v_paused  boolean;
    v_until   timestamptz;
    v_max     integer;
    v_rate    integer;
    v_period  double precision;
    v_last    bigint := 0;
    v_running integer := 0;
    v_ahead   integer;
    v_room    integer := c_ahead;
    v_due     timestamptz;
    v_count   integer;
BEGIN
    SELECT queue_workflows_is_paused(p.paused_at, p.paused_until), p.paused_until,
           coalesce(p.max_running, s.partition_max_running),
           coalesce(p.rate_limit, s.partition_rate_limit),
           CASE WHEN p.rate_limit IS NULL THEN s.partition_rate_period_s ELSE p.rate_period_s END
      INTO v_paused, v_until, v_max, v_rate, v_period
      FROM (SELECT) AS one
      LEFT JOIN queue_settings s ON s.queue = p_queue
      LEFT JOIN queue_partitions p ON p.queue = p_queue AND p.partition_key = p_key;
    IF v_rate IS NOT NULL THEN
        WITH missed AS (
            DELETE FROM partition_starts
             WHERE queue = p_queue AND partition_key = p_key AND n > 2000000000000000 RETURNING n)
        SELECT p_starts + count(*) INTO p_starts FROM missed;
        SELECT coalesce((SELECT n FROM partition_starts WHERE queue = p_queue AND partition_key = p_key
                          ORDER BY queue DESC, partition_key DESC, n DESC LIMIT 1), 0) INTO v_last;
        IF v_last NOT BETWEEN 0 AND 1000000000000000 THEN  -- not a number that was counted: start again
            DELETE FROM partition_starts WHERE queue = p_queue AND partition_key = p_key;
            v_last := 0;
        END IF;
        p_starts := least(p_starts, v_rate);  -- no more are ever read
        IF p_starts > 0 THEN
            INSERT INTO partition_starts (queue, partition_key, n, started_at)
            SELECT p_queue, p_key, v_last + i, clock_timestamp() FROM generate_series(1, p_starts) i;
            v_last := v_last + p_starts;
            DELETE FROM partition_starts
             WHERE queue = p_queue AND partition_key = p_key AND n <= v_last - v_rate;
        END IF;
    END IF;
    DELETE FROM partition_dues WHERE queue = p_queue AND partition_key = p_key;

    SELECT count(*) INTO v_ahead FROM (
        SELECT FROM ingest_jobs j
         WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
           AND j.status = 'queued' AND j.admitted_at IS NOT NULL
         ORDER BY j.partition_key LIMIT 4 * c_ahead) AS admitted;
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

    -- Block jobs again that have no room, or that a waiting job now precedes.
    IF v_room <= 0 AND v_ahead > 0 THEN
        WITH head AS MATERIALIZED (
            SELECT j.priority, j.seq FROM ingest_jobs j
             WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
               AND j.status = 'queued' AND j.blocked_reason = 'limited'
             ORDER BY j.partition_key, j.priority, j.seq LIMIT 1),
        admitted AS MATERIALIZED (
            SELECT j.id, j.priority, j.seq FROM ingest_jobs j
             WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
               AND j.status = 'queued' AND j.admitted_at IS NOT NULL
             ORDER BY j.partition_key LIMIT 4 * c_ahead FOR UPDATE SKIP LOCKED),
        back AS MATERIALIZED (
            SELECT l.id FROM (SELECT i.*, row_number() OVER (ORDER BY i.priority DESC, i.seq DESC) AS place
                                FROM admitted i) l
             WHERE l.place <= -v_room OR l.place <= 16 AND (l.priority, l.seq) > (
                   SELECT h.priority, h.seq FROM head h))
        UPDATE ingest_jobs j SET blocked_reason = 'limited', admitted_at = NULL
         WHERE j.id = ANY (ARRAY(SELECT b.id FROM back b));
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_room := v_room + v_count;
    END IF;
    IF v_room > 0 THEN
        BEGIN
            WITH heads AS MATERIALIZED (
                SELECT j.id FROM ingest_jobs j
                 WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
                   AND j.status = 'queued' AND j.blocked_reason = 'limited'
                 ORDER BY j.partition_key, j.priority, j.seq LIMIT v_room FOR UPDATE SKIP LOCKED)
            UPDATE ingest_jobs j SET blocked_reason = NULL, admitted_at = now()
             WHERE j.id = ANY (ARRAY(SELECT h.id FROM heads h));
            GET DIAGNOSTICS v_count = ROW_COUNT;
        EXCEPTION WHEN OTHERS THEN
            -- If one of them cannot be written, admit the next ones instead.
            v_count := queue_workflows_each_apart($q$
                UPDATE ingest_jobs j SET blocked_reason = NULL, admitted_at = now()
                 WHERE j.id = $1 AND (j.status = 'queued' AND j.blocked_reason = 'limited') IS TRUE $q$, ARRAY(
                    SELECT j.id FROM ingest_jobs j
                     WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
                       AND j.status = 'queued' AND j.blocked_reason = 'limited'
                     ORDER BY j.partition_key, j.priority, j.seq LIMIT v_room + 100), v_room);
        END;
        -- A job that still waits is locked. The sweep finds it only where no other job has a place.
        IF v_count < v_room AND (v_max IS NULL OR v_running + v_ahead + v_count > 0) THEN
            v_due := least(v_due, clock_timestamp() + interval '1 second');
        END IF;
    END IF;
    IF v_due IS NOT NULL AND (
        SELECT true FROM ingest_jobs j
         WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
           AND j.status = 'queued' AND j.blocked_reason = 'limited'
         ORDER BY j.partition_key, j.priority, j.seq LIMIT 1) THEN
        INSERT INTO partition_dues (queue, partition_key, due_at) VALUES (p_queue, p_key, v_due);
    END IF;
END $$;
