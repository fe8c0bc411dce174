-- Ranges of values for every writer, so that no row can stop a queue. Decision 0020 says why some ranges are
-- triggers and others domains.

-- Refuse a JSON value that no process can load or compute with: over 128 levels, over `p_bytes` of text, or a
-- number outside of double precision. `p_column` names the value in the message. Values of up to 256 bytes pay
-- only for the first test: they hold neither 129 levels nor a number of 309 digits.
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

-- Raise an error that names the column whose value is out of its range. `p_old` is NULL for an INSERT. An UPDATE
-- raises only for values that it changes, so that a row with an old bad value can still end. The next number
-- after the old one always passes, so that no bound stops the engine's own counting.
CREATE OR REPLACE FUNCTION queue_workflows_refuse(p_table text, p_old jsonb, p_new jsonb) RETURNS void
LANGUAGE plpgsql SET timezone = 'UTC' AS $$
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
END $$;

-- Check the columns of a job that no claim writes. queue_workflows_job_changed checks the columns that claims
-- write.
CREATE OR REPLACE FUNCTION queue_workflows_bound_job() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF {bad_counters()}
       OR NEW.created_at NOT BETWEEN '2000-01-01+00' AND '9999-12-31+00'
       OR greatest(octet_length(NEW.id), octet_length(NEW.lock_key), octet_length(NEW.partition_key)) > 1000 THEN
        PERFORM queue_workflows_refuse(TG_TABLE_NAME::text, to_jsonb(OLD), to_jsonb(NEW));
    END IF;
    IF NEW.policy IS DISTINCT FROM OLD.policy THEN
        PERFORM queue_workflows_check_payload(NEW.policy, TG_TABLE_NAME || '.policy');
    END IF;
    IF TG_TABLE_NAME = 'ingest_jobs' THEN
        -- If an old row has a bad value, every change would check the whole content of the row.
        IF (NEW.idempotency_window_s NOT BETWEEN 0 AND 31622400
            OR NEW.admitted_at NOT BETWEEN '2000-01-01+00' AND '9999-12-31+00'
            OR greatest(octet_length(NEW.task_name), octet_length(NEW.idempotency_key)) > 1000
            OR octet_length(NEW.reason) > 8000)
           AND (NEW.idempotency_window_s, NEW.admitted_at, NEW.task_name, NEW.idempotency_key, NEW.reason)
               IS DISTINCT FROM
               (OLD.idempotency_window_s, OLD.admitted_at, OLD.task_name, OLD.idempotency_key, OLD.reason) THEN
            PERFORM queue_workflows_refuse(TG_TABLE_NAME::text, to_jsonb(OLD), to_jsonb(NEW));
        END IF;
        IF NEW.args IS DISTINCT FROM OLD.args OR NEW.headers IS DISTINCT FROM OLD.headers THEN
            PERFORM queue_workflows_check_payload(NEW.args, 'ingest_jobs.args');
            PERFORM queue_workflows_check_payload(NEW.headers, 'ingest_jobs.headers');
        END IF;
    END IF;
    RETURN NEW;
END $$;

-- Check the columns of a run.
CREATE OR REPLACE FUNCTION queue_workflows_bound_run() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
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

-- Check the columns of an answer to an input node.
CREATE OR REPLACE FUNCTION queue_workflows_bound_submission() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
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
