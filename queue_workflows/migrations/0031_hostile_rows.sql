-- No row can stop a queue: ranges for what the engine computes with, for every writer, and functions for nobody
-- whom they were not granted to. docs/decisions/0020 says why some ranges are triggers and others domains.

-- Name the column of a row that is out of its range, and refuse the row. p_old NULL: the row is inserted. A row of
-- before may have such a value and still be changed, and so ended: only a value that changes is judged, and the
-- next number after the old one passes, so that no bound ever stops the engine's own counting.
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
                v_wanted := '0 to ' || (c_counters ->> v_column);
            END IF;
        ELSIF v_column IN ('timeout_s', 'idempotency_window_s') THEN
            IF v_value::float8 > 31622400 OR v_value::float8 < 0
               OR v_column = 'timeout_s' AND v_value::float8 = 0 THEN
                v_wanted := 'a number of seconds above 0, at most 31622400 (366 days)';
            END IF;
        ELSIF v_column IN ('seconds', 'progress_pct') THEN
            IF v_value::float8 NOT BETWEEN -1e12 AND 1e12 THEN
                v_wanted := 'finite';
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

-- The columns of a job that no claim writes. Those that claims write are in queue_workflows_job_changed.
CREATE OR REPLACE FUNCTION queue_workflows_bound_job() RETURNS trigger LANGUAGE plpgsql AS $$
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
DROP TRIGGER IF EXISTS workflow_node_jobs_bound ON workflow_node_jobs;
CREATE TRIGGER workflow_node_jobs_bound
    BEFORE UPDATE OF id, seq, attempts, max_attempts, crash_count, watchdog_retries, generation, timeout_s,
        created_at, lock_key, partition_key, policy ON workflow_node_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_bound_job();
DROP TRIGGER IF EXISTS ingest_jobs_bound ON ingest_jobs;
CREATE TRIGGER ingest_jobs_bound
    BEFORE UPDATE OF id, task_name, reason, seq, attempts, max_attempts, crash_count, watchdog_retries, generation,
        timeout_s, idempotency_window_s, created_at, admitted_at, lock_key, partition_key, idempotency_key, policy,
        args, headers ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_bound_job();

CREATE OR REPLACE FUNCTION queue_workflows_bound_run() RETURNS trigger LANGUAGE plpgsql AS $$
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
DROP TRIGGER IF EXISTS workflow_runs_bound ON workflow_runs;
CREATE TRIGGER workflow_runs_bound
    BEFORE INSERT OR UPDATE OF id, workflow_name, parcel_id, out_dir, mode, generation, start_attempts, resume_count,
        progress_pct, created_at, updated_at, queued_at, started_at, finished_at, available_at, context
    ON workflow_runs FOR EACH ROW EXECUTE FUNCTION queue_workflows_bound_run();

CREATE OR REPLACE FUNCTION queue_workflows_bound_submission() RETURNS trigger LANGUAGE plpgsql AS $$
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
DROP TRIGGER IF EXISTS workflow_input_submissions_bound ON workflow_input_submissions;
CREATE TRIGGER workflow_input_submissions_bound
    BEFORE INSERT OR UPDATE OF id, run_id, node_id, value, attempts, created_at, claimed_at, processed_at,
        available_at
    ON workflow_input_submissions FOR EACH ROW EXECUTE FUNCTION queue_workflows_bound_submission();

