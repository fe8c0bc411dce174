-- Made by `python -m tests.support.docgen`; a test compares. Change queue_workflows/sql/ or a
-- migration, then make it anew.

CREATE TYPE public.queue_workflows_claimed_node AS (
	id text,
	run_id text,
	node_id text,
	node_module text,
	queue text,
	required_model text,
	status text,
	pipeline_name text,
	priority smallint,
	seq bigint,
	claim_no bigint,
	worker_id text,
	claimed_by text,
	generation integer,
	attempts integer,
	max_attempts integer,
	crash_count integer,
	watchdog_retries integer,
	timeout_s double precision,
	inputs jsonb,
	input_template jsonb,
	ref_heads text[],
	run json,
	context jsonb
);

CREATE DOMAIN public.queue_workflows_dag_queue AS text
	CONSTRAINT queue_workflows_dag_queue_check CHECK ((VALUE = ANY (ARRAY['cpu'::text, 'gpu'::text])));

CREATE DOMAIN public.queue_workflows_due AS timestamp with time zone;

CREATE TYPE public.queue_workflows_gpu_holder AS (
	host_label text,
	model text,
	free_s double precision,
	run_s double precision
);

CREATE TYPE public.queue_workflows_gpu_line AS (
	model text,
	priority smallint,
	seq bigint,
	waited_s double precision,
	oldest_seq bigint,
	oldest_s double precision
);

CREATE DOMAIN public.queue_workflows_job_status AS text
	CONSTRAINT queue_workflows_job_status_check CHECK ((VALUE = ANY (ARRAY['queued'::text, 'running'::text, 'completed'::text, 'failed'::text, 'cancelled'::text])));

CREATE DOMAIN public.queue_workflows_node_event AS text;

CREATE DOMAIN public.queue_workflows_node_status AS text
	CONSTRAINT queue_workflows_node_status_check CHECK ((VALUE = ANY (ARRAY['queued'::text, 'running'::text, 'completed'::text, 'failed'::text, 'cancelled'::text, 'awaiting_input'::text, 'skipped'::text])));

CREATE DOMAIN public.queue_workflows_number AS bigint;

CREATE DOMAIN public.queue_workflows_period_s AS double precision;

CREATE DOMAIN public.queue_workflows_queue_name AS text;

CREATE DOMAIN public.queue_workflows_seconds AS double precision;

CREATE DOMAIN public.queue_workflows_time AS timestamp with time zone;

CREATE DOMAIN public.queue_workflows_tries AS smallint;

CREATE FUNCTION public.notify_dispatch_event() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF NEW.processed_at IS NULL AND NOT EXISTS (
        SELECT FROM workflow_dispatch_events e
         WHERE e.run_id = NEW.run_id AND e.id BETWEEN NEW.id - 20 AND NEW.id - 1
           AND e.processed_at IS NULL AND e.available_at IS NULL) THEN
        PERFORM pg_notify('orchestrator_work', 'event');
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION public.notify_ingest_job_ready() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM pg_notify('ingest_job_ready', NEW.queue);
    RETURN NULL;
END $$;

CREATE FUNCTION public.notify_ingest_jobs_inserted() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM pg_notify('ingest_job_ready', queue) FROM added
      WHERE status = 'queued' AND blocked_reason IS NULL;
    RETURN NULL;
END $$;

CREATE FUNCTION public.notify_node_job_ready() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM pg_notify('node_job_ready', NEW.queue);
    RETURN NULL;
END $$;

CREATE FUNCTION public.notify_node_jobs_inserted() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM pg_notify('node_job_ready', queue) FROM added
      WHERE status = 'queued' AND blocked_reason IS NULL;
    RETURN NULL;
END $$;

CREATE FUNCTION public.notify_orchestrator() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM pg_notify('orchestrator_work', TG_ARGV[0]);
    RETURN NULL;
END $$;

CREATE FUNCTION public.notify_worker_control() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM pg_notify('worker_control', NEW.host_label || ':' || NEW.queue);
    RETURN NULL;
END $$;

CREATE FUNCTION public.queue_workflows_actor() RETURNS text
    LANGUAGE sql STABLE
    AS $$
    SELECT left(coalesce(nullif(current_setting('queue_workflows.actor', true), ''),
                         session_user || coalesce(' (' || nullif(current_setting('application_name'), '') || ')', '')),
                200)
$$;

CREATE FUNCTION public.queue_workflows_admit(p_queue text, p_key text, p_starts integer) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
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
    v_id      text;
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

    -- Block again: those without room, and those that a waiting job now precedes.
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
        EXCEPTION WHEN OTHERS THEN
            -- One of them cannot be written: admit the next ones instead.
            FOR v_id IN
                SELECT j.id FROM ingest_jobs j
                 WHERE j.queue = p_queue AND j.partition_key BETWEEN p_key AND p_key
                   AND j.status = 'queued' AND j.blocked_reason = 'limited'
                 ORDER BY j.partition_key, j.priority, j.seq LIMIT v_room + 100
            LOOP
                EXIT WHEN v_room <= 0;
                BEGIN
                    UPDATE ingest_jobs j SET blocked_reason = NULL, admitted_at = now()
                     WHERE j.id = v_id AND (j.status = 'queued' AND j.blocked_reason = 'limited') IS TRUE;
                    IF FOUND THEN
                        v_room := v_room - 1;
                    END IF;
                EXCEPTION WHEN OTHERS THEN
                    RAISE WARNING 'job % cannot be admitted: %', v_id, SQLERRM;
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

CREATE FUNCTION public.queue_workflows_age_s(p_at timestamp with time zone) RETURNS double precision
    LANGUAGE sql STABLE
    AS $$
    SELECT CASE WHEN isfinite(p_at) THEN greatest(0, extract(epoch FROM now() - p_at))::float8
                WHEN p_at IS NOT NULL THEN 0 END
$$;

