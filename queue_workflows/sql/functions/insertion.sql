-- Inserting jobs: defaults, idempotency keys, bulk insertion; and queueing a finished ingest job again.

-- Check an inserted node job and decide whether it is claimable: a job that is not due, and one with a lock key,
-- is blocked until it is admitted. The trigger has no WHEN clause: PostgreSQL parses that text again for every
-- statement, which costs more than this function.
CREATE OR REPLACE FUNCTION queue_workflows_hold_until_due() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF NEW.claim_no NOT BETWEEN 0 AND 1000000000 OR NEW.seconds NOT BETWEEN -1e12 AND 1e12 OR {bad_counters()}
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
    {settle_inserted()}
    IF NEW.required_model = '' THEN
        NEW.required_model := NULL;
    END IF;
    IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    {wait_for_lock()}
    RETURN NEW;
END $$;

-- Store an empty model name as NULL, as every claim expects.
CREATE OR REPLACE FUNCTION queue_workflows_no_empty_model() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.required_model := nullif(NEW.required_model, '');
    RETURN NEW;
END $$;

-- Check an inserted ingest job and decide whether it is claimable. A job that is not due, whose partition has
-- limits, or that has a lock key is blocked until it is admitted. Its idempotency key is taken from an ended job
-- whose window is over. A job without keys that is due returns early.
CREATE OR REPLACE FUNCTION queue_workflows_hold_ingest() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF NEW.claim_no NOT BETWEEN 0 AND 1000000000 OR NEW.seconds NOT BETWEEN -1e12 AND 1e12 OR {bad_counters()}
       OR greatest(NEW.created_at, NEW.available_at, NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at,
                   NEW.finished_at, NEW.cancel_requested_at, NEW.admitted_at) > '9999-12-31+00'
       OR least(NEW.created_at, NEW.available_at, NEW.lease_expires_at, NEW.heartbeat_at, NEW.started_at,
                NEW.finished_at, NEW.cancel_requested_at, NEW.admitted_at) < '2000-01-01+00'
       OR greatest(octet_length(NEW.id), octet_length(NEW.task_name), octet_length(NEW.lock_key),
                   octet_length(NEW.partition_key), octet_length(NEW.idempotency_key),
                   octet_length(NEW.claimed_by), octet_length(NEW.worker_id)) > 1000
       OR octet_length(NEW.reason) > 8000 OR NEW.idempotency_window_s NOT BETWEEN 0 AND 31622400 THEN
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
    {settle_inserted()}
    IF coalesce(NEW.partition_key, NEW.lock_key, NEW.idempotency_key) IS NULL
       AND (NEW.available_at > now()) IS NOT TRUE THEN
        RETURN NEW;
    END IF;
    IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    -- This IF is separate, since PL/pgSQL runs an expression with a subquery as a query each time.
    IF NEW.partition_key IS NOT NULL AND NEW.status = 'queued' THEN
        IF EXISTS (SELECT FROM queue_partition_limits l WHERE l.queue = NEW.queue) THEN
            NEW := queue_workflows_limit_gate(NULL, NEW);
        END IF;
    END IF;
    {wait_for_lock()}
    IF NEW.idempotency_key IS NOT NULL AND NOT NEW.idempotency_released THEN
        PERFORM queue_workflows_release_key(NEW.idempotency_key);
    END IF;
    RETURN NEW;
END $$;

-- Take an idempotency key from an ended job whose window is over, so that another job can have it. The triggers
-- that call it run as their owner, so that a role which may only insert jobs may give them a key.
CREATE OR REPLACE FUNCTION queue_workflows_release_key(p_key text) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    UPDATE ingest_jobs j SET idempotency_released = true
     WHERE j.idempotency_key = p_key AND NOT j.idempotency_released
       AND queue_workflows_is_terminal_job(j.status)
       -- At most 366 days, whatever a plain UPDATE stored.
       AND j.created_at <= now() - least(greatest(coalesce(j.idempotency_window_s, 86400), 0), 31622400)
           * interval '1 second';
END $$;

-- Give a reopened ingest job its idempotency key back. If another live job has the key, the unique index raises.
CREATE OR REPLACE FUNCTION queue_workflows_reopen_ingest() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF NEW.idempotency_released AND NEW.idempotency_key IS NOT NULL
       AND NEW.generation > OLD.generation AND NEW.status = 'queued' THEN
        PERFORM queue_workflows_release_key(NEW.idempotency_key);
        NEW.idempotency_released := false;
    END IF;
    RETURN NEW;
END $$;

-- Insert a JSON array of ingest jobs. Ids are `p_prefix` and the place in the array as 12 hexadecimal digits.
-- Return the places whose key another job has, with that job's id and whether its task, queue and args are the
-- same. Keys are inserted in sorted order, so that two calls cannot deadlock. It runs as its owner, because only
-- the engine may set `seq`, and demands the caller's right to insert.
CREATE OR REPLACE FUNCTION queue_workflows_put_jobs(p_prefix text, p_jobs jsonb)
RETURNS TABLE (place bigint, id text, same boolean) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off
SECURITY DEFINER SET search_path FROM CURRENT AS $$
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
    RAISE EXCEPTION 'other jobs take and release these idempotency keys too often: enqueue the jobs again'
        USING ERRCODE = 'serialization_failure';
END $$;

-- Do what queue_workflows_put_jobs does, but all or none: if one key belongs to a job with another payload,
-- no job of the call is inserted. The rest of the caller's transaction is kept.
CREATE OR REPLACE FUNCTION queue_workflows_enqueue(p_prefix text, p_jobs jsonb)
RETURNS TABLE (place bigint, id text, same boolean) LANGUAGE plpgsql AS $$
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