-- Keep an input node as it is until the caller's transaction ends, for roles that may answer. Nodes of other kinds,
-- and nodes that have ended, cannot be held by it.
CREATE OR REPLACE FUNCTION queue_workflows_hold_node(p_run text, p_node text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM queue_workflows_demand('INSERT', 'workflow_input_submissions', 'value');
    PERFORM FROM workflow_node_jobs
      WHERE run_id = p_run AND node_id = p_node AND starts_with(node_module, '__input__')
        AND status IN ('queued', 'running', 'awaiting_input') FOR SHARE;
END $$;

-- The other tables are written seldom, and a domain is enough. Its constraint comes after the columns, NOT VALID: so
-- no table is written anew, and a row of before stays. Where a view, trigger or policy of the app's names a
-- column its type cannot change, and the column stays unbounded.
CREATE DOMAIN queue_workflows_time AS timestamptz;
CREATE DOMAIN queue_workflows_due AS timestamptz;
CREATE DOMAIN queue_workflows_period_s AS double precision;
CREATE DOMAIN queue_workflows_seconds AS double precision;
CREATE DOMAIN queue_workflows_number AS bigint;
CREATE DOMAIN queue_workflows_tries AS smallint;
DO $$
DECLARE
    v_one record;
BEGIN
    FOR v_one IN SELECT d.type, split_part(c.name, '.', 1) AS tab, split_part(c.name, '.', 2) AS col
      FROM (VALUES
        ('time', '{worker_heartbeats.last_seen, worker_heartbeats.last_flagged_dead_at, worker_controls.updated_at,
            worker_controls.until_at, workflow_dispatch_events.created_at, workflow_dispatch_events.processed_at,
            workflow_dispatch_events.available_at, workers.started_at, workers.last_seen, workers.model_since,
            schedule_fires.fire_at, schedule_fires.created_at, queue_settings.paused_at,
            queue_settings.paused_until, queue_settings.updated_at, queue_partitions.paused_at,
            queue_partitions.paused_until, queue_partitions.updated_at, queue_starts.started_at,
            partition_starts.started_at, workflow_input_timeouts.due_at, gpu_models.updated_at,
            gpu_unassignable.since, hw_samples.sampled_at, job_attempt_logs.created_at,
            job_attempt_logs.updated_at}'::text[]),
        ('due', '{partition_dues.due_at}'),
        ('period_s', '{queue_settings.rate_period_s, queue_settings.partition_rate_period_s,
            queue_partitions.rate_period_s}'),
        ('seconds', '{gpu_models.load_s, gpu_models.run_s}'),
        ('number', '{queue_starts.n, partition_starts.n}'),
        ('tries', '{workflow_dispatch_events.attempts}')) AS d (type, names)
      CROSS JOIN LATERAL unnest(d.names) AS c (name)
    LOOP
        BEGIN
            EXECUTE format('ALTER TABLE %I ALTER COLUMN %I TYPE %I',
                           v_one.tab, v_one.col, 'queue_workflows_' || v_one.type);
        EXCEPTION WHEN feature_not_supported THEN
            RAISE WARNING '%.% stays unbounded: something of the app''s depends on its type', v_one.tab, v_one.col;
        END;
    END LOOP;
END $$;
ALTER DOMAIN queue_workflows_time ADD CONSTRAINT queue_workflows_time_check
    CHECK (VALUE BETWEEN '2000-01-01+00' AND '9999-12-31+00') NOT VALID;
-- A pause without an end leaves a partition's line due at infinity.
ALTER DOMAIN queue_workflows_due ADD CONSTRAINT queue_workflows_due_check
    CHECK (VALUE >= '2000-01-01+00' AND (VALUE <= '9999-12-31+00' OR VALUE = 'infinity')) NOT VALID;
ALTER DOMAIN queue_workflows_period_s ADD CONSTRAINT queue_workflows_period_s_check
    CHECK (VALUE > 0 AND VALUE <= 31622400) NOT VALID;
ALTER DOMAIN queue_workflows_seconds ADD CONSTRAINT queue_workflows_seconds_check
    CHECK (VALUE BETWEEN 0 AND 31622400) NOT VALID;
ALTER DOMAIN queue_workflows_number ADD CONSTRAINT queue_workflows_number_check
    CHECK (VALUE BETWEEN 0 AND 1000000000000000000) NOT VALID;
ALTER DOMAIN queue_workflows_tries ADD CONSTRAINT queue_workflows_tries_check CHECK (VALUE >= 0) NOT VALID;
-- NaN is above every number.
ALTER TABLE queue_settings ADD CONSTRAINT queue_settings_retention_bound CHECK (retention_days <= 36600) NOT VALID;
ALTER TABLE gpu_models ADD CONSTRAINT gpu_models_size_bound CHECK (est_vram_gb BETWEEN -1e9 AND 1e9) NOT VALID;

DO $$
DECLARE
    v_function regprocedure;
BEGIN
    FOREACH v_function IN ARRAY ARRAY[
        'queue_workflows_bound_job()', 'queue_workflows_bound_run()', 'queue_workflows_bound_submission()',
        'queue_workflows_hold_node(text, text)', 'queue_workflows_put_jobs(text, jsonb)']::regprocedure[]
    LOOP
        -- A session's temporary tables come first where they are not named.
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp',
                       v_function, current_schema());
    END LOOP;
    -- A trigger fires without EXECUTE. `queue-workflows connect --for` names what a role has to be granted.
    FOR v_function IN
        SELECT p.oid FROM pg_proc p
         WHERE p.pronamespace = current_schema()::regnamespace AND p.prokind = 'f'
           AND (starts_with(p.proname, 'queue_workflows_') OR p.proname IN (
                'notify_node_job_ready', 'notify_ingest_job_ready', 'notify_worker_control',
                'notify_node_jobs_inserted', 'notify_ingest_jobs_inserted', 'notify_orchestrator',
                'notify_dispatch_event'))
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', v_function);
    END LOOP;
END $$;
