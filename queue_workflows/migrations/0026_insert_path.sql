-- What an insert of a job costs, and what it may say.

-- Refuse a JSON value that no process can load or compute with: over 128 levels, over p_bytes of text, or with a
-- number outside of double precision. The first test is all that a small value pays: 256 bytes hold neither 129
-- levels nor a number of 309 digits. p_column names the value in the message.
CREATE OR REPLACE FUNCTION queue_workflows_check_payload(
    p_value jsonb, p_column text, p_bytes integer DEFAULT 16777216) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
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
END $$;

-- As in 0023, within bounds, and a row without keys that is due passes at once. queue_workflows_refuse (0031)
-- names the column that is out of its range.
CREATE OR REPLACE FUNCTION queue_workflows_hold_ingest() RETURNS trigger LANGUAGE plpgsql AS $$
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
        -- As a plain UPDATE to `running` is treated; a lease without an end would keep its lock key for ever.
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
    -- By itself: an expression with a query in it is run as a query, whatever stands before that.
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
