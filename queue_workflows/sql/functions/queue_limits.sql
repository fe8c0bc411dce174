-- Pause, concurrency and rate of a queue as a whole.

-- Return how many of `p_wanted` jobs of a queue may be claimed now, and, if none, in how many seconds one may
-- be, or NULL if unknown. Claims of a queue that has limits of its own are serialised until they commit. If more
-- partitions are due than one claim checks, it claims all the same.
CREATE OR REPLACE FUNCTION queue_workflows_queue_room(
    p_queue text, p_wanted integer, OUT room integer, OUT wait_s double precision)
LANGUAGE plpgsql
{by_index()}
SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    v_set   queue_settings;
    v_last  bigint;
    v_due   timestamptz;
    v_lines integer;
BEGIN
    PERFORM queue_workflows_demand('UPDATE', 'ingest_jobs', 'status');
    SELECT * INTO v_set FROM queue_settings WHERE queue = p_queue;
    room := p_wanted;
    IF queue_workflows_is_paused(v_set.paused_at, v_set.paused_until) THEN
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
        IF v_lines < 100 THEN  -- else more are due than one claim checks, and it claims all the same
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

-- Record that jobs of a queue started now, for the queue's rate.
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
    IF v_last NOT BETWEEN 0 AND 1000000000000000 THEN  -- not a number that was counted: start again
        DELETE FROM queue_starts WHERE queue = p_queue;
        v_last := 0;
    END IF;
    p_starts := least(p_starts, v_limit);  -- no more are ever read
    INSERT INTO queue_starts (queue, n, started_at)
    SELECT p_queue, v_last + i, clock_timestamp() FROM generate_series(1, p_starts) i;
    DELETE FROM queue_starts WHERE queue = p_queue AND n <= v_last + p_starts - v_limit;
END $$;

-- Wake the workers of a queue after a change of its settings or of a partition's settings, and mark the
-- affected partitions as due.
CREATE OR REPLACE FUNCTION queue_workflows_queue_set() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
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

-- Return whether a queue or a partition with these columns is paused now. Without a SET clause, so that it is inlined.
CREATE OR REPLACE FUNCTION queue_workflows_is_paused(p_paused_at timestamptz, p_paused_until timestamptz)
RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT p_paused_at IS NOT NULL AND (p_paused_until IS NULL OR p_paused_until > now())
$$;
