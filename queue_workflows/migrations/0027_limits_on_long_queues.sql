-- A limit that is set on a long queue: its jobs go to their lines a few at a time, in the order in which they
-- are claimed, and only as they come to the head; meanwhile who is let in, or has no limits, is claimed.
-- Rows that were picked are met again by id = ANY (ARRAY(...)), for the reason that 0030 gives.

CREATE INDEX IF NOT EXISTS ingest_jobs_admitted_idx ON ingest_jobs (queue, partition_key, priority, seq)
    WHERE partition_key IS NOT NULL AND status = 'queued' AND admitted_at IS NOT NULL;

-- Send to their lines those of the first p_look free jobs of a queue that were free before their partition had
-- limits, at most p_most; how many. Their partitions are looked at when this commits; no row is waited for.
CREATE OR REPLACE FUNCTION queue_workflows_hold_back(p_queue text, p_look integer, p_most integer)
RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
DECLARE
    v_all   boolean;
    v_asked bigint;
    v_moved bigint;
BEGIN
    PERFORM queue_workflows_demand('UPDATE', 'ingest_jobs', 'status');
    SELECT s.partition_max_running IS NOT NULL OR s.partition_rate_limit IS NOT NULL INTO v_all
      FROM queue_settings s WHERE s.queue = p_queue;
    WITH ahead AS MATERIALIZED (
        SELECT a.id FROM (
            SELECT j.id, j.partition_key, j.admitted_at FROM ingest_jobs j
             WHERE j.queue = p_queue AND j.status = 'queued' AND j.blocked_reason IS NULL
             ORDER BY j.priority, j.seq LIMIT p_look) a
         WHERE a.partition_key IS NOT NULL AND a.admitted_at IS NULL AND (v_all OR EXISTS (
               SELECT FROM queue_partitions p WHERE p.queue = p_queue AND p.partition_key = a.partition_key))
         LIMIT p_most),
    stale AS MATERIALIZED (
        SELECT j.id FROM ingest_jobs j
         WHERE j.id = ANY (ARRAY(SELECT a.id FROM ahead a))
           AND (j.status = 'queued' AND j.blocked_reason IS NULL AND j.admitted_at IS NULL) IS TRUE
           FOR UPDATE OF j SKIP LOCKED),
    moved AS (
        UPDATE ingest_jobs j SET blocked_reason = 'held_back' WHERE j.id = ANY (ARRAY(SELECT s.id FROM stale s))
        RETURNING j.partition_key)
    SELECT coalesce(sum(m.n), 0), count(queue_workflows_ask_partition(p_queue, m.partition_key) IS NULL)
      INTO v_moved, v_asked
      FROM (SELECT partition_key, count(*) AS n FROM moved GROUP BY partition_key) m;
    RETURN v_moved;
END $$;

-- Where the head of a queue was free before its partition had limits (held): what was of the first 500 goes to
-- its line. When all of them were, the first of 20,000 that may be claimed is locked: its id, so that nobody
-- waits for the rest to be moved. NULL: claim nothing now.
CREATE OR REPLACE FUNCTION queue_workflows_past_lines(p_queue text, OUT held boolean, OUT id text)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
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
     WHERE j.queue = p_queue AND j.status = 'queued' AND j.blocked_reason IS NULL
     ORDER BY j.priority, j.seq LIMIT 1;
    IF held IS NOT TRUE THEN
        RETURN;
    END IF;
    v_moved := queue_workflows_hold_back(p_queue, c_most, c_most);
    IF v_moved > 0 AND v_moved < c_most THEN
        RETURN;  -- all is in order when this commits, and the next claim keeps to it
    END IF;
    SELECT j.id INTO id FROM ingest_jobs j
     WHERE j.id = ANY (ARRAY(
            SELECT a.id FROM (
                SELECT q.id, q.partition_key, q.admitted_at FROM ingest_jobs q
                 WHERE q.queue = p_queue AND q.status = 'queued' AND q.blocked_reason IS NULL
                 ORDER BY q.priority, q.seq LIMIT 20000) a
             WHERE a.partition_key IS NULL OR a.admitted_at IS NOT NULL OR NOT (v_all OR EXISTS (
                   SELECT FROM queue_partitions p
                    WHERE p.queue = p_queue AND p.partition_key = a.partition_key))
             LIMIT 64))
       AND (j.status = 'queued' AND j.blocked_reason IS NULL) IS TRUE
     ORDER BY j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