CREATE FUNCTION public.queue_workflows_ask_partition(p_queue text, p_key text, p_starts integer DEFAULT 0) RETURNS void
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION public.queue_workflows_ask_turn(p_jobs name, p_key text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF p_key IS NOT NULL AND p_jobs IN ('workflow_node_jobs', 'ingest_jobs') AND NOT EXISTS (
        SELECT FROM lock_turns WHERE xid = pg_current_xact_id() AND jobs = p_jobs AND lock_key = p_key
           AND NOT admits) THEN
        INSERT INTO lock_turns (jobs, lock_key) VALUES (p_jobs, p_key);
    END IF;
END $$;

CREATE TABLE public.ingest_jobs (
    id text DEFAULT (gen_random_uuid())::text NOT NULL,
    task_name text NOT NULL,
    queue public.queue_workflows_queue_name NOT NULL,
    reason text DEFAULT 'tick'::text NOT NULL,
    status public.queue_workflows_job_status DEFAULT 'queued'::text NOT NULL,
    priority smallint DEFAULT 100 NOT NULL,
    result jsonb,
    error text,
    seconds double precision,
    claimed_by text,
    lease_expires_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    started_at timestamp with time zone,
    finished_at timestamp with time zone,
    args jsonb DEFAULT '{}'::jsonb NOT NULL,
    seq bigint NOT NULL,
    claim_no bigint DEFAULT 0 NOT NULL,
    worker_id text,
    generation integer DEFAULT 0 NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts integer DEFAULT 1 NOT NULL,
    crash_count integer DEFAULT 0 NOT NULL,
    watchdog_retries integer DEFAULT 0 NOT NULL,
    available_at timestamp with time zone,
    blocked_reason text,
    cancel_requested_at timestamp with time zone,
    heartbeat_at timestamp with time zone,
    progress jsonb,
    timeout_s double precision,
    policy jsonb,
    lock_key text,
    partition_key text,
    idempotency_key text,
    headers jsonb,
    idempotency_window_s double precision,
    idempotency_released boolean DEFAULT false NOT NULL,
    admitted_at timestamp with time zone
)
WITH (fillfactor='70');

CREATE FUNCTION public.queue_workflows_audit(p_job public.ingest_jobs, p_event text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO ingest_job_events
           (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, error, actor)
    VALUES (p_job.id, p_job.attempts, p_event, p_job.claim_no, p_job.worker_id, p_job.claimed_by, p_job.queue,
            CASE WHEN queue_workflows_is_terminal_job(p_job.status) THEN p_job.seconds END,
            p_job.error, queue_workflows_actor());
END $$;

CREATE FUNCTION public.queue_workflows_block_unserved(p_jobs text, p_served text[], p_limit integer) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET search_path TO 'public', 'pg_temp'
    AS $_$
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
                   -- >= and LIMIT 1: with an equality the planner may read all waiters of the key.
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
END $_$;

CREATE FUNCTION public.queue_workflows_born(p_at timestamp with time zone) RETURNS bigint
    LANGUAGE sql STABLE
    AS $$
    SELECT least(greatest(extract(epoch FROM p_at) * 1000000, -9223372036854775808), 9223372036854775807)::bigint
$$;

CREATE FUNCTION public.queue_workflows_bound_job() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    IF NEW.seq NOT BETWEEN 1 AND 1000000000000000
       OR greatest(NEW.attempts, NEW.max_attempts, NEW.crash_count, NEW.watchdog_retries, NEW.generation) > 1000000
       OR least(NEW.attempts, NEW.max_attempts, NEW.crash_count, NEW.watchdog_retries, NEW.generation) < 0
       OR NEW.timeout_s <= 0 OR NEW.timeout_s > 31622400
       OR NEW.created_at NOT BETWEEN '2000-01-01+00' AND '9999-12-31+00'
       OR greatest(octet_length(NEW.id), octet_length(NEW.lock_key), octet_length(NEW.partition_key)) > 1000 THEN
        PERFORM queue_workflows_refuse(TG_TABLE_NAME::text, to_jsonb(OLD), to_jsonb(NEW));
    END IF;
    IF NEW.policy IS DISTINCT FROM OLD.policy THEN
        PERFORM queue_workflows_check_payload(NEW.policy, TG_TABLE_NAME || '.policy');
    END IF;
    IF TG_TABLE_NAME = 'ingest_jobs' THEN
        IF NEW.idempotency_window_s NOT BETWEEN 0 AND 31622400
           OR NEW.admitted_at NOT BETWEEN '2000-01-01+00' AND '9999-12-31+00'
           OR greatest(octet_length(NEW.task_name), octet_length(NEW.idempotency_key)) > 1000
           OR octet_length(NEW.reason) > 8000 THEN
            PERFORM queue_workflows_refuse(TG_TABLE_NAME::text, to_jsonb(OLD), to_jsonb(NEW));
        END IF;
        IF NEW.args IS DISTINCT FROM OLD.args OR NEW.headers IS DISTINCT FROM OLD.headers THEN
            PERFORM queue_workflows_check_payload(NEW.args, 'ingest_jobs.args');
            PERFORM queue_workflows_check_payload(NEW.headers, 'ingest_jobs.headers');
        END IF;
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION public.queue_workflows_bound_run() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    IF greatest(NEW.generation, NEW.start_attempts) > 1000000 OR least(NEW.generation, NEW.start_attempts) < 0
       OR NEW.resume_count NOT BETWEEN 0 AND 30000 OR NEW.progress_pct NOT BETWEEN -1e12 AND 1e12
       OR greatest(NEW.created_at, NEW.updated_at, NEW.queued_at, NEW.started_at, NEW.finished_at,
                   NEW.available_at) > '9999-12-31+00'
       OR least(NEW.created_at, NEW.updated_at, NEW.queued_at, NEW.started_at, NEW.finished_at,
                NEW.available_at) < '2000-01-01+00'
       OR greatest(octet_length(NEW.id), octet_length(NEW.workflow_name), octet_length(NEW.parcel_id)) > 1000
       OR octet_length(NEW.out_dir) > 4096 OR greatest(octet_length(NEW.status), octet_length(NEW.mode)) > 200 THEN
        PERFORM queue_workflows_refuse(
            TG_TABLE_NAME::text, CASE WHEN TG_OP = 'UPDATE' THEN to_jsonb(OLD) END, to_jsonb(NEW));
    END IF;
    IF TG_OP = 'INSERT' THEN
        PERFORM queue_workflows_check_payload(NEW.context, 'workflow_runs.context');
        PERFORM queue_workflows_check_payload(NEW.steps_done, 'workflow_runs.steps_done');
        PERFORM queue_workflows_check_payload(NEW.input_spec, 'workflow_runs.input_spec');
        PERFORM queue_workflows_check_payload(NEW.definition, 'workflow_runs.definition', 67108864);
    ELSIF NEW.context IS DISTINCT FROM OLD.context THEN
        PERFORM queue_workflows_check_payload(NEW.context, 'workflow_runs.context');
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION public.queue_workflows_bound_submission() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    IF NEW.attempts NOT BETWEEN 0 AND 1000000
       OR greatest(NEW.created_at, NEW.claimed_at, NEW.processed_at, NEW.available_at) > '9999-12-31+00'
       OR least(NEW.created_at, NEW.claimed_at, NEW.processed_at, NEW.available_at) < '2000-01-01+00'
       OR greatest(octet_length(NEW.id), octet_length(NEW.run_id), octet_length(NEW.node_id)) > 1000 THEN
        PERFORM queue_workflows_refuse(
            TG_TABLE_NAME::text, CASE WHEN TG_OP = 'UPDATE' THEN to_jsonb(OLD) END, to_jsonb(NEW));
    END IF;
    IF TG_OP = 'INSERT' THEN
        PERFORM queue_workflows_check_payload(NEW.value, 'workflow_input_submissions.value');
    ELSIF NEW.value IS DISTINCT FROM OLD.value THEN
        PERFORM queue_workflows_check_payload(NEW.value, 'workflow_input_submissions.value');
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION public.queue_workflows_check_payload(p_value jsonb, p_column text, p_bytes integer DEFAULT 16777216) RETURNS void
    LANGUAGE plpgsql IMMUTABLE
    AS $_$
DECLARE
    v_text text := p_value::text;
BEGIN
    IF v_text IS NULL OR octet_length(v_text) <= 256 THEN
        RETURN;
    END IF;
    IF octet_length(v_text) > p_bytes THEN
        RAISE EXCEPTION '% has % bytes of JSON, more than %', p_column, octet_length(v_text), p_bytes
            USING ERRCODE = 'check_violation', HINT = 'Store the data in a file and put its path here.';
    END IF;
    IF jsonb_path_exists(p_value, 'strict $.**{128} ? (@.type() == "array" || @.type() == "object")') THEN
        RAISE EXCEPTION '% is nested deeper than 128 levels', p_column
            USING ERRCODE = 'check_violation', HINT = 'Store the data in a file and put its path here.';
    END IF;
    IF v_text ~ '[0-9]{155}[0-9]{154}' AND jsonb_path_exists(p_value, 'strict $.** ? (@.type() == "number"
           && (@ > 1.7976931348623157e308 || @ < -1.7976931348623157e308))') THEN
        RAISE EXCEPTION '% holds a number beyond 1.7976931348623157e308', p_column
            USING ERRCODE = 'check_violation', HINT = 'Write the number as a string.';
    END IF;
END $_$;

CREATE FUNCTION public.queue_workflows_claim_apart(p_jobs text, p_worker text, p_host text, p_queue text, p_lease_s double precision, p_obey boolean, p_promote boolean, p_models text[] DEFAULT NULL::text[], p_lane smallint DEFAULT NULL::smallint, OUT job_id text, OUT aside jsonb) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $_$
DECLARE
    c_window CONSTANT integer := 100;
    v_nodes   boolean := p_jobs = 'workflow_node_jobs';
    v_limited boolean := NOT v_nodes AND EXISTS (SELECT FROM queue_settings s WHERE s.queue = p_queue);
    v_vram    integer;
    v_id      text;
    v_status  text;
    v_state   text;
    v_said    text;
    v_ids     text[] := '{}';
    v_states  text[] := '{}';
    v_saids   text[] := '{}';
    v_became  text;
    v_locked  text;
BEGIN
    aside := '[]';
    IF (p_obey AND EXISTS (
            SELECT FROM worker_controls c WHERE c.host_label = p_host AND c.queue IN (p_queue, 'all')
               AND queue_workflows_is_off(c.desired_state, c.until_at)))
       OR EXISTS (SELECT FROM queue_settings s
                   WHERE s.queue = p_queue AND queue_workflows_is_paused(s.paused_at, s.paused_until)) THEN
        RETURN;
    END IF;
    IF p_promote THEN
        FOR v_id IN EXECUTE format(
            'SELECT j.id FROM %I j WHERE j.status = ''queued'' AND j.blocked_reason IS NOT NULL'
            ' AND j.available_at <= now() AND j.blocked_reason = ''not_due'' AND j.queue = $1'
            ' ORDER BY j.available_at LIMIT $2 FOR UPDATE SKIP LOCKED', p_jobs) USING p_queue, c_window
        LOOP
            BEGIN
                EXECUTE format('UPDATE %I SET blocked_reason = NULL, available_at = NULL WHERE id = $1', p_jobs)
                  USING v_id;
            EXCEPTION WHEN OTHERS THEN
                GET STACKED DIAGNOSTICS v_state = RETURNED_SQLSTATE, v_said = MESSAGE_TEXT;
                IF queue_workflows_is_systemic(v_state) THEN
                    RAISE;
                END IF;
                v_ids := v_ids || v_id;
                v_states := v_states || v_state;
                v_saids := v_saids || v_said;
            END;
        END LOOP;
    END IF;
    IF v_limited AND (SELECT r.room < 1 FROM queue_workflows_queue_room(p_queue, 1) r) THEN
        RETURN;
    END IF;
    IF p_queue = 'gpu' THEN
        SELECT w.vram_total_mb INTO v_vram FROM workers w WHERE w.worker_id = p_worker;
    END IF;
    FOR v_id IN EXECUTE CASE
        WHEN NOT v_nodes THEN
            'SELECT j.id FROM ingest_jobs j WHERE j.queue = $1 AND j.status = ''queued'''
            ' AND j.blocked_reason IS NULL ORDER BY j.priority, j.seq LIMIT $2'
        ELSE
            'SELECT q.id FROM (SELECT j.id, j.run_id, j.required_model FROM workflow_node_jobs j'
            ' WHERE j.queue = $1 AND j.status = ''queued'' AND j.blocked_reason IS NULL'
            ' ORDER BY j.priority, j.seq LIMIT 10 * $2) q'
            ' WHERE EXISTS (SELECT FROM workflow_runs r WHERE r.id = q.run_id'
            ' AND r.status NOT IN (''completed'', ''failed'', ''cancelled'') OFFSET 0)'
            ' AND ($1 <> ''gpu'' OR queue_workflows_gpu_misfit($3, $4, $5, q.required_model) IS NULL) LIMIT $2'
        END USING p_queue, c_window, p_host, p_models, v_vram
    LOOP
        -- Outside of the subtransaction: a row that raises stays locked until it is moved out of the way.
        EXECUTE format('SELECT id FROM %I WHERE id = $1 AND status = ''queued'' AND blocked_reason IS NULL'
                       ' FOR UPDATE SKIP LOCKED', p_jobs) INTO v_locked USING v_id;
        CONTINUE WHEN v_locked IS NULL;
        BEGIN
            IF v_nodes THEN
                UPDATE workflow_node_jobs j
                   SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
                       host_label = p_host, worker_lane = coalesce(p_lane, j.worker_lane),
                       lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
                       started_at = now(), available_at = NULL, error = NULL, progress = NULL,
                       resolved_inputs = CASE WHEN j.ref_heads = '{}' THEN j.inputs ELSE j.resolved_inputs END
                 WHERE j.id = v_id RETURNING j.status INTO v_status;
                INSERT INTO workflow_node_events
                       (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, worker_id,
                        claim_no)
                SELECT j.run_id, j.node_id, j.id, greatest(0, least(j.attempts, 32767)), 'claimed', p_host, j.queue, j.required_model,
                       p_worker, j.claim_no FROM workflow_node_jobs j WHERE j.id = v_id AND v_status = 'running';
            ELSE
                UPDATE ingest_jobs j
                   SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
                       lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
                       started_at = now(), available_at = NULL, error = NULL, progress = NULL
                 WHERE j.id = v_id RETURNING j.status INTO v_status;
                INSERT INTO ingest_job_events
                       (job_id, attempt, event_type, claim_no, worker_id, host_label, queue)
                SELECT j.id, j.attempts, 'claimed', j.claim_no, p_worker, p_host, j.queue
                  FROM ingest_jobs j WHERE j.id = v_id AND v_status = 'running';
            END IF;
        EXCEPTION WHEN OTHERS THEN
            GET STACKED DIAGNOSTICS v_state = RETURNED_SQLSTATE, v_said = MESSAGE_TEXT;
            IF queue_workflows_is_systemic(v_state) THEN
                RAISE;
            END IF;
            v_ids := v_ids || v_id;
            v_states := v_states || v_state;
            v_saids := v_saids || v_said;
            v_status := NULL;
        END;
        IF v_status = 'running' THEN
            job_id := v_id;
            EXIT;
        END IF;  -- else it raised, or its partition's limits have blocked it
    END LOOP;
    IF v_limited AND job_id IS NOT NULL THEN
        PERFORM queue_workflows_note_starts(p_queue, 1);
    END IF;
    FOR v_at IN 1..cardinality(v_ids) LOOP
        IF job_id IS NOT NULL OR queue_workflows_is_about_data(v_states[v_at]) THEN
            v_became := queue_workflows_set_aside(
                p_jobs, v_ids[v_at], left('the database refuses its claim: ' || v_saids[v_at], 8000));
        ELSE
            BEGIN
                EXECUTE format('UPDATE %I SET blocked_reason = ''not_due'','
                               ' available_at = now() + interval ''1 minute'' WHERE id = $1', p_jobs)
                  USING v_ids[v_at];
                v_became := 'postponed';
            EXCEPTION WHEN OTHERS THEN
                v_became := NULL;
            END;
        END IF;
        aside := aside || jsonb_build_array(jsonb_build_object(
            'id', v_ids[v_at], 'became', coalesce(v_became, 'skipped'), 'error', left(v_saids[v_at], 1000),
            'run_id', CASE WHEN v_nodes THEN (
                SELECT j.run_id FROM workflow_node_jobs j WHERE j.id = v_ids[v_at]) END));
    END LOOP;
END $_$;

CREATE FUNCTION public.queue_workflows_close_run() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    WITH closed AS (
        UPDATE workflow_node_jobs
           SET status = 'cancelled', finished_at = now(), blocked_reason = NULL
         WHERE run_id = NEW.id AND status IN ('queued', 'awaiting_input')
        RETURNING id, run_id, node_id, queue, attempts, claim_no)
    INSERT INTO workflow_node_events (run_id, node_id, job_id, attempt, event_type, queue, claim_no, detail)
    SELECT run_id, node_id, id, least(greatest(attempts, 0), 32767), 'cancelled', queue, claim_no,
           jsonb_build_object('reason', 'run ' || NEW.status)
      FROM closed;
    PERFORM pg_notify('job_cancel', left(NEW.id, 1000))
      WHERE EXISTS (SELECT FROM workflow_node_jobs WHERE run_id = NEW.id AND status = 'running');
    RETURN NULL;
END $$;

CREATE FUNCTION public.queue_workflows_demand(p_right text, p_table text, p_column text) RETURNS void
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    IF NOT has_column_privilege(v_caller, p_table, p_column, p_right) THEN
        RAISE EXCEPTION 'role % lacks % on % (%)', v_caller, p_right, p_table, p_column
            USING ERRCODE = 'insufficient_privilege',
                  HINT = '`queue-workflows connect --for work|submit` names the GRANTs that a role needs.';
    END IF;
END $$;

CREATE FUNCTION public.queue_workflows_drop_end() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF NEW.desired_state = 'on' OR (NEW.until_at = OLD.until_at AND OLD.until_at <= now()) THEN
        NEW.until_at := NULL;
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION public.queue_workflows_enqueue(p_prefix text, p_jobs jsonb) RETURNS TABLE(place bigint, id text, same boolean)
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
DECLARE
    v_places bigint[];
    v_ids    text[];
    v_same   boolean[];
BEGIN
    IF jsonb_array_length(p_jobs) = 1 THEN
        RETURN QUERY SELECT * FROM queue_workflows_put_jobs(p_prefix, p_jobs);
        RETURN;
    END IF;
    BEGIN
        SELECT array_agg(d.place), array_agg(d.id), array_agg(d.same) INTO v_places, v_ids, v_same
          FROM queue_workflows_put_jobs(p_prefix, p_jobs) d;
        IF false = ANY (v_same) THEN
            RAISE EXCEPTION 'an idempotency key that another payload has' USING ERRCODE = 'QW003';
        END IF;
    EXCEPTION WHEN SQLSTATE 'QW003' THEN
        NULL;
    END;
    RETURN QUERY SELECT * FROM unnest(v_places, v_ids, v_same);
END $$;

CREATE FUNCTION public.queue_workflows_forget_runs() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    DELETE FROM workflow_node_events e USING gone WHERE e.run_id = gone.id;
    RETURN NULL;
END $$;

CREATE FUNCTION public.queue_workflows_give_turns(p_jobs text, p_keys text[]) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $_$
DECLARE
    v_count bigint;
BEGIN
    EXECUTE format($q$
        WITH behind AS MATERIALIZED (
            SELECT b.id FROM unnest($1) AS k (key) CROSS JOIN LATERAL (
                SELECT j.id FROM %1$I j
                 WHERE j.lock_key IS NOT NULL AND j.lock_key = k.key AND j.status = 'queued'
                   AND j.blocked_reason IS NULL
                   -- Compare with the first waiter only: a search for any earlier one may read all waiters.
                   AND EXISTS (SELECT FROM (
                       SELECT w.priority, w.seq FROM %1$I w
                        WHERE w.lock_key IS NOT NULL AND w.lock_key = k.key AND w.status = 'queued'
                          AND w.blocked_reason = 'locked'
                        ORDER BY w.priority, w.seq LIMIT 1) f WHERE (f.priority, f.seq) < (j.priority, j.seq))
                   FOR UPDATE OF j SKIP LOCKED) b)
        UPDATE %1$I j SET blocked_reason = 'locked' WHERE j.id = ANY (ARRAY(SELECT b.id FROM behind b))
        $q$, p_jobs) USING p_keys;
    EXECUTE format($q$
        WITH heads AS MATERIALIZED (
            SELECT h.id FROM unnest($1) AS k (key) CROSS JOIN LATERAL (
                SELECT w.id FROM %1$I w
                 WHERE w.lock_key IS NOT NULL AND w.lock_key = k.key AND w.status = 'queued'
                   AND w.blocked_reason = 'locked'
                 ORDER BY w.priority, w.seq LIMIT 1 FOR UPDATE SKIP LOCKED) h
             WHERE NOT EXISTS (SELECT FROM %1$I j WHERE j.lock_key IS NOT NULL AND j.lock_key = k.key
                      AND (j.status = 'running' OR (j.status = 'queued' AND j.blocked_reason IS NULL))))
        UPDATE %1$I j SET blocked_reason = NULL WHERE j.id = ANY (ARRAY(SELECT h.id FROM heads h))
        $q$, p_jobs) USING p_keys;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $_$;

CREATE FUNCTION public.queue_workflows_give_turns_singly(p_jobs text, p_keys text[]) RETURNS bigint
    LANGUAGE plpgsql
    AS $_$
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
                EXECUTE format($q$ UPDATE %I SET blocked_reason = NULL
                                    WHERE id = $1 AND (status = 'queued' AND blocked_reason = 'locked') IS TRUE
                                   RETURNING 1 $q$, p_jobs) INTO v_one USING v_id;
                IF v_one IS NOT NULL THEN
                    v_count := v_count + 1;
                    EXIT;
                END IF;
            EXCEPTION WHEN OTHERS THEN
                RAISE WARNING 'job % cannot have its turn with lock key %: %', v_id, v_key, SQLERRM;
            END;
        END LOOP;
    END LOOP;
    RETURN v_count;
END $_$;

CREATE FUNCTION public.queue_workflows_gpu_can(p_host text, p_models text[], p_vram_mb integer) RETURNS text[]
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    v_models text[] := p_models;
    v_known  text[];
BEGIN
    IF p_models IS NULL THEN  -- the answer of gpu_misfit() for each, found at once
        v_known := ARRAY(SELECT unnest(l.known_models) FROM queue_workflows_gpu_live() l);
        v_models := ARRAY(SELECT q.model FROM queue_workflows_gpu_queued() AS q (model)
                           WHERE (q.model = ANY (v_known)) IS NOT TRUE);
    END IF;
    RETURN ARRAY(SELECT m.model FROM unnest(v_models) AS m (model)
                  WHERE queue_workflows_gpu_misfit(p_host, v_models, p_vram_mb, m.model) IS NULL);
END $$;

CREATE FUNCTION public.queue_workflows_gpu_choose(p_worker text, p_host text, p_warm text, p_models text[], p_newest boolean, p_grace_s double precision, p_bound_s double precision, OUT model text, OUT seq bigint, OUT why text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
DECLARE
    v_lines  queue_workflows_gpu_line[];
    v_chosen queue_workflows_gpu_line;
    v_other  queue_workflows_gpu_line;
    v_fleet  queue_workflows_gpu_holder[];
    v_worst  smallint;
BEGIN
    v_lines := ARRAY(SELECT l FROM unnest(p_models) AS m (model)
                      CROSS JOIN LATERAL queue_workflows_gpu_line(m.model) l);
    IF cardinality(v_lines) = 0 THEN
        RETURN;
    END IF;
    SELECT * INTO v_chosen FROM unnest(v_lines) l
     WHERE l.model IN ('', p_warm) ORDER BY l.priority, l.seq LIMIT 1;
    IF FOUND THEN
        v_worst := v_chosen.priority;
        why := 'warm';
    ELSE
        SELECT max(l.priority) INTO v_worst FROM unnest(v_lines) l;
    END IF;
    -- The other workers are read only where the decision needs them.
    IF why IS NULL OR EXISTS (
        SELECT FROM unnest(v_lines) l
         WHERE (p_grace_s >= 0 AND l.priority < v_worst AND l.waited_s > p_grace_s)
            OR l.oldest_s > v_chosen.waited_s + p_bound_s) THEN
        v_fleet := ARRAY(SELECT f FROM queue_workflows_gpu_fleet(p_worker) f);
    END IF;
    IF p_grace_s >= 0 AND v_fleet IS NOT NULL THEN
        SELECT * INTO v_other FROM unnest(v_lines) l
         WHERE l.priority < v_worst AND l.waited_s > p_grace_s
           AND NOT queue_workflows_gpu_is_held(v_fleet, p_host, l.model, 1)
         ORDER BY l.priority, l.seq LIMIT 1;
        IF FOUND THEN
            v_chosen := v_other;
            why := 'urgent';
        END IF;
    END IF;
    IF why IS NULL THEN
        SELECT l.* INTO v_chosen FROM unnest(v_lines) l
         CROSS JOIN LATERAL queue_workflows_gpu_weigh(v_fleet, p_host, l.model) w
         WHERE NOT w.is_left
         ORDER BY CASE WHEN NOT p_newest THEN w.waited_s / (w.load_s + w.jobs * w.run_s + 0.001) END DESC,
                  CASE WHEN p_newest THEN l.priority END, CASE WHEN p_newest THEN -l.seq ELSE l.seq END
         LIMIT 1;
        why := CASE WHEN FOUND THEN 'worth' ELSE 'left' END;
    END IF;
    -- A job must not be passed over for ever by younger ones. Where it may be, v_fleet is set.
    SELECT * INTO v_other FROM unnest(v_lines) l
     WHERE l.oldest_s > coalesce(v_chosen.waited_s, 0) + p_bound_s
     ORDER BY l.oldest_seq LIMIT 1;
    IF FOUND AND (v_other.model IN ('', p_warm)
                  OR v_other.oldest_s > coalesce(v_chosen.waited_s, 0) + 2 * p_bound_s
                  OR NOT queue_workflows_gpu_is_held(v_fleet, p_host, v_other.model, 3)) THEN
        model := v_other.model;
        seq := v_other.oldest_seq;
        why := 'overdue';
    ELSE
        model := v_chosen.model;
        seq := v_chosen.seq;
    END IF;
END $$;

CREATE FUNCTION public.queue_workflows_gpu_fleet(p_worker text) RETURNS SETOF public.queue_workflows_gpu_holder
    LANGUAGE sql STABLE
    AS $$
    SELECT w.host_label, coalesce(j.required_model, w.current_model),
           CASE WHEN j.started_at IS NULL THEN 0
                WHEN w.current_model IS DISTINCT FROM j.required_model AND j.required_model IS NOT NULL
                THEN greatest(0, t.load_s + t.run_s - queue_workflows_age_s(j.started_at))
                ELSE greatest(0, t.run_s - queue_workflows_age_s(greatest(j.started_at, w.model_since))) END,
           t.run_s
      FROM workers w
      LEFT JOIN LATERAL (SELECT r.required_model, r.started_at FROM workflow_node_jobs r
                          WHERE r.worker_id = w.worker_id AND r.status = 'running' LIMIT 1) j ON true
     CROSS JOIN LATERAL queue_workflows_gpu_times(
                w.host_label, coalesce(j.required_model, w.current_model)) t
     WHERE w.queue = 'gpu' AND w.worker_id <> p_worker AND w.state IN ('idle', 'busy')
       AND w.last_seen > now() - interval '30 seconds'
$$;

CREATE FUNCTION public.queue_workflows_gpu_is_held(p_fleet public.queue_workflows_gpu_holder[], p_host text, p_model text, p_loads double precision) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    SELECT coalesce(queue_workflows_gpu_reach(p_fleet, p_model, 1) <= p_loads * t.load_s, false)
      FROM queue_workflows_gpu_times(p_host, p_model) t
$$;

CREATE FUNCTION public.queue_workflows_gpu_line(p_model text) RETURNS SETOF public.queue_workflows_gpu_line
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
DECLARE
    v_priority smallint;
    v_seq      bigint;
    v_at       timestamptz;
    v_oldest   bigint;
    v_since    timestamptz;
BEGIN
    IF p_model = '' THEN
        SELECT j.priority, j.seq, j.created_at INTO v_priority, v_seq, v_at FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND j.required_model IS NULL
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1;
        SELECT j.seq, j.created_at INTO v_oldest, v_since FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND j.required_model IS NULL
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_model, j.seq LIMIT 1;
    ELSE
        SELECT j.priority, j.seq, j.created_at INTO v_priority, v_seq, v_at FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND j.required_model BETWEEN p_model AND p_model
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1;
        SELECT j.seq, j.created_at INTO v_oldest, v_since FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND j.required_model BETWEEN p_model AND p_model
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_model, j.seq LIMIT 1;
    END IF;
    IF v_seq IS NOT NULL THEN
        RETURN QUERY SELECT p_model, v_priority, v_seq,
            queue_workflows_age_s(v_at), v_oldest,
            queue_workflows_age_s(v_since);
    END IF;
END $$;

CREATE FUNCTION public.queue_workflows_gpu_live() RETURNS TABLE(host_label text, known_models text[], vram_total_mb integer, is_serving boolean)
    LANGUAGE sql STABLE
    AS $$
    SELECT w.host_label, w.known_models, w.vram_total_mb, w.state IN ('idle', 'busy', 'throttled')
      FROM workers w
     WHERE w.queue = 'gpu' AND w.state NOT IN ('stopped', 'dead')
       AND w.last_seen > now() - interval '30 seconds'
    UNION ALL
    SELECT h.host_label, nullif(h.known_models, '{}'), h.vram_total_mb, true
      FROM worker_heartbeats h
     WHERE h.queue = 'gpu' AND h.last_seen > now() - interval '30 seconds'
       AND NOT EXISTS (SELECT FROM workers w
                        WHERE w.host_label = h.host_label AND w.queue = 'gpu'
                          AND (w.last_seen >= h.last_seen
                               OR w.last_seen > now() - interval '30 seconds'
                                  AND w.state NOT IN ('stopped', 'dead')))
$$;

CREATE FUNCTION public.queue_workflows_gpu_misfit(p_host text, p_models text[], p_vram_mb integer, p_model text) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $$
BEGIN
    IF coalesce(p_model, '') = '' THEN
        RETURN NULL;
    ELSIF p_model <> ALL (p_models) THEN
        RETURN 'model';
    ELSIF p_models IS NULL AND EXISTS (
        SELECT FROM queue_workflows_gpu_live() l WHERE p_model = ANY (l.known_models)) THEN
        RETURN 'model';
    ELSIF p_vram_mb < 1000 * queue_workflows_gpu_needs(p_host, p_model) THEN
        RETURN 'vram';
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION public.queue_workflows_gpu_needs(p_host text, p_model text) RETURNS double precision
    LANGUAGE sql STABLE
    AS $$
    SELECT coalesce(max(g.est_vram_gb) FILTER (WHERE g.host_label = p_host), max(g.est_vram_gb))
      FROM gpu_models g WHERE g.model = p_model
$$;

CREATE FUNCTION public.queue_workflows_gpu_next(p_worker text, p_host text, p_model text, p_models text[], p_newest boolean, p_policy text, p_grace_s double precision, p_bound_s double precision, OUT model text, OUT how text, OUT band smallint, OUT seq bigint, OUT why text) RETURNS record
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
DECLARE
    v_choice text;
    v_band   smallint;
    v_place  bigint;
BEGIN
    how := CASE WHEN p_newest THEN 'newest' ELSE 'first' END;
    IF p_policy = 'balanced' THEN
        SELECT c.model, c.seq, c.why INTO model, seq, why
          FROM queue_workflows_gpu_choose(
                   p_worker, p_host, p_model, p_models, p_newest, p_grace_s, p_bound_s) c;
        IF why = 'overdue' THEN
            how := 'oldest';
        ELSIF p_newest THEN
            SELECT l.priority INTO band FROM queue_workflows_gpu_line(model) l;
        END IF;
        RETURN;
    END IF;
    -- The first job of each model, best first.
    SELECT head.model, head.priority, head.place INTO v_choice, v_band, v_place
      FROM (SELECT m.model, j.priority,
                   CASE WHEN NOT p_newest THEN j.seq
                        WHEN m.model <> '' THEN -(
                            SELECT k.seq FROM workflow_node_jobs k
                             WHERE (k.required_model, k.priority) >= (m.model, j.priority)
                               AND (k.required_model, k.priority) <= (m.model, j.priority)
                               AND k.queue = 'gpu' AND queue_workflows_is_claimable(k.status, k.blocked_reason)
                               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = k.run_id
                                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
                             ORDER BY k.required_model DESC, k.priority DESC, k.seq DESC LIMIT 1)
                        ELSE -(
                            SELECT k.seq FROM workflow_node_jobs k
                             WHERE k.required_model IS NULL AND k.priority BETWEEN j.priority AND j.priority
                               AND k.queue = 'gpu' AND queue_workflows_is_claimable(k.status, k.blocked_reason)
                               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = k.run_id
                                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
                             ORDER BY k.required_model DESC, k.priority DESC, k.seq DESC LIMIT 1) END AS place
              FROM unnest(p_models) AS m(model)
             CROSS JOIN LATERAL (
                   (SELECT k.priority, k.seq FROM workflow_node_jobs k
                     WHERE m.model <> '' AND k.required_model BETWEEN m.model AND m.model
                       AND k.queue = 'gpu' AND queue_workflows_is_claimable(k.status, k.blocked_reason)
                       AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = k.run_id
                                   AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
                     ORDER BY k.required_model, k.priority, k.seq LIMIT 1)
                   UNION ALL
                   (SELECT k.priority, k.seq FROM workflow_node_jobs k
                     WHERE m.model = '' AND k.required_model IS NULL AND k.queue = 'gpu'
                       AND queue_workflows_is_claimable(k.status, k.blocked_reason)
                       AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = k.run_id
                                   AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
                     ORDER BY k.required_model, k.priority, k.seq LIMIT 1)) j) head
     ORDER BY head.priority, (head.model <> coalesce(p_model, '')), head.place LIMIT 1;
    model := v_choice;
    band := v_band;
    seq := abs(v_place);
    why := CASE WHEN v_choice = p_model THEN 'warm' ELSE 'first' END;
END $$;

CREATE FUNCTION public.queue_workflows_gpu_queued() RETURNS SETOF text
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
BEGIN
    RETURN QUERY WITH RECURSIVE line (model) AS (
        (SELECT j.required_model FROM workflow_node_jobs j
          WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
            AND j.required_model IS NOT NULL
          ORDER BY j.required_model LIMIT 1)
        UNION ALL
        SELECT (SELECT j.required_model FROM workflow_node_jobs j
                 WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
                   AND j.required_model > line.model
                 ORDER BY j.required_model LIMIT 1)
          FROM line WHERE line.model IS NOT NULL)
    SELECT line.model FROM line WHERE line.model IS NOT NULL;
END $$;

CREATE FUNCTION public.queue_workflows_gpu_reach(p_fleet public.queue_workflows_gpu_holder[], p_model text, p_jobs integer) RETURNS double precision
    LANGUAGE sql STABLE
    AS $$
    SELECT avg(f.free_s) + (p_jobs - 1) / sum(1 / greatest(f.run_s, 0.001))
      FROM unnest(p_fleet) f WHERE f.model = p_model
$$;

CREATE FUNCTION public.queue_workflows_gpu_take(p_model text, p_how text, p_band smallint, p_seq bigint) RETURNS text
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
DECLARE
    v_id text;
BEGIN
    IF p_how = 'oldest' AND p_model = '' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND j.required_model IS NULL AND j.seq <= p_seq
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_model, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_how = 'oldest' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND j.required_model BETWEEN p_model AND p_model AND j.seq <= p_seq
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_model, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_how = 'newest' AND p_model = '' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND j.required_model IS NULL AND j.priority BETWEEN p_band AND p_band
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_how = 'newest' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND (j.required_model, j.priority) >= (p_model, p_band)
           AND (j.required_model, j.priority) <= (p_model, p_band)
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSIF p_model = '' THEN
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND j.required_model IS NULL
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    ELSE
        SELECT j.id INTO v_id FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND j.required_model BETWEEN p_model AND p_model
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
    END IF;
    RETURN v_id;
END $$;

CREATE FUNCTION public.queue_workflows_gpu_times(p_host text, p_model text, OUT load_s double precision, OUT run_s double precision) RETURNS record
    LANGUAGE sql STABLE
    AS $$
    SELECT coalesce(max(g.load_s) FILTER (WHERE g.host_label = p_host), avg(g.load_s), 60),
           coalesce(max(g.run_s) FILTER (WHERE g.host_label = p_host), avg(g.run_s), 60)
      FROM gpu_models g WHERE g.model = p_model
$$;

CREATE FUNCTION public.queue_workflows_gpu_unserved() RETURNS TABLE(model text, reason text, detail text)
    LANGUAGE sql STABLE
    AS $$
    WITH live AS MATERIALIZED (SELECT * FROM queue_workflows_gpu_live()),
    waiting AS MATERIALIZED (
        SELECT l.model FROM queue_workflows_gpu_queued() AS q (model)
         CROSS JOIN LATERAL queue_workflows_gpu_line(q.model) l
        UNION ALL SELECT l.model FROM queue_workflows_gpu_line('') l),
    judged AS (
        SELECT w.model, l.host_label, l.vram_total_mb, l.is_serving,
               queue_workflows_gpu_misfit(l.host_label, l.known_models, l.vram_total_mb, w.model) AS misfit,
               queue_workflows_gpu_needs(l.host_label, w.model) AS needs_gb
          FROM waiting w LEFT JOIN live l ON true),
    told AS (
        SELECT j.model, count(j.host_label) AS alive,
               max(j.vram_total_mb) FILTER (WHERE j.misfit = 'vram') AS vram_mb,
               max(j.needs_gb) FILTER (WHERE j.misfit = 'vram') AS needs_gb,
               bool_or(j.misfit IS NULL AND j.is_serving) AS is_served,
               string_agg(DISTINCT j.host_label, ', ' ORDER BY j.host_label)
                   FILTER (WHERE j.misfit IS NULL) AS off,
               bool_or(j.misfit = 'vram') AS is_large
          FROM judged j GROUP BY j.model)
    SELECT t.model,
           CASE WHEN t.alive = 0 THEN 'no_worker' WHEN t.off IS NOT NULL THEN 'off'
                WHEN t.is_large THEN 'vram' ELSE 'model' END,
           CASE WHEN t.alive = 0 THEN 'no gpu worker is alive'
                WHEN t.off IS NOT NULL THEN 'every box that can take it is off: ' || t.off
                WHEN t.is_large THEN format('it needs %s GB, and the largest card that may load it has %s GB',
                                            t.needs_gb, t.vram_mb / 1000)
                ELSE 'no live gpu worker knows the model' END
      FROM told t WHERE t.is_served IS NOT TRUE
$$;

CREATE FUNCTION public.queue_workflows_gpu_weigh(p_fleet public.queue_workflows_gpu_holder[], p_host text, p_model text, OUT jobs integer, OUT waited_s double precision, OUT load_s double precision, OUT run_s double precision, OUT reach_s double precision, OUT is_left boolean) RETURNS record
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
DECLARE
    v_jobs   integer;
    v_waited float8;
BEGIN
    SELECT count(*), coalesce(sum(queue_workflows_age_s(w.created_at)), 0)
      INTO v_jobs, v_waited
      FROM (SELECT j.created_at FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND j.required_model BETWEEN p_model AND p_model
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
             ORDER BY j.required_model, j.priority, j.seq LIMIT 16) w;
    jobs := v_jobs;
    waited_s := v_waited;
    SELECT t.load_s, t.run_s INTO load_s, run_s FROM queue_workflows_gpu_times(p_host, p_model) t;
    reach_s := queue_workflows_gpu_reach(p_fleet, p_model, jobs);
    is_left := jobs < 16 AND coalesce(reach_s <= 3 * load_s, false);
END $$;

CREATE FUNCTION public.queue_workflows_guard_run() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF NEW.generation > OLD.generation THEN
        RETURN NEW;
    END IF;
    IF NEW.status = 'queued' AND OLD.status IN ('failed', 'cancelled') THEN
        NEW.generation := OLD.generation + 1;
        NEW.finished_at := NULL;
        NEW.error := NULL;
        NEW.start_attempts := 0;
        NEW.available_at := NULL;
        NEW.queued_at := now();
        UPDATE workflow_node_jobs SET cancel_requested_at = NULL
         WHERE run_id = NEW.id AND status = 'running' AND cancel_requested_at IS NOT NULL;
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'run % is % and stays so; retry_run() reopens it', OLD.id, OLD.status
        USING ERRCODE = 'QW002';
END $$;

CREATE FUNCTION public.queue_workflows_hold_back(p_queue text, p_look integer, p_most integer) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    SET search_path TO 'public', 'pg_temp'
    AS $$
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

CREATE FUNCTION public.queue_workflows_hold_ingest() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    IF NEW.claim_no NOT BETWEEN 0 AND 1000000000 OR NEW.seq NOT BETWEEN 1 AND 1000000000000000
       OR greatest(NEW.attempts, NEW.max_attempts, NEW.crash_count, NEW.watchdog_retries, NEW.generation) > 1000000
       OR least(NEW.attempts, NEW.max_attempts, NEW.crash_count, NEW.watchdog_retries, NEW.generation) < 0
       OR NEW.timeout_s <= 0 OR NEW.timeout_s > 31622400 OR NEW.seconds NOT BETWEEN -1e12 AND 1e12
       OR greatest(NEW.created_at, NEW.available_at, NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at,
                   NEW.finished_at, NEW.cancel_requested_at, NEW.admitted_at) > '9999-12-31+00'
       OR least(NEW.created_at, NEW.available_at, NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at,
                NEW.finished_at, NEW.cancel_requested_at, NEW.admitted_at) < '2000-01-01+00'
       OR greatest(octet_length(NEW.id), octet_length(NEW.task_name), octet_length(NEW.lock_key),
                   octet_length(NEW.partition_key), octet_length(NEW.idempotency_key),
                   octet_length(NEW.claimed_by), octet_length(NEW.worker_id)) > 1000
       OR octet_length(NEW.reason) > 8000 THEN
        PERFORM queue_workflows_refuse(TG_TABLE_NAME::text, NULL, to_jsonb(NEW));
    END IF;
    IF octet_length(NEW.args::text) > 256 THEN
        PERFORM queue_workflows_check_payload(NEW.args, 'ingest_jobs.args');
    END IF;
    IF coalesce(NEW.headers, NEW.policy, NEW.result, NEW.progress) IS NOT NULL THEN
        PERFORM queue_workflows_check_payload(NEW.headers, 'ingest_jobs.headers');
        PERFORM queue_workflows_check_payload(NEW.policy, 'ingest_jobs.policy');
        PERFORM queue_workflows_check_payload(NEW.result, 'ingest_jobs.result');
        PERFORM queue_workflows_check_payload(NEW.progress, 'ingest_jobs.progress');
    END IF;
    IF NEW.status = 'running' THEN
        -- The same as for a plain UPDATE to `running`. A lease without an end would keep its lock key for ever.
        IF NEW.lease_expires_at > now() + interval '7 days' THEN
            RAISE EXCEPTION 'ingest_jobs.lease_expires_at of a running job is over 7 days ahead'
                USING ERRCODE = 'check_violation', HINT = 'Insert the job as queued; a worker claims it.';
        END IF;
        NEW.claim_no := greatest(NEW.claim_no, 1);
        NEW.worker_id := coalesce(NEW.worker_id, 'legacy:' || coalesce(NEW.claimed_by, 'unknown'));
        NEW.lease_expires_at := coalesce(NEW.lease_expires_at, now() + interval '600 seconds');
    ELSIF coalesce(NEW.worker_id, NEW.lease_expires_at::text) IS NOT NULL THEN
        NEW.worker_id := NULL;
        NEW.lease_expires_at := NULL;
    END IF;
    IF coalesce(NEW.partition_key, NEW.lock_key, NEW.idempotency_key) IS NULL
       AND (NEW.available_at > now()) IS NOT TRUE THEN
        RETURN NEW;
    END IF;
    IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    -- An IF of its own: an expression that contains a query is always run as a query.
    IF NEW.partition_key IS NOT NULL AND NEW.status = 'queued' THEN
        IF EXISTS (SELECT FROM queue_partition_limits l WHERE l.queue = NEW.queue) THEN
            NEW := queue_workflows_limit_gate(NULL, NEW);
        END IF;
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

CREATE FUNCTION public.queue_workflows_hold_node(p_run text, p_node text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    PERFORM queue_workflows_demand('INSERT', 'workflow_input_submissions', 'value');
    PERFORM FROM workflow_node_jobs
      WHERE run_id = p_run AND node_id = p_node AND starts_with(node_module, '__input__')
        AND status IN ('queued', 'running', 'awaiting_input') FOR SHARE;
END $$;

CREATE FUNCTION public.queue_workflows_hold_until_due() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    IF NEW.claim_no NOT BETWEEN 0 AND 1000000000 OR NEW.seq NOT BETWEEN 1 AND 1000000000000000
       OR greatest(NEW.attempts, NEW.max_attempts, NEW.crash_count, NEW.watchdog_retries, NEW.generation) > 1000000
       OR least(NEW.attempts, NEW.max_attempts, NEW.crash_count, NEW.watchdog_retries, NEW.generation) < 0
       OR NEW.timeout_s <= 0 OR NEW.timeout_s > 31622400 OR NEW.seconds NOT BETWEEN -1e12 AND 1e12
       OR greatest(NEW.created_at, NEW.available_at, NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at,
                   NEW.finished_at, NEW.cancel_requested_at) > '9999-12-31+00'
       OR least(NEW.created_at, NEW.available_at, NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at,
                NEW.finished_at, NEW.cancel_requested_at) < '2000-01-01+00'
       OR greatest(octet_length(NEW.id), octet_length(NEW.run_id), octet_length(NEW.node_id),
                   octet_length(NEW.node_module), octet_length(NEW.pipeline_name), octet_length(NEW.lock_key),
                   octet_length(NEW.required_model), octet_length(NEW.claimed_by),
                   octet_length(NEW.worker_id)) > 1000 THEN
        PERFORM queue_workflows_refuse(TG_TABLE_NAME::text, NULL, to_jsonb(NEW));
    END IF;
    IF NEW.status = 'running' THEN
        -- The same as for a plain UPDATE to `running`. A lease without an end would keep its lock key for ever.
        IF NEW.lease_expires_at > now() + interval '7 days' THEN
            RAISE EXCEPTION 'workflow_node_jobs.lease_expires_at of a running job is over 7 days ahead'
                USING ERRCODE = 'check_violation', HINT = 'Insert the job as queued; a worker claims it.';
        END IF;
        NEW.claim_no := greatest(NEW.claim_no, 1);
        NEW.worker_id := coalesce(NEW.worker_id, 'legacy:' || coalesce(NEW.claimed_by, 'unknown'));
        NEW.lease_expires_at := coalesce(NEW.lease_expires_at, now() + interval '600 seconds');
    ELSIF coalesce(NEW.worker_id, NEW.lease_expires_at::text) IS NOT NULL THEN
        NEW.worker_id := NULL;
        NEW.lease_expires_at := NULL;
    END IF;
    IF NEW.required_model = '' THEN
        NEW.required_model := NULL;
    END IF;
    IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    IF NEW.lock_key IS NOT NULL AND NEW.status = 'queued' THEN
        IF NEW.blocked_reason IS NULL THEN
            NEW.blocked_reason := 'locked';
        END IF;
        PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION public.queue_workflows_ingest_step(p_worker text, p_host text, p_queue text, p_lease_s double precision, p_claim integer, p_obey boolean, p_promote boolean, p_done jsonb, p_tell boolean DEFAULT false) RETURNS TABLE(id text, task_name text, queue text, reason text, priority smallint, seq bigint, args jsonb, claim_no bigint, worker_id text, claimed_by text, attempts integer, max_attempts integer, crash_count integer, timeout_s double precision, headers jsonb, partition_key text, lock_key text, wait_s double precision)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
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
           AND queue_workflows_is_off(c.desired_state, c.until_at))) THEN
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
    -- A job that may have killed its worker is claimed alone, so that no other job dies with it.
    IF v_room = 1 OR (v_room > 1 AND (SELECT q.crash_count > 0 FROM ingest_jobs q
                        WHERE q.queue = p_queue AND queue_workflows_is_claimable(q.status, q.blocked_reason)
                        ORDER BY q.priority, q.seq LIMIT 1)) THEN
        UPDATE ingest_jobs j
           SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
               lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
               started_at = now(), available_at = NULL, error = NULL, progress = NULL
         WHERE j.id = coalesce(v_past, (SELECT q.id FROM ingest_jobs q
                        WHERE q.queue = p_queue AND queue_workflows_is_claimable(q.status, q.blocked_reason)
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
            v_wait_s := 0;  -- its partition has limits by now: the trigger has blocked it
        END IF;
    ELSIF v_room > 1 THEN
        RETURN QUERY
        WITH picked AS MATERIALIZED (
            SELECT j.id FROM ingest_jobs j
             WHERE j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
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

CREATE FUNCTION public.queue_workflows_insert_nodes(p_run text, p_rows jsonb) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_count bigint;
BEGIN
    INSERT INTO workflow_node_jobs AS j
           (run_id, node_id, node_module, queue, required_model, status, priority, pipeline_name, inputs,
            input_template, ref_heads, generation, finished_at, max_attempts, timeout_s, policy, lock_key)
    SELECT r.id, n.node_id, n.node_module, n.queue, n.required_model, n.status,
           coalesce(n.priority, r.priority),
           n.pipeline_name, n.inputs, n.input_template, n.ref_heads, r.generation,
           CASE n.status WHEN 'skipped' THEN now() END, coalesce(n.max_attempts, 1), n.timeout_s,
           n.policy, n.lock_key
      FROM workflow_runs r, jsonb_to_recordset(p_rows) AS n (
           node_id text, node_module text, queue text, required_model text, status text,
           pipeline_name text, inputs jsonb, input_template jsonb, ref_heads text[],
           priority smallint, max_attempts integer, timeout_s double precision, policy jsonb,
           lock_key text)
     WHERE r.id = p_run
        ON CONFLICT (run_id, node_id) DO UPDATE SET
           status = EXCLUDED.status, inputs = EXCLUDED.inputs, input_template = EXCLUDED.input_template,
           ref_heads = EXCLUDED.ref_heads, node_module = EXCLUDED.node_module, queue = EXCLUDED.queue,
           required_model = EXCLUDED.required_model, priority = EXCLUDED.priority,
           generation = EXCLUDED.generation, finished_at = EXCLUDED.finished_at, seq = EXCLUDED.seq,
           max_attempts = EXCLUDED.max_attempts, timeout_s = EXCLUDED.timeout_s,
           policy = EXCLUDED.policy, lock_key = EXCLUDED.lock_key,
           error = NULL, attempts = 0, crash_count = 0, watchdog_retries = 0, resolved_inputs = NULL,
           seconds = NULL, vm_rss_mb_peak = NULL, input_spec = NULL, context_delta = '{}',
           blocked_reason = NULL, available_at = NULL, cancel_requested_at = NULL, progress = NULL,
           created_at = now(), started_at = NULL
     WHERE j.generation < EXCLUDED.generation AND j.status IN ('failed', 'cancelled');
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

CREATE FUNCTION public.queue_workflows_is_about_data(p_state text) RETURNS boolean
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT left(p_state, 2) IN ('0A', '21', '22', '23', '54')
$$;

CREATE FUNCTION public.queue_workflows_is_claimable(p_status text, p_blocked_reason text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    SELECT p_status = 'queued' AND p_blocked_reason IS NULL
$$;

CREATE FUNCTION public.queue_workflows_is_off(p_desired_state text, p_until_at timestamp with time zone) RETURNS boolean
    LANGUAGE sql STABLE PARALLEL SAFE
    AS $$
    SELECT p_desired_state = 'off' AND (p_until_at IS NULL OR p_until_at > now())
$$;

CREATE FUNCTION public.queue_workflows_is_past_retention(p_status text, p_ended_at timestamp with time zone, p_days double precision) RETURNS boolean
    LANGUAGE sql STABLE PARALLEL SAFE
    AS $$
    SELECT queue_workflows_is_terminal_run(p_status) AND p_days > 0
       AND p_ended_at < now() - least(greatest(p_days, 0), 36500) * interval '1 day'
$$;

CREATE FUNCTION public.queue_workflows_is_paused(p_paused_at timestamp with time zone, p_paused_until timestamp with time zone) RETURNS boolean
    LANGUAGE sql STABLE PARALLEL SAFE
    AS $$
    SELECT p_paused_at IS NOT NULL AND (p_paused_until IS NULL OR p_paused_until > now())
$$;

CREATE FUNCTION public.queue_workflows_is_systemic(p_state text) RETURNS boolean
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT left(p_state, 2) IN ('08', '25', '28', '2D', '3B', '3D', '3F', '40', '42', '53', '55', '57', '58', '72',
                                'F0', 'HV', 'XX')
$$;

CREATE FUNCTION public.queue_workflows_is_terminal_job(p_status text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    SELECT p_status IN ('completed', 'failed', 'cancelled', 'skipped')
$$;

CREATE FUNCTION public.queue_workflows_is_terminal_run(p_status text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    SELECT p_status IN ('completed', 'failed', 'cancelled')
$$;

CREATE FUNCTION public.queue_workflows_job_changed() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
DECLARE
    v_admits boolean := false;  -- whether this is the admission, which gives the lock key to the job or takes it back
BEGIN
    -- Ranges of the columns that every claim writes. queue_workflows_bound_job checks the other columns.
    IF NEW.claim_no NOT BETWEEN 0 AND 1000000000 OR NEW.seconds NOT BETWEEN -1e12 AND 1e12
       OR greatest(NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at, NEW.finished_at, NEW.available_at,
                   NEW.cancel_requested_at) > '9999-12-31+00'
       OR least(NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at, NEW.finished_at, NEW.available_at,
                NEW.cancel_requested_at) < '2000-01-01+00' THEN
        PERFORM queue_workflows_refuse(TG_TABLE_NAME::text, to_jsonb(OLD), to_jsonb(NEW));
    END IF;
    IF NEW.lock_key = OLD.lock_key AND NEW.status = 'queued' AND OLD.status = 'queued'
       AND (NEW.blocked_reason IS NULL) <> (OLD.blocked_reason IS NULL)
       AND 'locked' IN (NEW.blocked_reason, OLD.blocked_reason) THEN
        v_admits := EXISTS (SELECT FROM lock_turns t WHERE t.xid = pg_current_xact_id() AND t.admits
                               AND t.jobs = TG_TABLE_NAME AND t.lock_key = NEW.lock_key);
        IF v_admits AND NEW.blocked_reason = 'locked' THEN
            RETURN NEW;
        END IF;
    END IF;
    IF (NEW.partition_key IS NOT NULL OR OLD.partition_key IS NOT NULL) AND NOT v_admits THEN
        IF TG_TABLE_NAME = 'ingest_jobs' THEN
            IF coalesce(OLD.admitted_at, NEW.admitted_at) IS NOT NULL OR NEW.blocked_reason = 'limited'
               OR EXISTS (SELECT FROM queue_partition_limits l WHERE l.queue IN (OLD.queue, NEW.queue)) THEN
                DECLARE
                    v_passed ingest_jobs;  -- declared here: each call of the declaring block allocates a row
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
    -- The step functions write complete rows.
    IF NEW.lock_key IS NULL AND OLD.lock_key IS NULL
       AND (OLD.status = 'queued' AND NEW.status = 'running' AND NEW.claim_no > OLD.claim_no
            OR OLD.status = 'running' AND NEW.status = 'completed'
               AND NEW.worker_id IS NULL AND NEW.lease_expires_at IS NULL) THEN
        RETURN NEW;
    END IF;
    IF NEW.status = OLD.status THEN
        IF NEW.status = 'queued' THEN
            IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
                NEW.blocked_reason := 'not_due';
            ELSIF NEW.lock_key IS NOT NULL AND NOT v_admits AND (
                      NEW.blocked_reason IS NULL
                      AND (OLD.blocked_reason IS NOT NULL OR NEW.lock_key IS DISTINCT FROM OLD.lock_key)
                      OR NEW.available_at IS NULL AND NEW.blocked_reason = 'not_due') THEN
                NEW.blocked_reason := 'locked';
            ELSIF NEW.lock_key IS NULL AND OLD.lock_key IS NOT NULL
                  AND NEW.blocked_reason IN ('locked', 'unserved') THEN
                -- Without its key it would be admitted by nobody.
                NEW.blocked_reason := CASE WHEN NEW.available_at > now() THEN 'not_due' END;
                IF NEW.blocked_reason IS NULL THEN
                    PERFORM pg_notify(TG_ARGV[0], NEW.queue);
                END IF;
            ELSIF NEW.available_at IS NULL AND NEW.blocked_reason = 'not_due' THEN
                NEW.blocked_reason := NULL;
                PERFORM pg_notify(TG_ARGV[0], NEW.queue);
            ELSIF NEW.blocked_reason IS NULL AND OLD.blocked_reason IS NOT NULL THEN
                PERFORM pg_notify(TG_ARGV[0], NEW.queue);
            END IF;
        ELSIF NEW.status = 'running' AND NEW.cancel_requested_at IS NOT NULL
              AND OLD.cancel_requested_at IS NULL THEN
            IF TG_TABLE_NAME = 'ingest_jobs' THEN
                PERFORM queue_workflows_audit(NEW, 'cancel_requested');
            END IF;
            PERFORM pg_notify('job_cancel', left(NEW.id, 1000));
        END IF;
        IF NOT v_admits AND (OLD.lock_key IS NOT NULL OR NEW.lock_key IS NOT NULL)
           AND (NEW.lock_key IS DISTINCT FROM OLD.lock_key
                OR NEW.blocked_reason IS DISTINCT FROM OLD.blocked_reason) THEN
            PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, OLD.lock_key);
            PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
        END IF;
        RETURN NEW;
    END IF;
    IF queue_workflows_is_terminal_job(OLD.status)
       AND NEW.generation <= OLD.generation THEN
        RAISE EXCEPTION 'job % is % and stays so; retry_job() or retry_run() reopens it', OLD.id, OLD.status
            USING ERRCODE = 'QW002';
    END IF;
    IF NEW.status = 'running' THEN
        IF NEW.claim_no = OLD.claim_no THEN
            IF OLD.blocked_reason IN ('locked', 'limited', 'unserved') OR EXISTS (
                SELECT FROM queue_settings s
                 WHERE s.queue = OLD.queue
                   AND (queue_workflows_is_paused(s.paused_at, s.paused_until)
                        OR s.max_running IS NOT NULL OR s.rate_limit IS NOT NULL)) THEN
                RETURN NULL;  -- a statement of 0.3.0, which knows no lock keys and limits, finds no job
            END IF;
            NEW.claim_no := OLD.claim_no + 1;
            NEW.worker_id := 'legacy:' || coalesce(NEW.claimed_by, 'unknown');
            IF TG_TABLE_NAME = 'ingest_jobs' THEN
                PERFORM queue_workflows_audit(NEW, 'claimed');
            END IF;
            NEW.lease_expires_at := coalesce(NEW.lease_expires_at, now() + interval '600 seconds');
            NEW.blocked_reason := NULL;
            NEW.available_at := NULL;
        END IF;
        RETURN NEW;
    END IF;
    IF NEW.status = 'queued' THEN
        NEW.claimed_by := OLD.claimed_by;  -- for the history; cleared below
    END IF;
    -- A statement that ends a claim clears worker_id and records the end itself; a plain UPDATE leaves it.
    IF TG_TABLE_NAME = 'ingest_jobs' AND (OLD.status <> 'running' OR NEW.worker_id IS NOT NULL) THEN
        PERFORM queue_workflows_audit(NEW, CASE WHEN NEW.status <> 'queued' THEN NEW.status::text
                                                WHEN OLD.status = 'running' THEN 'requeued' ELSE 'retried' END);
    END IF;
    -- The engine's own statements clear worker_id. A plain UPDATE, which knows no claim, leaves it set.
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
    -- Only a number counts: a policy written by plain SQL may hold any value under the key.
    IF NEW.status = 'awaiting_input' AND jsonb_typeof(NEW.policy -> 'timeout_s') = 'number' THEN
        INSERT INTO workflow_input_timeouts AS t (job_id, claim_no, due_at)
        VALUES (NEW.id, NEW.claim_no, now() + interval '1 second'
                * least(greatest((NEW.policy -> 'timeout_s')::numeric, 0), 31622400)::float8)
            ON CONFLICT (job_id) DO UPDATE SET claim_no = EXCLUDED.claim_no, due_at = EXCLUDED.due_at;
    END IF;
    IF NEW.status = 'queued' THEN
        -- Apps query `claimed_by IS NULL`, and a worker of 0.3.0 stops only when it is cleared.
        NEW.claimed_by := NULL;
        NEW.started_at := NULL;
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

CREATE FUNCTION public.queue_workflows_jobs_gone() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
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
    END IF;
    DELETE FROM job_attempt_logs l USING gone WHERE l.job_id = gone.id AND l.job_table = TG_TABLE_NAME;
    RETURN NULL;
END $$;

CREATE FUNCTION public.queue_workflows_keep_events() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('queue_workflows.retention', true) = 'on' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION '% is append-only: % is refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'QW004',
              HINT = 'NODE_EVENT_RETENTION_DAYS says when old rows go; `queue-workflows prune` deletes them.';
END $$;

CREATE FUNCTION public.queue_workflows_learn(p_host text, p_model text, p_load_s double precision, p_run_s double precision) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF p_host IS NULL OR p_model IS NULL THEN
        RETURN;
    END IF;
    p_load_s := CASE WHEN p_load_s IS NOT NULL THEN least(greatest(p_load_s, 0), 31622400) END;
    p_run_s := CASE WHEN p_run_s IS NOT NULL THEN least(greatest(p_run_s, 0), 31622400) END;
    UPDATE gpu_models g
       SET load_s = CASE WHEN p_load_s IS NULL THEN g.load_s
                         ELSE coalesce(g.load_s, 0)
                              + (p_load_s - coalesce(g.load_s, 0)) / (least(g.loads, 9) + 1) END,
           loads = least(g.loads, 1000000000) + (p_load_s IS NOT NULL)::integer,
           run_s = CASE WHEN p_run_s IS NULL THEN g.run_s
                        ELSE coalesce(g.run_s, 0)
                             + (p_run_s - coalesce(g.run_s, 0)) / (least(g.runs, 9) + 1) END,
           runs = least(g.runs, 1000000000) + (p_run_s IS NOT NULL)::integer,
           updated_at = now()
     WHERE (g.model, g.host_label) = (
           SELECT o.model, o.host_label FROM gpu_models o
            WHERE o.model = p_model AND o.host_label = p_host FOR UPDATE SKIP LOCKED);
    IF NOT FOUND AND NOT EXISTS (
        SELECT FROM gpu_models WHERE model = p_model AND host_label = p_host) THEN
        INSERT INTO gpu_models (model, host_label, load_s, loads, run_s, runs)
        VALUES (p_model, p_host, p_load_s, (p_load_s IS NOT NULL)::integer,
                p_run_s, (p_run_s IS NOT NULL)::integer)
            ON CONFLICT DO NOTHING;
    END IF;
END $$;

CREATE FUNCTION public.queue_workflows_limit_gate(p_old public.ingest_jobs, p_new public.ingest_jobs) RETURNS public.ingest_jobs
    LANGUAGE plpgsql
    AS $$
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
            -- The last case: this transaction is older than the one that found room; its start would be too early.
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

CREATE FUNCTION public.queue_workflows_lock_keys(p_jobs text, p_keys text[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    v_place bigint;
BEGIN
    FOR v_place IN SELECT DISTINCT hashtextextended('queue_workflows.lock.' || p_jobs || '.' || key, 0) & 255
                     FROM unnest(p_keys) AS k (key) ORDER BY 1 LOOP
        PERFORM pg_advisory_xact_lock(hashtext('queue_workflows.lock.' || p_jobs), v_place::integer);
    END LOOP;
END $$;

CREATE FUNCTION public.queue_workflows_mend_lines() RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET search_path TO 'public', 'pg_temp'
    AS $$
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

CREATE FUNCTION public.queue_workflows_mend_turns(p_jobs text) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET search_path TO 'public', 'pg_temp'
    AS $_$
DECLARE
    v_keys text[];
BEGIN
    PERFORM queue_workflows_demand('UPDATE', p_jobs, 'status');
    EXECUTE format($q$
        WITH RECURSIVE line (key) AS (
            (SELECT lock_key FROM %1$I WHERE lock_key IS NOT NULL AND status = 'queued'
                AND blocked_reason = 'locked' ORDER BY lock_key LIMIT 1)
            UNION ALL
            SELECT (SELECT w.lock_key FROM %1$I w WHERE w.lock_key IS NOT NULL AND w.status = 'queued'
                       AND w.blocked_reason = 'locked' AND w.lock_key > line.key
                     ORDER BY w.lock_key LIMIT 1)
              FROM line WHERE line.key IS NOT NULL)
        SELECT array_agg(key) FROM line
         WHERE key IS NOT NULL AND NOT EXISTS (
               SELECT FROM %1$I j WHERE j.lock_key IS NOT NULL AND j.lock_key = line.key
                  AND (j.status = 'running' OR (j.status = 'queued' AND j.blocked_reason IS NULL)))
        $q$, p_jobs) INTO v_keys;
    PERFORM queue_workflows_ask_turn(p_jobs, k.key) FROM unnest(v_keys) k (key);
    RETURN coalesce(cardinality(v_keys), 0);
END $_$;

CREATE FUNCTION public.queue_workflows_must_end(job public.ingest_jobs) RETURNS boolean
    LANGUAGE plpgsql STABLE
    AS $$
BEGIN
    RETURN job.cancel_requested_at IS NOT NULL;
END $$;

CREATE TABLE public.workflow_node_jobs (
    id text DEFAULT (gen_random_uuid())::text NOT NULL,
    run_id text NOT NULL,
    node_id text NOT NULL,
    node_module text NOT NULL,
    pipeline_name text,
    queue public.queue_workflows_dag_queue NOT NULL,
    required_model text,
    status public.queue_workflows_node_status DEFAULT 'queued'::text NOT NULL,
    priority smallint DEFAULT 100 NOT NULL,
    worker_lane smallint,
    inputs jsonb DEFAULT '{}'::jsonb NOT NULL,
    resolved_inputs jsonb,
    input_spec jsonb,
    context_delta jsonb DEFAULT '{}'::jsonb NOT NULL,
    host_label text,
    celery_task_id text,
    error text,
    vm_rss_mb_peak integer,
    seconds double precision,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    started_at timestamp with time zone,
    finished_at timestamp with time zone,
    claimed_by text,
    lease_expires_at timestamp with time zone,
    watchdog_retries integer DEFAULT 0 NOT NULL,
    seq bigint NOT NULL,
    claim_no bigint DEFAULT 0 NOT NULL,
    worker_id text,
    generation integer DEFAULT 0 NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    max_attempts integer DEFAULT 1 NOT NULL,
    crash_count integer DEFAULT 0 NOT NULL,
    available_at timestamp with time zone,
    blocked_reason text,
    cancel_requested_at timestamp with time zone,
    heartbeat_at timestamp with time zone,
    progress jsonb,
    timeout_s double precision,
    policy jsonb,
    lock_key text,
    partition_key text,
    input_template jsonb,
    ref_heads text[],
    CONSTRAINT workflow_node_jobs_check CHECK ((((queue)::text = 'gpu'::text) OR (required_model IS NULL)))
)
WITH (fillfactor='70');

CREATE FUNCTION public.queue_workflows_must_end(job public.workflow_node_jobs) RETURNS boolean
    LANGUAGE plpgsql STABLE
    AS $$
BEGIN
    RETURN job.cancel_requested_at IS NOT NULL OR EXISTS (
        SELECT FROM workflow_runs r WHERE r.id = job.run_id AND queue_workflows_is_terminal_run(r.status));
END $$;

CREATE FUNCTION public.queue_workflows_no_empty_model() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    NEW.required_model := nullif(NEW.required_model, '');
    RETURN NEW;
END $$;

CREATE FUNCTION public.queue_workflows_node_step(p_worker text, p_host text, p_queue text, p_lease_s double precision, p_claim boolean, p_obey boolean, p_promote boolean, p_newest boolean, p_model text, p_models text[], p_lane smallint, p_job text, p_claim_no bigint, p_delta jsonb, p_seconds double precision, p_rss integer, p_resolved jsonb, p_generation integer, p_next jsonb, p_end boolean, p_policy text DEFAULT 'strict'::text, p_grace_s double precision DEFAULT 300, p_bound_s double precision DEFAULT 2400) RETURNS json
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
DECLARE
    v_id  text;
    v_old record;
    v_new queue_workflows_claimed_node;
    v_ahead boolean := false;
BEGIN
    IF p_job IS NOT NULL THEN
        UPDATE workflow_node_jobs
           SET status = 'completed', context_delta = p_delta, error = NULL, seconds = p_seconds,
               vm_rss_mb_peak = p_rss, resolved_inputs = coalesce(p_resolved, resolved_inputs),
               finished_at = now(), worker_id = NULL, lease_expires_at = NULL,
               progress = CASE WHEN jsonb_typeof(progress) IN ('object', 'string') THEN progress ELSE '1' END
         WHERE id = p_job AND (worker_id IS NOT DISTINCT FROM p_worker AND claim_no = p_claim_no
                               AND status = 'running') IS TRUE
        RETURNING run_id, node_id, generation, attempts, claimed_by, queue, required_model, started_at
          INTO v_old;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'claim % of job % is no longer held', p_claim_no, p_job
                USING ERRCODE = 'QW001';
        END IF;
        IF v_old.required_model IS NOT NULL THEN
            PERFORM queue_workflows_learn(v_old.claimed_by, v_old.required_model, NULL, greatest(0, p_seconds - (
                SELECT coalesce(sum(e.elapsed_s), 0) FROM workflow_node_events e
                 WHERE e.run_id = v_old.run_id AND e.node_id = v_old.node_id AND e.job_id = p_job
                   AND e.event_type = 'model_load_done' AND e.created_at >= v_old.started_at)));
        END IF;
        IF p_generation IS NOT NULL THEN
            PERFORM FROM workflow_runs
              WHERE id = v_old.run_id AND generation = p_generation AND mode = 'node'
                AND status <> 'queued' AND NOT queue_workflows_is_terminal_run(status)
                FOR NO KEY UPDATE SKIP LOCKED;
            v_ahead := FOUND;
        END IF;
        INSERT INTO workflow_dispatch_events
               (run_id, node_id, kind, job_id, claim_no, generation, processed_at)
        VALUES (v_old.run_id, v_old.node_id, 'completed', p_job, p_claim_no, v_old.generation,
                CASE WHEN v_ahead THEN now() END);
        IF v_ahead AND p_next IS NOT NULL THEN
            PERFORM queue_workflows_insert_nodes(v_old.run_id, p_next);
        END IF;
        IF v_ahead AND p_end THEN
            UPDATE workflow_runs
               SET status = 'completed', finished_at = now(), progress_pct = 100, error = NULL,
                   updated_at = now()
             WHERE id = v_old.run_id;
        END IF;
    END IF;
    IF p_claim THEN
        IF p_promote THEN
            WITH due AS MATERIALIZED (
                SELECT j.id FROM workflow_node_jobs j
                 WHERE j.status = 'queued' AND j.blocked_reason IS NOT NULL AND j.available_at <= now()
                   AND j.blocked_reason = 'not_due' AND j.queue = p_queue
                 ORDER BY j.available_at LIMIT 100 FOR UPDATE SKIP LOCKED)
            UPDATE workflow_node_jobs j SET blocked_reason = NULL, available_at = NULL
             WHERE j.id = ANY (ARRAY(SELECT d.id FROM due d));
        END IF;
        IF p_queue = 'gpu' THEN
            v_id := queue_workflows_pick_gpu(p_worker, p_host, p_model, p_models, p_newest,
                                             p_policy, p_grace_s, p_bound_s);
        ELSIF p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND j.priority = (SELECT k.priority FROM workflow_node_jobs k
                                  WHERE k.queue = p_queue AND queue_workflows_is_claimable(k.status, k.blocked_reason)
                                  ORDER BY k.priority, k.seq LIMIT 1)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
             ORDER BY j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        -- An overflow host finds no job of its priority if all are locked or belong to ended runs.
        UPDATE workflow_node_jobs j
           SET status = 'running', claim_no = j.claim_no + 1, worker_id = p_worker, claimed_by = p_host,
               host_label = p_host, worker_lane = coalesce(p_lane, j.worker_lane),
               lease_expires_at = now() + p_lease_s * interval '1 second', heartbeat_at = now(),
               started_at = now(), available_at = NULL, error = NULL, progress = NULL,
               resolved_inputs = CASE WHEN j.ref_heads = '{}' THEN j.inputs ELSE j.resolved_inputs END
         WHERE j.id = (
               SELECT CASE WHEN p_obey AND EXISTS (
                                SELECT FROM worker_controls c
                                 WHERE c.host_label = p_host AND c.queue IN (p_queue, 'all')
                                   AND queue_workflows_is_off(c.desired_state, c.until_at)) THEN NULL
                           WHEN v_id IS NOT NULL OR p_queue = 'gpu' THEN v_id
                           ELSE (SELECT q.id FROM workflow_node_jobs q
                                  WHERE q.queue = p_queue AND queue_workflows_is_claimable(q.status, q.blocked_reason)
                                    AND EXISTS (SELECT FROM workflow_runs o WHERE o.id = q.run_id
                                                AND NOT queue_workflows_is_terminal_run(o.status) OFFSET 0)
                                  ORDER BY q.priority, q.seq LIMIT 1 FOR UPDATE OF q SKIP LOCKED) END)
        RETURNING j.id, j.run_id, j.node_id, j.node_module, j.queue, j.required_model, j.status,
                  j.pipeline_name, j.priority, j.seq, j.claim_no, j.worker_id, j.claimed_by, j.generation,
                  j.attempts, j.max_attempts, j.crash_count, j.watchdog_retries, j.timeout_s, j.inputs,
                  j.input_template, j.ref_heads,
                  (SELECT json_build_object(
                              'id', r.id, 'out_dir', r.out_dir, 'workflow_name', r.workflow_name,
                              'generation', r.generation,
                              'born', queue_workflows_born(r.created_at))
                     FROM workflow_runs r WHERE r.id = j.run_id),
                  NULL::jsonb
          INTO v_new;
    END IF;
    IF p_job IS NOT NULL THEN
        INSERT INTO workflow_node_events
               (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, elapsed_s,
                worker_id, claim_no)
        VALUES (v_old.run_id, v_old.node_id, p_job, greatest(0, least(v_old.attempts, 32767)), 'completed', v_old.claimed_by,
                v_old.queue, v_old.required_model, p_seconds, p_worker, p_claim_no);
    END IF;
    IF v_new.id IS NULL THEN
        RETURN NULL;
    END IF;
    INSERT INTO workflow_node_events
           (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, worker_id, claim_no)
    VALUES (v_new.run_id, v_new.node_id, v_new.id, greatest(0, least(v_new.attempts, 32767)), 'claimed', p_host, v_new.queue,
            v_new.required_model, p_worker, v_new.claim_no);
    IF v_new.ref_heads <> '{}' THEN
        SELECT coalesce((SELECT jsonb_object_agg(head, r.context -> head)
                           FROM unnest(v_new.ref_heads) head WHERE r.context ? head), '{}')
            || coalesce((SELECT jsonb_object_agg(d.node_id, d.context_delta)
                           FROM workflow_node_jobs d
                          WHERE d.run_id = v_new.run_id AND d.status = 'completed'
                            AND d.node_id = ANY (v_new.ref_heads)), '{}')
          INTO v_new.context FROM workflow_runs r WHERE r.id = v_new.run_id;
    END IF;
    RETURN row_to_json(v_new);
END $$;

CREATE FUNCTION public.queue_workflows_nodes_step(p_worker text, p_host text, p_queue text, p_lease_s double precision, p_claim integer, p_obey boolean, p_promote boolean, p_newest boolean, p_done jsonb) RETURNS SETOF json
    LANGUAGE plpgsql
    AS $$
DECLARE
    v_done record;
    v_job  json;
BEGIN
    FOR v_done IN
        SELECT * FROM jsonb_to_recordset(p_done) AS d (
            id text, claim_no bigint, result jsonb, seconds float8, rss_mb integer, received jsonb,
            generation integer, rows jsonb, complete boolean)
    LOOP
        PERFORM queue_workflows_node_step(
            p_worker, p_host, p_queue, p_lease_s, false, p_obey, false, p_newest, NULL, NULL, NULL,
            v_done.id, v_done.claim_no, v_done.result, v_done.seconds, v_done.rss_mb, v_done.received,
            v_done.generation, v_done.rows, v_done.complete);
    END LOOP;
    FOR v_number IN 1 .. p_claim LOOP
        v_job := queue_workflows_node_step(
            p_worker, p_host, p_queue, p_lease_s, true, p_obey, p_promote AND v_number = 1, p_newest,
            NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
        EXIT WHEN v_job IS NULL;
        RETURN NEXT v_job;
    END LOOP;
END $$;

CREATE FUNCTION public.queue_workflows_note_starts(p_queue text, p_starts integer) RETURNS void
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    AS $$
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

CREATE FUNCTION public.queue_workflows_number_model_request() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    NEW.request_no := nextval('model_controls_request_seq');
    -- Not now(): the request also concerns a worker that reported while this transaction was open.
    NEW.requested_at := clock_timestamp();
    PERFORM pg_notify('worker_control', NEW.host_label || ':gpu');
    RETURN NEW;
END $$;

CREATE FUNCTION public.queue_workflows_off_policy(p_host text, p_queue text) RETURNS text
    LANGUAGE sql STABLE
    AS $$
    SELECT stop_policy FROM worker_controls
     WHERE host_label = p_host AND queue IN (p_queue, 'all') AND queue_workflows_is_off(desired_state, until_at)
     ORDER BY stop_policy <> 'hard', queue = 'all' LIMIT 1
$$;

CREATE FUNCTION public.queue_workflows_partitions(p_queue text, p_in_line boolean) RETURNS TABLE(queue text, partition_key text)
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    AS $$
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

CREATE FUNCTION public.queue_workflows_past_lines(p_queue text, OUT held boolean, OUT id text) RETURNS record
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
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

CREATE FUNCTION public.queue_workflows_pick_gpu(p_worker text, p_host text, p_model text, p_models text[], p_newest boolean, p_policy text, p_grace_s double precision, p_bound_s double precision) RETURNS text
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
DECLARE
    v_vram   integer;
    v_told   boolean;
    v_models text[];
    v_band   smallint;
    v_choice text;
    v_seq    bigint;
    v_how    text;
    v_id     text;
BEGIN
    SELECT w.vram_total_mb INTO v_vram FROM workers w WHERE w.worker_id = p_worker;
    v_told := FOUND;
    IF p_policy <> 'balanced' AND p_models IS NULL AND v_vram IS NULL
       AND NOT (v_told AND EXISTS (SELECT FROM queue_workflows_gpu_live() l
                                    WHERE l.known_models IS NOT NULL)) THEN
        SELECT j.priority INTO v_band FROM workflow_node_jobs j
         WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
           AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                       AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
         ORDER BY j.priority, j.seq LIMIT 1;
        IF v_band IS NULL THEN
            RETURN NULL;
        END IF;
        IF p_model IS NOT NULL AND p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND (j.required_model, j.priority) >= (p_model, v_band)
               AND (j.required_model, j.priority) <= (p_model, v_band)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
             ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        ELSIF p_model IS NOT NULL THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND (j.required_model, j.priority) >= (p_model, v_band)
               AND (j.required_model, j.priority) <= (p_model, v_band)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
             ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        ELSIF p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND j.required_model IS NULL AND j.priority BETWEEN v_band AND v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
             ORDER BY j.required_model DESC, j.priority DESC, j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        ELSE
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND j.required_model IS NULL AND j.priority BETWEEN v_band AND v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
             ORDER BY j.required_model, j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NULL AND p_newest THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND j.priority = v_band
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
             ORDER BY j.seq DESC LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        IF v_id IS NULL THEN
            SELECT j.id INTO v_id FROM workflow_node_jobs j
             WHERE j.queue = 'gpu' AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND EXISTS (SELECT FROM workflow_runs r WHERE r.id = j.run_id
                           AND NOT queue_workflows_is_terminal_run(r.status) OFFSET 0)
             ORDER BY j.priority, j.seq LIMIT 1 FOR UPDATE OF j SKIP LOCKED;
        END IF;
        RETURN v_id;
    END IF;

    -- A caller without a row in `workers` and without models takes any model.
    v_models := array_append(CASE WHEN p_models IS NULL AND NOT v_told
                                  THEN ARRAY(SELECT queue_workflows_gpu_queued())
                                  ELSE queue_workflows_gpu_can(p_host, p_models, v_vram) END, '');
    WHILE cardinality(v_models) > 0 LOOP
        SELECT n.model, n.how, n.band, n.seq INTO v_choice, v_how, v_band, v_seq
          FROM queue_workflows_gpu_next(
                   p_worker, p_host, p_model, v_models, p_newest, p_policy, p_grace_s, p_bound_s) n;
        IF v_choice IS NULL THEN
            RETURN NULL;
        END IF;
        v_id := queue_workflows_gpu_take(v_choice, v_how, v_band, v_seq);
        IF v_id IS NULL AND v_how = 'newest' THEN
            v_id := queue_workflows_gpu_take(v_choice, 'first', NULL, NULL);
        END IF;
        IF v_id IS NOT NULL THEN
            RETURN v_id;
        END IF;
        -- Other transactions have locked all jobs of this model.
        v_models := array_remove(v_models, v_choice);
    END LOOP;
    RETURN NULL;
END $$;

CREATE FUNCTION public.queue_workflows_put_jobs(p_prefix text, p_jobs jsonb) RETURNS TABLE(place bigint, id text, same boolean)
    LANGUAGE plpgsql SECURITY DEFINER
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    SET search_path TO 'public', 'pg_temp'
    AS $_$
#variable_conflict use_column
DECLARE
    v_seq    regclass := pg_get_serial_sequence('ingest_jobs', 'seq');
    v_places bigint[];
    v_ids    text[];
    v_same   boolean[];
    v_lost   bigint;
BEGIN
    -- It runs as its owner, which sets seq; the caller must have the right to insert.
    PERFORM queue_workflows_demand('INSERT', 'ingest_jobs', 'args');
    FOR v_try IN 1..10 LOOP
        INSERT INTO ingest_jobs
               (id, seq, task_name, queue, reason, priority, args, idempotency_key, idempotency_window_s,
                lock_key, partition_key, available_at, max_attempts, timeout_s, policy, headers)
        SELECT n.id, n.seq, n.task_name, n.queue, coalesce(n.reason, 'tick'), coalesce(n.priority, 100),
               coalesce(n.args, '{}'), n.idempotency_key, n.idempotency_window_s, n.lock_key,
               n.partition_key, n.available_at, coalesce(n.max_attempts, 1), n.timeout_s, n.policy,
               n.headers
          FROM (SELECT p_prefix || lpad(to_hex(g.ordinality), 12, '0') AS id, nextval(v_seq) AS seq, g.*
                  FROM ROWS FROM (jsonb_to_recordset(p_jobs) AS (
                       task_name text, queue text, reason text, priority smallint, args jsonb,
                       idempotency_key text, idempotency_window_s double precision, lock_key text,
                       partition_key text, available_at timestamptz, max_attempts integer,
                       timeout_s double precision, policy jsonb, headers jsonb)) WITH ORDINALITY AS g
                 WHERE v_try = 1 OR g.idempotency_key IS NOT NULL AND NOT EXISTS (
                       SELECT FROM ingest_jobs o
                        WHERE o.idempotency_key = g.idempotency_key AND NOT o.idempotency_released)) n
         ORDER BY n.idempotency_key
            ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL AND NOT idempotency_released
            DO NOTHING;
        IF v_try = 1 AND NOT jsonb_path_exists(p_jobs, '$[*].idempotency_key') THEN
            RETURN;
        END IF;
        SELECT array_agg(g.ordinality) FILTER (WHERE o.id <> m.id),
               array_agg(o.id) FILTER (WHERE o.id <> m.id),
               array_agg(o.task_name = g.task_name AND o.queue = g.queue
                         AND o.args = coalesce(g.args, '{}')) FILTER (WHERE o.id <> m.id),
               count(*) FILTER (WHERE o.id IS NULL)
          INTO v_places, v_ids, v_same, v_lost
          FROM ROWS FROM (jsonb_to_recordset(p_jobs) AS (
               task_name text, queue text, args jsonb, idempotency_key text)) WITH ORDINALITY AS g
          CROSS JOIN LATERAL (SELECT p_prefix || lpad(to_hex(g.ordinality), 12, '0')) AS m (id)
          LEFT JOIN LATERAL (
               SELECT i.id, i.task_name, i.queue, i.args FROM ingest_jobs i
                WHERE i.idempotency_key = g.idempotency_key AND NOT i.idempotency_released LIMIT 1) o ON true
         WHERE g.idempotency_key IS NOT NULL;
        IF v_lost = 0 THEN
            RETURN QUERY SELECT * FROM unnest(v_places, v_ids, v_same);
            RETURN;
        END IF;
        -- The job that had such a key has lost it since: try again.
    END LOOP;
    RAISE EXCEPTION 'idempotency keys change hands too fast' USING ERRCODE = 'serialization_failure';
END $_$;

CREATE FUNCTION public.queue_workflows_put_sample(host text, every integer, taken jsonb, tell boolean) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    -- The commit need not wait for the disk: the next sample replaces a lost one.
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO hw_samples (host_label, every_s, slot, sampled_at, sample)
    SELECT host, every,
           floor(extract(epoch FROM now()) / every)::bigint % CASE every WHEN 2 THEN 1800 ELSE 1440 END,
           now(), taken
     WHERE every IS NOT NULL
    ON CONFLICT (host_label, every_s, slot)
    DO UPDATE SET sampled_at = excluded.sampled_at, sample = excluded.sample;
    IF tell THEN
        PERFORM pg_notify('hw_metrics', (jsonb_build_object('host', host, 'sampled_at',
            to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"+00:00"')) || taken)::text);
    END IF;
END $$;

CREATE FUNCTION public.queue_workflows_queue_room(p_queue text, p_wanted integer, OUT room integer, OUT wait_s double precision) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    SET search_path TO 'public', 'pg_temp'
    AS $$
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

CREATE FUNCTION public.queue_workflows_queue_set() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
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

CREATE FUNCTION public.queue_workflows_rate_room(p_limit integer, p_period_s double precision, p_wanted integer, p_starts timestamp with time zone[], OUT room integer, OUT due_at timestamp with time zone) RETURNS record
    LANGUAGE plpgsql STABLE
    AS $$
BEGIN
    -- A period that an older version stored out of range must not overflow an interval.
    p_period_s := least(greatest(p_period_s, 0), 31622400);
    room := least(p_wanted, p_limit);
    SELECT least(room, min(s.place) - 1), min(s.at) + p_period_s * interval '1 second' INTO room, due_at
      FROM unnest(p_starts) WITH ORDINALITY AS s (at, place)
     WHERE s.at > now() - p_period_s * interval '1 second';
END $$;

CREATE FUNCTION public.queue_workflows_record(job public.ingest_jobs, event text, host text DEFAULT NULL::text, worker text DEFAULT NULL::text, seconds double precision DEFAULT NULL::double precision, error text DEFAULT NULL::text, detail jsonb DEFAULT NULL::jsonb) RETURNS public.ingest_jobs
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO ingest_job_events
           (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, error, detail, actor)
    VALUES (job.id, job.attempts, event, job.claim_no, worker, coalesce(job.claimed_by, host), job.queue, seconds,
            coalesce(error, job.error), coalesce(detail, '{}'),
            CASE WHEN worker IS NULL THEN queue_workflows_actor() END);
    RETURN job;
END $$;

CREATE FUNCTION public.queue_workflows_record(job public.workflow_node_jobs, event text, host text DEFAULT NULL::text, worker text DEFAULT NULL::text, seconds double precision DEFAULT NULL::double precision, error text DEFAULT NULL::text, detail jsonb DEFAULT NULL::jsonb) RETURNS public.workflow_node_jobs
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION public.queue_workflows_refuse(p_table text, p_old jsonb, p_new jsonb) RETURNS void
    LANGUAGE plpgsql
    SET "TimeZone" TO 'UTC'
    AS $_$
DECLARE
    c_counters CONSTANT jsonb := '{"claim_no": 1000000000, "seq": 1000000000000000, "attempts": 1000000,
        "max_attempts": 1000000, "crash_count": 1000000, "watchdog_retries": 1000000, "generation": 1000000,
        "start_attempts": 1000000, "resume_count": 30000}';
    c_texts    CONSTANT jsonb := '{"reason": 8000, "out_dir": 4096, "status": 200, "mode": 200, "queue": 200}';
    c_names    CONSTANT text[] := '{id, run_id, node_id, task_name, node_module, pipeline_name, workflow_name,
        parcel_id, required_model, lock_key, partition_key, idempotency_key, worker_id, claimed_by, host_label}';
    v_column   text;
    v_value    text;
    v_was      text;
    v_at       timestamptz;
    v_wanted   text;
BEGIN
    FOR v_column, v_value IN SELECT key, value FROM jsonb_each_text(p_new) LOOP
        v_was := p_old ->> v_column;
        v_wanted := NULL;
        IF v_value IS NULL OR v_value = v_was THEN
            CONTINUE;
        ELSIF c_counters ? v_column THEN
            IF v_value::numeric NOT BETWEEN (v_column = 'seq')::integer AND (c_counters -> v_column)::numeric
               AND (v_was IS NULL OR v_value::numeric <> v_was::numeric + 1) THEN
                v_wanted := (v_column = 'seq')::integer || ' to ' || (c_counters ->> v_column);
            END IF;
        ELSIF v_column IN ('timeout_s', 'idempotency_window_s') THEN
            IF v_value::float8 > 31622400 OR v_value::float8 < 0
               OR v_column = 'timeout_s' AND v_value::float8 = 0 THEN
                v_wanted := CASE v_column WHEN 'timeout_s' THEN 'above 0 and' ELSE '0 or more and' END
                            || ' at most 31622400 seconds (366 days)';
            END IF;
        ELSIF v_column IN ('seconds', 'progress_pct') THEN
            IF v_value::float8 NOT BETWEEN -1e12 AND 1e12 THEN
                v_wanted := 'between -1e12 and 1e12';
            END IF;
        ELSIF v_column = ANY (c_names) OR c_texts ? v_column THEN
            IF octet_length(v_value) > coalesce((c_texts -> v_column)::integer, 1000) THEN
                v_wanted := format('at most %s bytes', coalesce((c_texts -> v_column)::integer, 1000));
                v_value := left(v_value, 40) || '...';
            END IF;
        ELSIF v_column ~ '_at$' THEN
            BEGIN
                v_at := v_value;
            EXCEPTION WHEN data_exception THEN
                v_at := 'infinity';
            END;
            IF v_at NOT BETWEEN '2000-01-01+00' AND '9999-12-31+00' THEN
                v_wanted := 'in the years 2000 to 9999';
            END IF;
        END IF;
        IF v_wanted IS NOT NULL THEN
            RAISE EXCEPTION '%.% must be %, not %', p_table, v_column, v_wanted, v_value
                USING ERRCODE = 'check_violation', TABLE = p_table, COLUMN = v_column;
        END IF;
    END LOOP;
END $_$;

CREATE FUNCTION public.queue_workflows_release_key(p_key text) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
BEGIN
    UPDATE ingest_jobs j SET idempotency_released = true
     WHERE j.idempotency_key = p_key AND NOT j.idempotency_released
       AND queue_workflows_is_terminal_job(j.status)
       -- At most 366 days, whatever a plain UPDATE stored.
       AND j.created_at <= now() - least(greatest(coalesce(j.idempotency_window_s, 86400), 0), 31622400)
           * interval '1 second';
END $$;

CREATE FUNCTION public.queue_workflows_reopen_ingest() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    IF NEW.idempotency_released AND NEW.idempotency_key IS NOT NULL
       AND NEW.generation > OLD.generation AND NEW.status = 'queued' THEN
        PERFORM queue_workflows_release_key(NEW.idempotency_key);
        NEW.idempotency_released := false;
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION public.queue_workflows_served_queues(p_stale_s double precision) RETURNS text[]
    LANGUAGE sql STABLE
    SET search_path TO 'public', 'pg_temp'
    AS $$
    SELECT coalesce(array_agg(q.queue ORDER BY q.queue), '{}') FROM (
        SELECT w.queue::text FROM workers w
         WHERE w.state NOT IN ('stopped', 'dead', 'parked', 'paused')
           AND w.last_seen > now() - p_stale_s * interval '1 second'
        UNION
        SELECT b.queue::text FROM worker_heartbeats b
         WHERE b.last_seen > now() - p_stale_s * interval '1 second'
           AND NOT EXISTS (SELECT FROM workers w WHERE w.host_label = b.host_label AND w.queue = b.queue)) q
     WHERE NOT EXISTS (
           SELECT FROM queue_settings s
            WHERE s.queue = q.queue AND queue_workflows_is_paused(s.paused_at, s.paused_until))
$$;

CREATE FUNCTION public.queue_workflows_set_aside(p_jobs text, p_id text, p_error text, p_worker text DEFAULT NULL::text, p_claim_no bigint DEFAULT NULL::bigint) RETURNS text
    LANGUAGE plpgsql
    AS $_$
DECLARE
    c_this CONSTANT text := ' WHERE id = $1 AND CASE WHEN $2::text IS NULL THEN status = ''queued'''
                            ' ELSE status = ''running'' AND worker_id = $2 AND claim_no = $3 END';
    v_node   workflow_node_jobs;
    v_ingest ingest_jobs;
    v_count  bigint;
    v_state  text;
BEGIN
    BEGIN
        IF p_jobs = 'workflow_node_jobs' THEN
            EXECUTE 'UPDATE workflow_node_jobs SET status = ''failed'', error = $4, finished_at = now(),'
                    ' blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL' || c_this || ' RETURNING *'
               INTO v_node USING p_id, p_worker, p_claim_no, p_error;
            IF v_node.id IS NULL THEN
                RETURN NULL;
            END IF;
            INSERT INTO workflow_dispatch_events (run_id, node_id, kind, job_id, claim_no, generation)
            VALUES (v_node.run_id, v_node.node_id, 'failed', p_id, v_node.claim_no, v_node.generation);
            INSERT INTO workflow_node_events
                   (run_id, node_id, job_id, attempt, event_type, host_label, queue, model, worker_id, claim_no,
                    error, detail)
            VALUES (v_node.run_id, v_node.node_id, p_id, greatest(0, least(v_node.attempts, 32767)), 'failed', v_node.claimed_by,
                    v_node.queue, v_node.required_model, p_worker, v_node.claim_no, p_error,
                    '{"by": "database"}');
        ELSE
            EXECUTE 'UPDATE ingest_jobs SET status = ''failed'', error = $4, finished_at = now(),'
                    ' blocked_reason = NULL, worker_id = NULL, lease_expires_at = NULL' || c_this || ' RETURNING *'
               INTO v_ingest USING p_id, p_worker, p_claim_no, p_error;
            IF v_ingest.id IS NULL THEN
                RETURN NULL;
            END IF;
            IF p_worker IS NOT NULL THEN  -- a trigger records the end of a queued job
                INSERT INTO ingest_job_events
                       (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, error, detail)
                VALUES (p_id, v_ingest.attempts, 'failed', v_ingest.claim_no, p_worker, v_ingest.claimed_by,
                        v_ingest.queue, p_error, '{"by": "database"}');
            END IF;
        END IF;
        RETURN 'failed';
    EXCEPTION WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS v_state = RETURNED_SQLSTATE;
        IF queue_workflows_is_systemic(v_state) THEN
            RAISE;
        END IF;
    END;
    BEGIN
        EXECUTE format('UPDATE %I SET status = ''queued'', blocked_reason = ''set_aside'', available_at = NULL,'
                       ' worker_id = NULL, lease_expires_at = NULL', p_jobs) || c_this
          USING p_id, p_worker, p_claim_no;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        RETURN CASE WHEN v_count > 0 THEN 'set_aside' END;
    EXCEPTION WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS v_state = RETURNED_SQLSTATE;
        IF queue_workflows_is_systemic(v_state) THEN
            RAISE;
        END IF;
    END;
    RETURN NULL;
END $_$;

CREATE FUNCTION public.queue_workflows_set_blocked(p_jobs text, p_ids text[], p_reason text) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET search_path TO 'public', 'pg_temp'
    AS $_$
DECLARE
    v_id    text;
    v_count bigint := 0;
BEGIN
    -- A job that has no lock key any more is claimable at once.
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
END $_$;

CREATE FUNCTION public.queue_workflows_start_run(p_run text, p_generation integer, p_born bigint, p_definition jsonb, p_hash text, p_rows jsonb, p_out_dir text) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $$
BEGIN
    PERFORM FROM workflow_runs r
      WHERE r.id = p_run AND r.status = 'queued' AND r.mode = 'node' AND r.generation = p_generation
        AND queue_workflows_born(r.created_at) = p_born AND r.definition IS NULL
        FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND OR EXISTS (SELECT FROM workflow_node_jobs WHERE run_id = p_run) THEN
        RETURN NULL;
    END IF;
    UPDATE workflow_runs
       SET definition = p_definition, definition_hash = p_hash, status = 'running',
           out_dir = coalesce(out_dir, p_out_dir),
           started_at = coalesce(started_at, now()), error = NULL, available_at = NULL, updated_at = now()
     WHERE id = p_run;
    RETURN queue_workflows_insert_nodes(p_run, p_rows);
END $$;

CREATE FUNCTION public.queue_workflows_take_turns() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
DECLARE
    v_asked partition_turns[];
    v_one   partition_turns;
    v_turn  record;
BEGIN
    WITH mine AS (
        UPDATE partition_turns SET admits = true WHERE xid = pg_current_xact_id() AND NOT admits RETURNING *)
    SELECT array_agg(mine::partition_turns) INTO v_asked FROM mine;
    IF v_asked IS NOT NULL AND current_setting('transaction_isolation') <> 'read committed' THEN
        -- This snapshot lacks jobs that were admitted meanwhile: leave the check to the next claim.
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
            -- A waiting row that cannot be written must not fail the commit of another job's transaction.
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
        PERFORM queue_workflows_lock_keys(v_turn.jobs, v_turn.keys);
        BEGIN
            PERFORM queue_workflows_give_turns(v_turn.jobs, v_turn.keys);
        EXCEPTION WHEN unique_violation THEN
            -- This snapshot is older than an admission: queue_workflows_mend_turns checks the key later.
            NULL;
        WHEN OTHERS THEN
            -- A waiting row that cannot be written must not fail the commit of another job's transaction.
            PERFORM queue_workflows_give_turns_singly(v_turn.jobs, v_turn.keys);
        END;
        DELETE FROM lock_turns WHERE id = ANY (v_turn.notes);
    END LOOP;
    RETURN NULL;
END $$;

CREATE FUNCTION public.queue_workflows_unblock_served(p_jobs text, p_served text[], p_limit integer) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET enable_incremental_sort TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET search_path TO 'public', 'pg_temp'
    AS $_$
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
END $_$;

CREATE TABLE public.gpu_models (
    model text NOT NULL,
    host_label text NOT NULL,
    est_vram_gb double precision,
    load_s public.queue_workflows_seconds,
    loads bigint DEFAULT 0 NOT NULL,
    run_s public.queue_workflows_seconds,
    runs bigint DEFAULT 0 NOT NULL,
    updated_at public.queue_workflows_time DEFAULT now() NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE public.gpu_unassignable (
    model text NOT NULL,
    reason text NOT NULL,
    detail text NOT NULL,
    since public.queue_workflows_time DEFAULT now() NOT NULL
);

CREATE TABLE public.hw_samples (
    host_label text NOT NULL,
    every_s smallint NOT NULL,
    slot smallint NOT NULL,
    sampled_at public.queue_workflows_time DEFAULT now() NOT NULL,
    sample jsonb NOT NULL,
    CONSTRAINT hw_samples_every_check CHECK ((every_s = ANY (ARRAY[2, 60])))
)
WITH (fillfactor='50');

CREATE TABLE public.ingest_job_events (
    id bigint NOT NULL,
    job_id text NOT NULL,
    attempt integer DEFAULT 0 NOT NULL,
    event_type text NOT NULL,
    claim_no bigint,
    worker_id text,
    host_label text,
    queue text,
    elapsed_s double precision,
    error text,
    detail jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    actor text
);

CREATE SEQUENCE public.ingest_job_events_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.ingest_job_events_id_seq OWNED BY public.ingest_job_events.id;

CREATE SEQUENCE public.ingest_jobs_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.ingest_jobs_seq_seq OWNED BY public.ingest_jobs.seq;

CREATE TABLE public.job_attempt_logs (
    job_table text NOT NULL,
    job_id text NOT NULL,
    claim_no bigint NOT NULL,
    head text DEFAULT ''::text NOT NULL,
    tail text DEFAULT ''::text NOT NULL,
    cut_bytes bigint DEFAULT 0 NOT NULL,
    created_at public.queue_workflows_time DEFAULT now() NOT NULL,
    updated_at public.queue_workflows_time DEFAULT now() NOT NULL
);

CREATE UNLOGGED TABLE public.lock_turns (
    id bigint NOT NULL,
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    jobs text NOT NULL,
    lock_key text NOT NULL,
    admits boolean DEFAULT false NOT NULL
);

CREATE UNLOGGED SEQUENCE public.lock_turns_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.lock_turns_id_seq OWNED BY public.lock_turns.id;

CREATE TABLE public.model_controls (
    host_label text NOT NULL,
    worker_id text DEFAULT ''::text NOT NULL,
    action text NOT NULL,
    model text,
    requested_by text,
    request_no bigint DEFAULT 0 NOT NULL,
    requested_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT model_controls_action_check CHECK ((action = ANY (ARRAY['load'::text, 'unload'::text]))),
    CONSTRAINT model_controls_model_check CHECK (((model IS NOT NULL) OR (action = 'unload'::text)))
);

CREATE SEQUENCE public.model_controls_request_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.model_controls_request_seq OWNED BY public.model_controls.request_no;

CREATE TABLE public.partition_dues (
    id bigint NOT NULL,
    queue text NOT NULL,
    partition_key text NOT NULL,
    due_at public.queue_workflows_due NOT NULL
);

CREATE SEQUENCE public.partition_dues_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.partition_dues_id_seq OWNED BY public.partition_dues.id;

CREATE TABLE public.partition_starts (
    queue text NOT NULL,
    partition_key text NOT NULL,
    n public.queue_workflows_number NOT NULL,
    started_at public.queue_workflows_time NOT NULL
);

CREATE UNLOGGED TABLE public.partition_turns (
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    queue text NOT NULL,
    partition_key text NOT NULL,
    starts integer DEFAULT 0 NOT NULL,
    admits boolean DEFAULT false NOT NULL
);

CREATE TABLE public.queue_partitions (
    queue text NOT NULL,
    partition_key text NOT NULL,
    paused_at public.queue_workflows_time,
    paused_until public.queue_workflows_time,
    paused_by text,
    max_running integer,
    rate_limit integer,
    rate_period_s public.queue_workflows_period_s,
    updated_at public.queue_workflows_time DEFAULT now() NOT NULL,
    CONSTRAINT queue_partitions_max_running_check CHECK ((max_running > 0)),
    CONSTRAINT queue_partitions_queue_check CHECK ((queue <> ''::text)),
    CONSTRAINT queue_partitions_rate_check CHECK (((rate_limit IS NULL) = (rate_period_s IS NULL))),
    CONSTRAINT queue_partitions_rate_limit_check CHECK ((rate_limit > 0)),
    CONSTRAINT queue_partitions_rate_period_s_check CHECK (((rate_period_s)::double precision > (0)::double precision))
);

CREATE TABLE public.queue_settings (
    queue text NOT NULL,
    retention_days double precision,
    updated_at public.queue_workflows_time DEFAULT now() NOT NULL,
    paused_at public.queue_workflows_time,
    paused_until public.queue_workflows_time,
    paused_by text,
    max_running integer,
    rate_limit integer,
    rate_period_s public.queue_workflows_period_s,
    partition_max_running integer,
    partition_rate_limit integer,
    partition_rate_period_s public.queue_workflows_period_s,
    CONSTRAINT queue_settings_max_running_check CHECK ((max_running > 0)),
    CONSTRAINT queue_settings_partition_max_running_check CHECK ((partition_max_running > 0)),
    CONSTRAINT queue_settings_partition_rate_limit_check CHECK ((partition_rate_limit > 0)),
    CONSTRAINT queue_settings_partition_rate_period_s_check CHECK (((partition_rate_period_s)::double precision > (0)::double precision)),
    CONSTRAINT queue_settings_queue_check CHECK ((queue <> ''::text)),
    CONSTRAINT queue_settings_rate_limit_check CHECK ((rate_limit > 0)),
    CONSTRAINT queue_settings_rate_period_s_check CHECK (((rate_period_s)::double precision > (0)::double precision)),
    CONSTRAINT queue_settings_rates_check CHECK ((((rate_limit IS NULL) = (rate_period_s IS NULL)) AND ((partition_rate_limit IS NULL) = (partition_rate_period_s IS NULL)))),
    CONSTRAINT queue_settings_retention_days_check CHECK ((retention_days >= (0)::double precision))
);

CREATE VIEW public.queue_partition_limits AS
 SELECT queue
   FROM public.queue_settings s
  WHERE partition_max_running IS NOT NULL OR partition_rate_limit IS NOT NULL OR EXISTS  SELECT
           FROM public.queue_partitions p
          WHERE queue = queue;

CREATE TABLE public.queue_schema_objects (
    part text NOT NULL,
    checksum text NOT NULL,
    package_version text NOT NULL,
    objects jsonb NOT NULL,
    installed_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE public.queue_schema_version (
    version integer NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL,
    checksum text,
    compatible_with integer DEFAULT 0 NOT NULL
);

CREATE TABLE public.queue_starts (
    queue text NOT NULL,
    n public.queue_workflows_number NOT NULL,
    started_at public.queue_workflows_time NOT NULL
);

CREATE TABLE public.schedule_fires (
    name text NOT NULL,
    fire_at public.queue_workflows_time NOT NULL,
    job_id text,
    created_at public.queue_workflows_time DEFAULT now() NOT NULL
);

CREATE TABLE public.worker_controls (
    host_label text NOT NULL,
    queue text NOT NULL,
    desired_state text DEFAULT 'on'::text NOT NULL,
    stop_policy text DEFAULT 'hard'::text NOT NULL,
    requested_by text,
    updated_at public.queue_workflows_time DEFAULT now() NOT NULL,
    reason text,
    until_at public.queue_workflows_time,
    CONSTRAINT worker_controls_desired_state_check CHECK ((desired_state = ANY (ARRAY['on'::text, 'off'::text])))
);

CREATE TABLE public.worker_heartbeats (
    host_label text NOT NULL,
    queue text NOT NULL,
    concurrency integer DEFAULT 1 NOT NULL,
    current_model text,
    known_models text[] DEFAULT '{}'::text[] NOT NULL,
    last_seen public.queue_workflows_time DEFAULT now() NOT NULL,
    last_flagged_dead_at public.queue_workflows_time,
    vram_total_mb integer,
    detail jsonb DEFAULT '{}'::jsonb NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE public.workers (
    worker_id text NOT NULL,
    host_label text NOT NULL,
    queue text NOT NULL,
    pid integer NOT NULL,
    state text DEFAULT 'idle'::text NOT NULL,
    job_ids text[] DEFAULT '{}'::text[] NOT NULL,
    detail jsonb DEFAULT '{}'::jsonb NOT NULL,
    started_at public.queue_workflows_time DEFAULT now() NOT NULL,
    last_seen public.queue_workflows_time DEFAULT now() NOT NULL,
    current_model text,
    model_since public.queue_workflows_time,
    known_models text[],
    vram_total_mb integer,
    CONSTRAINT workers_state_check CHECK ((state = ANY (ARRAY['idle'::text, 'busy'::text, 'parked'::text, 'draining'::text, 'paused'::text, 'throttled'::text, 'stopped'::text, 'dead'::text])))
)
WITH (fillfactor='50');

CREATE TABLE public.workflow_dispatch_events (
    id bigint NOT NULL,
    run_id text NOT NULL,
    node_id text NOT NULL,
    kind text NOT NULL,
    processed_at public.queue_workflows_time,
    error text,
    attempts public.queue_workflows_tries DEFAULT 0 NOT NULL,
    created_at public.queue_workflows_time DEFAULT now() NOT NULL,
    job_id text,
    claim_no bigint,
    generation integer DEFAULT 0 NOT NULL,
    available_at public.queue_workflows_time,
    CONSTRAINT workflow_dispatch_events_kind_check CHECK ((kind = ANY (ARRAY['completed'::text, 'failed'::text, 'awaiting_input'::text])))
);

CREATE SEQUENCE public.workflow_dispatch_events_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.workflow_dispatch_events_id_seq OWNED BY public.workflow_dispatch_events.id;

CREATE TABLE public.workflow_input_submissions (
    id text DEFAULT (gen_random_uuid())::text NOT NULL,
    run_id text NOT NULL,
    node_id text NOT NULL,
    value jsonb,
    status text DEFAULT 'pending'::text NOT NULL,
    error text,
    claimed_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    processed_at timestamp with time zone,
    attempts integer DEFAULT 0 NOT NULL,
    available_at timestamp with time zone,
    CONSTRAINT workflow_input_submissions_status_check CHECK ((status = ANY (ARRAY['pending'::text, 'processing'::text, 'processed'::text, 'failed'::text])))
);

CREATE TABLE public.workflow_input_timeouts (
    job_id text NOT NULL,
    claim_no bigint NOT NULL,
    due_at public.queue_workflows_time NOT NULL
);

CREATE TABLE public.workflow_node_events (
    id bigint NOT NULL,
    run_id text NOT NULL,
    node_id text NOT NULL,
    job_id text,
    attempt smallint DEFAULT 0 NOT NULL,
    event_type public.queue_workflows_node_event NOT NULL,
    host_label text,
    queue text,
    model text,
    elapsed_s double precision,
    error text,
    detail jsonb DEFAULT '{}'::jsonb NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    worker_id text,
    claim_no bigint
);

CREATE SEQUENCE public.workflow_node_events_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.workflow_node_events_id_seq OWNED BY public.workflow_node_events.id;

CREATE SEQUENCE public.workflow_node_jobs_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.workflow_node_jobs_seq_seq OWNED BY public.workflow_node_jobs.seq;

CREATE TABLE public.workflow_run_files (
    id bigint NOT NULL,
    run_id text NOT NULL,
    step_id text,
    rel_path text NOT NULL,
    kind text,
    size_bytes bigint,
    is_primary boolean DEFAULT false NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE SEQUENCE public.workflow_run_files_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.workflow_run_files_id_seq OWNED BY public.workflow_run_files.id;

CREATE TABLE public.workflow_runs (
    id text DEFAULT (gen_random_uuid())::text NOT NULL,
    parcel_id text,
    workflow_name text NOT NULL,
    status text DEFAULT 'queued'::text NOT NULL,
    priority smallint DEFAULT 100 NOT NULL,
    current_step_id text,
    progress_pct real DEFAULT 0 NOT NULL,
    steps_done jsonb DEFAULT '[]'::jsonb NOT NULL,
    context jsonb DEFAULT '{}'::jsonb NOT NULL,
    input_spec jsonb,
    error text,
    out_dir text,
    mode text DEFAULT 'node'::text NOT NULL,
    resume_count smallint DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    queued_at timestamp with time zone DEFAULT now(),
    started_at timestamp with time zone,
    finished_at timestamp with time zone,
    definition jsonb,
    definition_hash text,
    generation integer DEFAULT 0 NOT NULL,
    start_attempts integer DEFAULT 0 NOT NULL,
    available_at timestamp with time zone,
    CONSTRAINT workflow_runs_mode_check CHECK ((mode = ANY (ARRAY['step'::text, 'node'::text])))
);

ALTER TABLE ONLY public.ingest_job_events ALTER COLUMN id SET DEFAULT nextval('public.ingest_job_events_id_seq'::regclass);

ALTER TABLE ONLY public.ingest_jobs ALTER COLUMN seq SET DEFAULT nextval('public.ingest_jobs_seq_seq'::regclass);

ALTER TABLE ONLY public.lock_turns ALTER COLUMN id SET DEFAULT nextval('public.lock_turns_id_seq'::regclass);

ALTER TABLE ONLY public.partition_dues ALTER COLUMN id SET DEFAULT nextval('public.partition_dues_id_seq'::regclass);

ALTER TABLE ONLY public.workflow_dispatch_events ALTER COLUMN id SET DEFAULT nextval('public.workflow_dispatch_events_id_seq'::regclass);

ALTER TABLE ONLY public.workflow_node_events ALTER COLUMN id SET DEFAULT nextval('public.workflow_node_events_id_seq'::regclass);

ALTER TABLE ONLY public.workflow_node_jobs ALTER COLUMN seq SET DEFAULT nextval('public.workflow_node_jobs_seq_seq'::regclass);

ALTER TABLE ONLY public.workflow_run_files ALTER COLUMN id SET DEFAULT nextval('public.workflow_run_files_id_seq'::regclass);

ALTER TABLE ONLY public.gpu_models
    ADD CONSTRAINT gpu_models_pkey PRIMARY KEY (model, host_label);

ALTER TABLE public.gpu_models
    ADD CONSTRAINT gpu_models_size_bound CHECK (((est_vram_gb >= ('-1000000000'::numeric)::double precision) AND (est_vram_gb <= ('1000000000'::numeric)::double precision))) NOT VALID;

ALTER TABLE ONLY public.gpu_unassignable
    ADD CONSTRAINT gpu_unassignable_pkey PRIMARY KEY (model);

ALTER TABLE ONLY public.hw_samples
    ADD CONSTRAINT hw_samples_pkey PRIMARY KEY (host_label, every_s, slot);

ALTER TABLE ONLY public.ingest_job_events
    ADD CONSTRAINT ingest_job_events_pkey PRIMARY KEY (job_id, id);

ALTER TABLE ONLY public.ingest_jobs
    ADD CONSTRAINT ingest_jobs_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.job_attempt_logs
    ADD CONSTRAINT job_attempt_logs_pkey PRIMARY KEY (job_id, claim_no, job_table);

ALTER TABLE ONLY public.lock_turns
    ADD CONSTRAINT lock_turns_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.model_controls
    ADD CONSTRAINT model_controls_pkey PRIMARY KEY (host_label, worker_id);

ALTER TABLE ONLY public.partition_dues
    ADD CONSTRAINT partition_dues_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.partition_starts
    ADD CONSTRAINT partition_starts_pkey PRIMARY KEY (queue, partition_key, n);

ALTER TABLE ONLY public.partition_turns
    ADD CONSTRAINT partition_turns_pkey PRIMARY KEY (xid, queue, partition_key, admits);

ALTER TABLE ONLY public.queue_partitions
    ADD CONSTRAINT queue_partitions_pkey PRIMARY KEY (queue, partition_key);

ALTER TABLE ONLY public.queue_schema_objects
    ADD CONSTRAINT queue_schema_objects_pkey PRIMARY KEY (part);

ALTER TABLE ONLY public.queue_schema_version
    ADD CONSTRAINT queue_schema_version_pkey PRIMARY KEY (version);

ALTER TABLE ONLY public.queue_settings
    ADD CONSTRAINT queue_settings_pkey PRIMARY KEY (queue);

ALTER TABLE public.queue_settings
    ADD CONSTRAINT queue_settings_retention_bound CHECK ((retention_days <= (36600)::double precision)) NOT VALID;

ALTER TABLE ONLY public.queue_starts
    ADD CONSTRAINT queue_starts_pkey PRIMARY KEY (queue, n);

ALTER DOMAIN public.queue_workflows_due
    ADD CONSTRAINT queue_workflows_due_check CHECK (((VALUE >= '2000-01-01 00:00:00+00'::timestamp with time zone) AND ((VALUE <= '9999-12-31 00:00:00+00'::timestamp with time zone) OR (VALUE = 'infinity'::timestamp with time zone)))) NOT VALID;

ALTER DOMAIN public.queue_workflows_node_event
    ADD CONSTRAINT queue_workflows_node_event_check CHECK ((VALUE = ANY (ARRAY['claimed'::text, 'model_load_start'::text, 'model_load_done'::text, 'progress_beat'::text, 'stall_suspected'::text, 'stall_trip'::text, 'gpu_health_trip'::text, 'budget_trip'::text, 'requeued'::text, 'reassigned'::text, 'lease_renew'::text, 'completed'::text, 'failed'::text, 'cancelled'::text, 'error'::text, 'parked'::text, 'reclaimed'::text, 'retried'::text, 'skipped'::text, 'death'::text, 'unassignable'::text, 'assignable'::text]))) NOT VALID;

ALTER DOMAIN public.queue_workflows_number
    ADD CONSTRAINT queue_workflows_number_check CHECK (((VALUE >= 0) AND (VALUE <= '1000000000000000000'::bigint))) NOT VALID;

ALTER DOMAIN public.queue_workflows_period_s
    ADD CONSTRAINT queue_workflows_period_s_check CHECK (((VALUE > (0)::double precision) AND (VALUE <= (31622400)::double precision))) NOT VALID;

ALTER DOMAIN public.queue_workflows_queue_name
    ADD CONSTRAINT queue_workflows_queue_name_check CHECK (((octet_length(VALUE) >= 1) AND (octet_length(VALUE) <= 200))) NOT VALID;

ALTER DOMAIN public.queue_workflows_seconds
    ADD CONSTRAINT queue_workflows_seconds_check CHECK (((VALUE >= (0)::double precision) AND (VALUE <= (31622400)::double precision))) NOT VALID;

ALTER DOMAIN public.queue_workflows_time
    ADD CONSTRAINT queue_workflows_time_check CHECK (((VALUE >= '2000-01-01 00:00:00+00'::timestamp with time zone) AND (VALUE <= '9999-12-31 00:00:00+00'::timestamp with time zone))) NOT VALID;

ALTER DOMAIN public.queue_workflows_tries
    ADD CONSTRAINT queue_workflows_tries_check CHECK ((VALUE >= 0)) NOT VALID;

ALTER TABLE ONLY public.schedule_fires
    ADD CONSTRAINT schedule_fires_pkey PRIMARY KEY (name, fire_at);

ALTER TABLE public.worker_controls
    ADD CONSTRAINT worker_controls_name_check CHECK ((((octet_length(host_label) >= 1) AND (octet_length(host_label) <= 400)) AND ((octet_length(queue) >= 1) AND (octet_length(queue) <= 200)))) NOT VALID;

ALTER TABLE ONLY public.worker_controls
    ADD CONSTRAINT worker_controls_pkey PRIMARY KEY (host_label, queue);

ALTER TABLE ONLY public.worker_heartbeats
    ADD CONSTRAINT worker_heartbeats_pkey PRIMARY KEY (host_label, queue);

ALTER TABLE ONLY public.workers
    ADD CONSTRAINT workers_pkey PRIMARY KEY (worker_id);

ALTER TABLE ONLY public.workflow_dispatch_events
    ADD CONSTRAINT workflow_dispatch_events_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workflow_input_submissions
    ADD CONSTRAINT workflow_input_submissions_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workflow_input_timeouts
    ADD CONSTRAINT workflow_input_timeouts_pkey PRIMARY KEY (job_id);

ALTER TABLE ONLY public.workflow_node_events
    ADD CONSTRAINT workflow_node_events_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workflow_node_jobs
    ADD CONSTRAINT workflow_node_jobs_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workflow_node_jobs
    ADD CONSTRAINT workflow_node_jobs_run_id_node_id_key UNIQUE (run_id, node_id);

ALTER TABLE ONLY public.workflow_run_files
    ADD CONSTRAINT workflow_run_files_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workflow_run_files
    ADD CONSTRAINT workflow_run_files_run_id_rel_path_key UNIQUE (run_id, rel_path);

ALTER TABLE ONLY public.workflow_runs
    ADD CONSTRAINT workflow_runs_pkey PRIMARY KEY (id);

CREATE INDEX ingest_job_events_created_idx ON public.ingest_job_events USING brin (created_at);

CREATE INDEX ingest_jobs_admitted_idx ON public.ingest_jobs USING btree (queue, partition_key, priority, seq) WHERE ((partition_key IS NOT NULL) AND ((status)::text = 'queued'::text) AND (admitted_at IS NOT NULL));

CREATE INDEX ingest_jobs_blocked_idx ON public.ingest_jobs USING btree (available_at) WHERE (((status)::text = 'queued'::text) AND (blocked_reason IS NOT NULL));

CREATE INDEX ingest_jobs_claim_idx ON public.ingest_jobs USING btree (queue, priority, seq) WHERE (((status)::text = 'queued'::text) AND (blocked_reason IS NULL));

CREATE UNIQUE INDEX ingest_jobs_idempotency_idx ON public.ingest_jobs USING btree (idempotency_key) WHERE ((idempotency_key IS NOT NULL) AND (NOT idempotency_released));

CREATE INDEX ingest_jobs_limited_idx ON public.ingest_jobs USING btree (queue, partition_key, priority, seq) WHERE ((partition_key IS NOT NULL) AND ((status)::text = 'queued'::text) AND (blocked_reason = 'limited'::text));

CREATE INDEX ingest_jobs_line_idx ON public.ingest_jobs USING btree (lock_key, priority, seq) WHERE ((lock_key IS NOT NULL) AND ((status)::text = 'queued'::text) AND (blocked_reason = 'locked'::text));

CREATE UNIQUE INDEX ingest_jobs_lock_idx ON public.ingest_jobs USING btree (lock_key) WHERE ((lock_key IS NOT NULL) AND (((status)::text = 'running'::text) OR (((status)::text = 'queued'::text) AND (blocked_reason IS NULL))));

CREATE INDEX ingest_jobs_partition_idx ON public.ingest_jobs USING btree (queue, partition_key, status) WHERE ((partition_key IS NOT NULL) AND (((status)::text = 'running'::text) OR (((status)::text = 'queued'::text) AND ((blocked_reason IS NULL) OR (admitted_at IS NOT NULL)))));

CREATE INDEX ingest_jobs_running_idx ON public.ingest_jobs USING btree (worker_id) WHERE ((status)::text = 'running'::text);

CREATE INDEX ingest_jobs_unserved_idx ON public.ingest_jobs USING btree (blocked_reason, queue, lock_key) WHERE (((status)::text = 'queued'::text) AND (blocked_reason = ANY (ARRAY['locked'::text, 'unserved'::text])) AND (octet_length((queue)::text) >= 0));

CREATE INDEX job_attempt_logs_created_idx ON public.job_attempt_logs USING brin (created_at);

CREATE INDEX lock_turns_xid_idx ON public.lock_turns USING btree (xid);

CREATE INDEX partition_dues_due_idx ON public.partition_dues USING btree (queue, due_at);

CREATE INDEX partition_dues_partition_idx ON public.partition_dues USING btree (queue, partition_key);

CREATE INDEX worker_heartbeats_flagged_dead_idx ON public.worker_heartbeats USING btree (last_flagged_dead_at) WHERE (last_flagged_dead_at IS NOT NULL);

CREATE INDEX worker_heartbeats_known_models_gin ON public.worker_heartbeats USING gin (known_models);

CREATE INDEX worker_heartbeats_last_seen_idx ON public.worker_heartbeats USING btree (last_seen);

CREATE INDEX workers_host_idx ON public.workers USING btree (host_label, queue);

CREATE INDEX workflow_dispatch_events_run_idx ON public.workflow_dispatch_events USING btree (run_id, id) WHERE (processed_at IS NULL);

CREATE INDEX workflow_dispatch_events_unprocessed_idx ON public.workflow_dispatch_events USING btree (id) WHERE (processed_at IS NULL);

CREATE UNIQUE INDEX workflow_input_submissions_inflight_unique ON public.workflow_input_submissions USING btree (run_id, node_id) WHERE (status = ANY (ARRAY['pending'::text, 'processing'::text]));

CREATE INDEX workflow_input_submissions_pending_idx ON public.workflow_input_submissions USING btree (created_at) WHERE (status = 'pending'::text);

CREATE INDEX workflow_input_timeouts_due_idx ON public.workflow_input_timeouts USING btree (due_at);

CREATE INDEX workflow_node_events_created_idx ON public.workflow_node_events USING brin (created_at);

CREATE INDEX workflow_node_events_node_idx ON public.workflow_node_events USING btree (run_id, node_id, created_at);

CREATE INDEX workflow_node_jobs_age_idx ON public.workflow_node_jobs USING btree (required_model, seq) WHERE (((queue)::text = 'gpu'::text) AND ((status)::text = 'queued'::text) AND (blocked_reason IS NULL));

CREATE INDEX workflow_node_jobs_blocked_idx ON public.workflow_node_jobs USING btree (available_at) WHERE (((status)::text = 'queued'::text) AND (blocked_reason IS NOT NULL));

CREATE INDEX workflow_node_jobs_celery_task_id_idx ON public.workflow_node_jobs USING btree (celery_task_id) WHERE (celery_task_id IS NOT NULL);

CREATE INDEX workflow_node_jobs_claim_idx ON public.workflow_node_jobs USING btree (queue, priority, seq) WHERE (((status)::text = 'queued'::text) AND (blocked_reason IS NULL));

CREATE INDEX workflow_node_jobs_host_label_idx ON public.workflow_node_jobs USING btree (host_label);

CREATE INDEX workflow_node_jobs_line_idx ON public.workflow_node_jobs USING btree (lock_key, priority, seq) WHERE ((lock_key IS NOT NULL) AND ((status)::text = 'queued'::text) AND (blocked_reason = 'locked'::text));

CREATE UNIQUE INDEX workflow_node_jobs_lock_idx ON public.workflow_node_jobs USING btree (lock_key) WHERE ((lock_key IS NOT NULL) AND (((status)::text = 'running'::text) OR (((status)::text = 'queued'::text) AND (blocked_reason IS NULL))));

CREATE INDEX workflow_node_jobs_model_idx ON public.workflow_node_jobs USING btree (required_model, priority, seq) WHERE (((queue)::text = 'gpu'::text) AND ((status)::text = 'queued'::text) AND (blocked_reason IS NULL));

CREATE INDEX workflow_node_jobs_pipeline_idx ON public.workflow_node_jobs USING btree (pipeline_name);

CREATE INDEX workflow_node_jobs_running_idx ON public.workflow_node_jobs USING btree (worker_id) WHERE ((status)::text = 'running'::text);

CREATE INDEX workflow_node_jobs_unserved_idx ON public.workflow_node_jobs USING btree (blocked_reason, queue, lock_key) WHERE (((status)::text = 'queued'::text) AND (blocked_reason = ANY (ARRAY['locked'::text, 'unserved'::text])) AND (octet_length((queue)::text) >= 0));

CREATE INDEX workflow_run_files_kind_idx ON public.workflow_run_files USING btree (kind);

CREATE INDEX workflow_run_files_run_idx ON public.workflow_run_files USING btree (run_id);

CREATE INDEX workflow_runs_claim_idx ON public.workflow_runs USING btree (status, priority, queued_at);

CREATE INDEX workflow_runs_delayed_idx ON public.workflow_runs USING btree (available_at) WHERE ((status = 'queued'::text) AND (mode = 'node'::text) AND (available_at IS NOT NULL));

CREATE INDEX workflow_runs_parcel_created_idx ON public.workflow_runs USING btree (parcel_id, created_at DESC);

CREATE INDEX workflow_runs_startable_idx ON public.workflow_runs USING btree (priority, queued_at, id) WHERE ((status = 'queued'::text) AND (mode = 'node'::text) AND (available_at IS NULL));

CREATE INDEX workflow_runs_status_idx ON public.workflow_runs USING btree (status);

CREATE TRIGGER dispatch_event_notify AFTER INSERT ON public.workflow_dispatch_events FOR EACH ROW EXECUTE FUNCTION public.notify_dispatch_event();

CREATE TRIGGER ingest_job_events_keep BEFORE DELETE OR UPDATE ON public.ingest_job_events FOR EACH STATEMENT EXECUTE FUNCTION public.queue_workflows_keep_events();

CREATE TRIGGER ingest_job_ready_notify_insert AFTER INSERT ON public.ingest_jobs REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION public.notify_ingest_jobs_inserted();

CREATE TRIGGER ingest_jobs_bound BEFORE UPDATE OF id, task_name, reason, seq, attempts, max_attempts, crash_count, watchdog_retries, generation, timeout_s, idempotency_window_s, created_at, admitted_at, lock_key, partition_key, idempotency_key, policy, args, headers ON public.ingest_jobs FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_bound_job();

CREATE TRIGGER ingest_jobs_changed BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at, lock_key, partition_key, queue, claim_no, worker_id, lease_expires_at, heartbeat_at, started_at, finished_at, seconds, admitted_at ON public.ingest_jobs FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_job_changed('ingest_job_ready');

CREATE TRIGGER ingest_jobs_gone AFTER DELETE ON public.ingest_jobs REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION public.queue_workflows_jobs_gone();

CREATE TRIGGER ingest_jobs_hold BEFORE INSERT ON public.ingest_jobs FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_hold_ingest();

CREATE TRIGGER ingest_jobs_reopened BEFORE UPDATE OF generation ON public.ingest_jobs FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_reopen_ingest();

CREATE TRIGGER input_submission_notify AFTER INSERT ON public.workflow_input_submissions FOR EACH STATEMENT EXECUTE FUNCTION public.notify_orchestrator('input');

CREATE CONSTRAINT TRIGGER lock_turns_take AFTER INSERT ON public.lock_turns DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_take_turns();

CREATE TRIGGER model_controls_number BEFORE INSERT OR UPDATE ON public.model_controls FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_number_model_request();

CREATE TRIGGER node_job_ready_notify_insert AFTER INSERT ON public.workflow_node_jobs REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION public.notify_node_jobs_inserted();

CREATE CONSTRAINT TRIGGER partition_turns_take AFTER INSERT ON public.partition_turns DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_take_turns();

CREATE TRIGGER queue_partitions_set AFTER INSERT OR DELETE OR UPDATE ON public.queue_partitions FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_queue_set();

CREATE TRIGGER queue_settings_set AFTER INSERT OR DELETE OR UPDATE ON public.queue_settings FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_queue_set();

CREATE TRIGGER worker_control_notify AFTER INSERT OR UPDATE ON public.worker_controls FOR EACH ROW EXECUTE FUNCTION public.notify_worker_control();

CREATE TRIGGER worker_controls_drop_end BEFORE UPDATE OF desired_state ON public.worker_controls FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_drop_end();

CREATE TRIGGER workflow_input_submissions_bound BEFORE INSERT OR UPDATE OF id, run_id, node_id, value, attempts, created_at, claimed_at, processed_at, available_at ON public.workflow_input_submissions FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_bound_submission();

CREATE TRIGGER workflow_node_jobs_bound BEFORE UPDATE OF id, seq, attempts, max_attempts, crash_count, watchdog_retries, generation, timeout_s, created_at, lock_key, partition_key, policy ON public.workflow_node_jobs FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_bound_job();

CREATE TRIGGER workflow_node_jobs_changed BEFORE UPDATE OF status, blocked_reason, available_at, cancel_requested_at, lock_key, claim_no, worker_id, lease_expires_at, heartbeat_at, started_at, finished_at, seconds ON public.workflow_node_jobs FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_job_changed('node_job_ready');

CREATE TRIGGER workflow_node_jobs_gone AFTER DELETE ON public.workflow_node_jobs REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION public.queue_workflows_jobs_gone();

CREATE TRIGGER workflow_node_jobs_hold BEFORE INSERT ON public.workflow_node_jobs FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_hold_until_due();

CREATE TRIGGER workflow_node_jobs_model BEFORE UPDATE OF required_model ON public.workflow_node_jobs FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_no_empty_model();

CREATE TRIGGER workflow_run_ready_notify AFTER UPDATE OF status, available_at ON public.workflow_runs FOR EACH ROW WHEN (((new.status = 'queued'::text) AND (new.mode = 'node'::text) AND (new.available_at IS NULL) AND ((old.status IS DISTINCT FROM new.status) OR (old.available_at IS NOT NULL)))) EXECUTE FUNCTION public.notify_orchestrator('run');

CREATE TRIGGER workflow_run_ready_notify_insert AFTER INSERT ON public.workflow_runs FOR EACH ROW WHEN (((new.status = 'queued'::text) AND (new.mode = 'node'::text))) EXECUTE FUNCTION public.notify_orchestrator('run');

CREATE TRIGGER workflow_runs_bound BEFORE INSERT OR UPDATE OF id, workflow_name, parcel_id, out_dir, mode, generation, start_attempts, resume_count, progress_pct, created_at, updated_at, queued_at, started_at, finished_at, available_at, context ON public.workflow_runs FOR EACH ROW EXECUTE FUNCTION public.queue_workflows_bound_run();

CREATE TRIGGER workflow_runs_close AFTER UPDATE OF status ON public.workflow_runs FOR EACH ROW WHEN (((new.mode = 'node'::text) AND (new.status = ANY (ARRAY['completed'::text, 'failed'::text, 'cancelled'::text])) AND (old.status IS DISTINCT FROM new.status))) EXECUTE FUNCTION public.queue_workflows_close_run();

CREATE TRIGGER workflow_runs_forget AFTER DELETE ON public.workflow_runs REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION public.queue_workflows_forget_runs();

CREATE TRIGGER workflow_runs_guard BEFORE UPDATE OF status ON public.workflow_runs FOR EACH ROW WHEN (((old.mode = 'node'::text) AND (old.status = ANY (ARRAY['completed'::text, 'failed'::text, 'cancelled'::text])) AND (new.status IS DISTINCT FROM old.status))) EXECUTE FUNCTION public.queue_workflows_guard_run();

ALTER TABLE ONLY public.workflow_dispatch_events
    ADD CONSTRAINT workflow_dispatch_events_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.workflow_runs(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_input_submissions
    ADD CONSTRAINT workflow_input_submissions_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.workflow_runs(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_node_jobs
    ADD CONSTRAINT workflow_node_jobs_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.workflow_runs(id) ON DELETE CASCADE;

ALTER TABLE ONLY public.workflow_run_files
    ADD CONSTRAINT workflow_run_files_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.workflow_runs(id) ON DELETE CASCADE;

REVOKE ALL ON FUNCTION public.notify_dispatch_event() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.notify_ingest_job_ready() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.notify_ingest_jobs_inserted() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.notify_node_job_ready() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.notify_node_jobs_inserted() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.notify_orchestrator() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.notify_worker_control() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_actor() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_admit(p_queue text, p_key text, p_starts integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_age_s(p_at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_ask_partition(p_queue text, p_key text, p_starts integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_ask_turn(p_jobs name, p_key text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_audit(p_job public.ingest_jobs, p_event text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_block_unserved(p_jobs text, p_served text[], p_limit integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_born(p_at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_bound_job() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_bound_run() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_bound_submission() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_check_payload(p_value jsonb, p_column text, p_bytes integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_claim_apart(p_jobs text, p_worker text, p_host text, p_queue text, p_lease_s double precision, p_obey boolean, p_promote boolean, p_models text[], p_lane smallint, OUT job_id text, OUT aside jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_close_run() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_demand(p_right text, p_table text, p_column text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_drop_end() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_enqueue(p_prefix text, p_jobs jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_forget_runs() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_give_turns(p_jobs text, p_keys text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_give_turns_singly(p_jobs text, p_keys text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_can(p_host text, p_models text[], p_vram_mb integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_choose(p_worker text, p_host text, p_warm text, p_models text[], p_newest boolean, p_grace_s double precision, p_bound_s double precision, OUT model text, OUT seq bigint, OUT why text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_fleet(p_worker text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_is_held(p_fleet public.queue_workflows_gpu_holder[], p_host text, p_model text, p_loads double precision) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_line(p_model text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_live() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_misfit(p_host text, p_models text[], p_vram_mb integer, p_model text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_needs(p_host text, p_model text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_next(p_worker text, p_host text, p_model text, p_models text[], p_newest boolean, p_policy text, p_grace_s double precision, p_bound_s double precision, OUT model text, OUT how text, OUT band smallint, OUT seq bigint, OUT why text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_queued() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_reach(p_fleet public.queue_workflows_gpu_holder[], p_model text, p_jobs integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_take(p_model text, p_how text, p_band smallint, p_seq bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_times(p_host text, p_model text, OUT load_s double precision, OUT run_s double precision) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_unserved() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_gpu_weigh(p_fleet public.queue_workflows_gpu_holder[], p_host text, p_model text, OUT jobs integer, OUT waited_s double precision, OUT load_s double precision, OUT run_s double precision, OUT reach_s double precision, OUT is_left boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_guard_run() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_hold_back(p_queue text, p_look integer, p_most integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_hold_ingest() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_hold_node(p_run text, p_node text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_hold_until_due() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_ingest_step(p_worker text, p_host text, p_queue text, p_lease_s double precision, p_claim integer, p_obey boolean, p_promote boolean, p_done jsonb, p_tell boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_insert_nodes(p_run text, p_rows jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_is_about_data(p_state text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_is_claimable(p_status text, p_blocked_reason text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_is_off(p_desired_state text, p_until_at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_is_past_retention(p_status text, p_ended_at timestamp with time zone, p_days double precision) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_is_paused(p_paused_at timestamp with time zone, p_paused_until timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_is_systemic(p_state text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_is_terminal_job(p_status text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_is_terminal_run(p_status text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_job_changed() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_jobs_gone() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_keep_events() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_learn(p_host text, p_model text, p_load_s double precision, p_run_s double precision) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_limit_gate(p_old public.ingest_jobs, p_new public.ingest_jobs) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_lock_keys(p_jobs text, p_keys text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_mend_lines() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_mend_turns(p_jobs text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_must_end(job public.ingest_jobs) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_must_end(job public.workflow_node_jobs) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_no_empty_model() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_node_step(p_worker text, p_host text, p_queue text, p_lease_s double precision, p_claim boolean, p_obey boolean, p_promote boolean, p_newest boolean, p_model text, p_models text[], p_lane smallint, p_job text, p_claim_no bigint, p_delta jsonb, p_seconds double precision, p_rss integer, p_resolved jsonb, p_generation integer, p_next jsonb, p_end boolean, p_policy text, p_grace_s double precision, p_bound_s double precision) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_nodes_step(p_worker text, p_host text, p_queue text, p_lease_s double precision, p_claim integer, p_obey boolean, p_promote boolean, p_newest boolean, p_done jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_note_starts(p_queue text, p_starts integer) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_number_model_request() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_off_policy(p_host text, p_queue text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_partitions(p_queue text, p_in_line boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_past_lines(p_queue text, OUT held boolean, OUT id text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_pick_gpu(p_worker text, p_host text, p_model text, p_models text[], p_newest boolean, p_policy text, p_grace_s double precision, p_bound_s double precision) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_put_jobs(p_prefix text, p_jobs jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_put_sample(host text, every integer, taken jsonb, tell boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_queue_room(p_queue text, p_wanted integer, OUT room integer, OUT wait_s double precision) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_queue_set() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_rate_room(p_limit integer, p_period_s double precision, p_wanted integer, p_starts timestamp with time zone[], OUT room integer, OUT due_at timestamp with time zone) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_record(job public.ingest_jobs, event text, host text, worker text, seconds double precision, error text, detail jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_record(job public.workflow_node_jobs, event text, host text, worker text, seconds double precision, error text, detail jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_refuse(p_table text, p_old jsonb, p_new jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_release_key(p_key text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_reopen_ingest() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_served_queues(p_stale_s double precision) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_set_aside(p_jobs text, p_id text, p_error text, p_worker text, p_claim_no bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_set_blocked(p_jobs text, p_ids text[], p_reason text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_start_run(p_run text, p_generation integer, p_born bigint, p_definition jsonb, p_hash text, p_rows jsonb, p_out_dir text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_take_turns() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.queue_workflows_unblock_served(p_jobs text, p_served text[], p_limit integer) FROM PUBLIC;

GRANT SELECT ON TABLE public.queue_schema_objects TO PUBLIC;