END $$;

-- As in 0023, and what was free before there were limits is not its business.
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
    v_last    bigint := 0;
    v_running integer := 0;
    v_ahead   integer;
    v_room    integer := c_ahead;
    v_due     timestamptz;
    v_count   integer;
    v_id      text;
BEGIN
    SELECT p.paused_at IS NOT NULL AND (p.paused_until IS NULL OR p.paused_until > now()), p.paused_until,
           coalesce(p.max_running, s.partition_max_running),
           coalesce(p.rate_limit, s.partition_rate_limit),
           CASE WHEN p.rate_limit IS NULL THEN s.partition_rate_period_s ELSE p.rate_period_s END
      INTO v_paused, v_until, v_max, v_rate, v_period
      FROM (SELECT) AS one
      LEFT JOIN queue_settings s ON s.queue = p_queue
      LEFT JOIN queue_partitions p ON p.queue = p_queue AND p.partition_key = p_key;
    IF v_rate IS NOT NULL THEN
        SELECT coalesce((SELECT n FROM partition_starts WHERE queue = p_queue AND partition_key = p_key
                          ORDER BY queue DESC, partition_key DESC, n DESC LIMIT 1), 0) INTO v_last;
        IF v_last NOT BETWEEN 0 AND 1000000000000000 THEN  -- no number that was counted: begin anew
            DELETE FROM partition_starts WHERE queue = p_queue AND partition_key = p_key;
            v_last := 0;
        END IF;
        p_starts := least(p_starts, v_rate);  -- no more are ever looked at
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
        UPDATE ingest_jobs j SET blocked_reason = 'held_back'
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
            UPDATE ingest_jobs j SET blocked_reason = 'admitted'
             WHERE j.id = ANY (ARRAY(SELECT h.id FROM heads h));
        EXCEPTION WHEN OTHERS THEN
            -- One of them cannot be written: the next in line go before it.
            FOR v_id IN
                SELECT j.id FROM ingest_jobs j
                 WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
                   AND j.status = 'queued' AND j.blocked_reason = 'limited'
                 ORDER BY j.partition_key, j.priority, j.seq LIMIT v_room + 100
            LOOP
                EXIT WHEN v_room <= 0;
                BEGIN
                    UPDATE ingest_jobs j SET blocked_reason = 'admitted' WHERE j.id = v_id;
                    v_room := v_room - 1;
                EXCEPTION WHEN OTHERS THEN
                    RAISE WARNING 'job % cannot be let in: %', v_id, SQLERRM;
                END;
            END LOOP;
        END;
    END IF;
    IF v_due IS NOT NULL AND (
        SELECT true FROM ingest_jobs j
         WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
           AND j.status = 'queued' AND j.blocked_reason = 'limited'
         ORDER BY j.partition_key, j.priority, j.seq LIMIT 1) THEN
        INSERT INTO partition_dues (queue, partition_key, due_at) VALUES (p_queue, p_key, v_due);
    END IF;
END $$;

-- As in 0023, and some of what was free before there were limits goes to its lines.
CREATE OR REPLACE FUNCTION queue_workflows_mend_lines() RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off AS $$
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
                      AND j.partition_key IS NOT NULL AND (j.status = 'running' OR (
                          j.status = 'queued' AND (j.blocked_reason IS NULL OR j.admitted_at IS NOT NULL))))
             LIMIT 1000) l;
    FOR v_queue IN SELECT l.queue FROM queue_partition_limits l ORDER BY l.queue LOOP
        EXIT WHEN v_moved >= 1000;
        v_moved := v_moved + queue_workflows_hold_back(v_queue, 20000, 1000 - v_moved);
    END LOOP;
    RETURN v_count;
END $$;

-- As in 0023, and where more lines are due than one claim looks at, it claims, too.
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
    PERFORM queue_workflows_demand('UPDATE', 'ingest_jobs', 'status');
    SELECT * INTO v_set FROM queue_settings WHERE queue = p_queue;
    room := p_wanted;
    IF v_set.paused_at IS NOT NULL AND (v_set.paused_until IS NULL OR v_set.paused_until > now()) THEN
        room := 0;
        wait_s := extract(epoch FROM least(v_set.paused_until, now() + interval '366 days') - now());
        RETURN;
    END IF;
    SELECT count(queue_workflows_ask_partition(p_queue, d.partition_key) IS NULL) INTO v_lines
      FROM (SELECT DISTINCT o.partition_key FROM (
                SELECT partition_key FROM partition_dues WHERE queue = p_queue AND due_at <= now()
                 ORDER BY queue, due_at LIMIT 100) o) d;
    IF v_lines > 0 THEN
        wait_s := 0;
        IF v_lines < 100 THEN  -- else more are due than one claim looks at, and it looks and claims
            room := 0;
            RETURN;
        END IF;
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
        wait_s := coalesce(wait_s, extract(epoch FROM v_due - now()));
    END IF;
    room := greatest(room, 0);
END $$;

-- As in 0023, and a head that was free before its partition had limits holds nobody up.
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
    v_held    boolean;
    v_past    text;
BEGIN
    IF p_done IS NOT NULL THEN
        WITH f AS MATERIALIZED (
            SELECT * FROM jsonb_to_recordset(p_done) AS d (
                id text, claim_no bigint, result jsonb, seconds float8)),
        done AS (
            UPDATE ingest_jobs j
               SET status = 'completed', result = f.result, error = NULL, seconds = f.seconds,
                   finished_at = now(), worker_id = NULL, lease_expires_at = NULL,
                   progress = CASE WHEN jsonb_typeof(j.progress) IN ('object', 'string') THEN j.progress
                                   ELSE '1' END
              FROM f
             WHERE j.id = ANY (ARRAY(SELECT i.id FROM f i)) AND j.id = f.id
               AND (j.worker_id IS NOT DISTINCT FROM p_worker
                    AND j.claim_no = f.claim_no AND j.status = 'running') IS TRUE
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
         WHERE j.id = ANY (ARRAY(SELECT d.id FROM due d));
    END IF;
    IF v_limited THEN
        SELECT r.room, r.wait_s INTO v_room, v_wait_s FROM queue_workflows_queue_room(p_queue, p_claim) r;
    END IF;
    IF v_limited AND v_room > 0 THEN
        SELECT p.held, p.id INTO v_held, v_past FROM queue_workflows_past_lines(p_queue) p;
        IF v_held THEN
            v_wait_s := 0;
            v_room := CASE WHEN v_past IS NULL THEN 0 ELSE 1 END;
        END IF;
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
         WHERE j.id = coalesce(v_past, (SELECT q.id FROM ingest_jobs q
                        WHERE q.queue = p_queue AND q.status = 'queued' AND q.blocked_reason IS NULL
                        ORDER BY q.priority, q.seq LIMIT 1 FOR UPDATE SKIP LOCKED))
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
             WHERE j.id = ANY (ARRAY(SELECT p.id FROM picked p))
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
            SELECT extract(epoch FROM least(d.due_at, now() + interval '366 days') - now())
              INTO v_wait_s FROM partition_dues d
             WHERE d.queue = p_queue AND isfinite(d.due_at) ORDER BY d.queue, d.due_at LIMIT 1;
        END IF;
        RETURN QUERY SELECT NULL, NULL, NULL, NULL, NULL::smallint, NULL::bigint, NULL::jsonb, NULL::bigint,
            NULL, NULL, NULL::integer, NULL::integer, NULL::integer, NULL::float8, NULL::jsonb, NULL, NULL,
            v_wait_s;
    END IF;
END $$;
