-- From the tables of 0.3.0 to those of 0.4: identities of claims, outbox and history, lock keys and limits, the gpu
-- fleet, and ranges of values. The functions and triggers that work on them are in queue_workflows/sql/ and are
-- installed in the same transaction (decision 0023).

-- Domains ------------------------------------------------------------------------------------------------------
-- PostgreSQL parses the text of a CHECK anew for every statement that writes the table (25 to 40 us each), and that
-- of a domain only where a statement assigns the column. The SQLSTATE is the same. Constraints that are added at
-- the end, NOT VALID, spare tables with rows a scan, and leave old rows as they are.
CREATE DOMAIN queue_workflows_node_status AS text CHECK (VALUE IN (
    'queued', 'running', 'completed', 'failed', 'cancelled', 'awaiting_input', 'skipped'));
CREATE DOMAIN queue_workflows_job_status AS text CHECK (VALUE IN (
    'queued', 'running', 'completed', 'failed', 'cancelled'));
CREATE DOMAIN queue_workflows_dag_queue AS text CHECK (VALUE IN ('cpu', 'gpu'));
CREATE DOMAIN queue_workflows_queue_name AS text;
CREATE DOMAIN queue_workflows_node_event AS text;
CREATE DOMAIN queue_workflows_time AS timestamptz;
CREATE DOMAIN queue_workflows_due AS timestamptz;
CREATE DOMAIN queue_workflows_period_s AS double precision;
CREATE DOMAIN queue_workflows_seconds AS double precision;
CREATE DOMAIN queue_workflows_number AS bigint;
CREATE DOMAIN queue_workflows_tries AS smallint;

-- Tables of 0.3.0 ----------------------------------------------------------------------------------------------
-- Locked in one order, before anything else is.
LOCK TABLE workflow_runs, workflow_node_jobs, ingest_jobs IN ACCESS EXCLUSIVE MODE;
-- Triggers that sql/triggers/ replaces, and indexes whose predicate names a column whose type changes.
DROP TRIGGER IF EXISTS node_job_ready_notify ON workflow_node_jobs;
DROP TRIGGER IF EXISTS ingest_job_ready_notify ON ingest_jobs;
DROP INDEX IF EXISTS workflow_node_jobs_lease_idx, workflow_node_jobs_claim_idx,
    workflow_node_jobs_model_idx, workflow_node_jobs_run_idx, workflow_node_jobs_status_idx,
    workflow_node_jobs_celery_task_id_idx, ingest_jobs_lease_idx, ingest_jobs_claim_idx,
    workflow_node_events_created_idx;

-- Where a view, trigger or policy of the app names a column, its type cannot change: the CHECK stays.
DO $$ BEGIN
    ALTER TABLE workflow_node_jobs
        DROP CONSTRAINT IF EXISTS workflow_node_jobs_status_check,
        DROP CONSTRAINT IF EXISTS workflow_node_jobs_queue_check,
        ALTER COLUMN status TYPE queue_workflows_node_status,
        ALTER COLUMN queue TYPE queue_workflows_dag_queue;
EXCEPTION WHEN feature_not_supported THEN NULL;
END $$;
DO $$ BEGIN
    ALTER TABLE ingest_jobs
        DROP CONSTRAINT IF EXISTS ingest_jobs_status_check,
        ALTER COLUMN status DROP DEFAULT,
        ALTER COLUMN status TYPE queue_workflows_job_status,
        ALTER COLUMN status SET DEFAULT 'queued',
        ALTER COLUMN queue TYPE queue_workflows_queue_name;
EXCEPTION WHEN feature_not_supported THEN
    ALTER TABLE ingest_jobs ADD CONSTRAINT ingest_jobs_queue_name_check
        CHECK (octet_length(queue) BETWEEN 1 AND 200) NOT VALID;
END $$;
ALTER TABLE workflow_node_events DROP CONSTRAINT IF EXISTS workflow_node_events_type_check;
DO $$ BEGIN
    ALTER TABLE workflow_node_events ALTER COLUMN event_type TYPE queue_workflows_node_event;
EXCEPTION WHEN feature_not_supported THEN
    ALTER TABLE workflow_node_events ADD CONSTRAINT workflow_node_events_type_check
        CHECK (event_type::queue_workflows_node_event IS NOT NULL);
END $$;

ALTER TABLE workflow_runs
    ADD COLUMN IF NOT EXISTS definition       jsonb,
    ADD COLUMN IF NOT EXISTS definition_hash  text,
    ADD COLUMN IF NOT EXISTS generation       integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS start_attempts   integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at     timestamptz,
    ALTER COLUMN id SET DEFAULT gen_random_uuid()::text,
    ALTER COLUMN status SET DEFAULT 'queued',
    ALTER COLUMN mode SET DEFAULT 'node',
    ALTER COLUMN queued_at SET DEFAULT now();

-- Renewals of a lease are HOT updates: no index holds a column that they write, and the page has room.
ALTER TABLE workflow_node_jobs
    ADD COLUMN IF NOT EXISTS seq                 bigserial,
    ADD COLUMN IF NOT EXISTS claim_no            bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS worker_id           text,
    ADD COLUMN IF NOT EXISTS generation          integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS attempts            integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS max_attempts        integer NOT NULL DEFAULT 1,
    ADD COLUMN IF NOT EXISTS crash_count         integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at        timestamptz,
    ADD COLUMN IF NOT EXISTS blocked_reason      text,
    ADD COLUMN IF NOT EXISTS cancel_requested_at timestamptz,
    ADD COLUMN IF NOT EXISTS heartbeat_at        timestamptz,
    ADD COLUMN IF NOT EXISTS progress            jsonb,
    ADD COLUMN IF NOT EXISTS timeout_s           double precision,
    ADD COLUMN IF NOT EXISTS policy              jsonb,
    ADD COLUMN IF NOT EXISTS lock_key            text,
    ADD COLUMN IF NOT EXISTS partition_key       text,
    ADD COLUMN IF NOT EXISTS input_template      jsonb,
    ADD COLUMN IF NOT EXISTS ref_heads           text[],
    ALTER COLUMN id SET DEFAULT gen_random_uuid()::text,
    ALTER COLUMN status SET DEFAULT 'queued',
    SET (fillfactor = 70);
ALTER TABLE ingest_jobs
    ADD COLUMN IF NOT EXISTS seq                 bigserial,
    ADD COLUMN IF NOT EXISTS claim_no            bigint NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS worker_id           text,
    ADD COLUMN IF NOT EXISTS generation          integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS attempts            integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS max_attempts        integer NOT NULL DEFAULT 1,
    ADD COLUMN IF NOT EXISTS crash_count         integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS watchdog_retries    integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at        timestamptz,
    ADD COLUMN IF NOT EXISTS blocked_reason      text,
    ADD COLUMN IF NOT EXISTS cancel_requested_at timestamptz,
    ADD COLUMN IF NOT EXISTS heartbeat_at        timestamptz,
    ADD COLUMN IF NOT EXISTS progress            jsonb,
    ADD COLUMN IF NOT EXISTS timeout_s           double precision,
    ADD COLUMN IF NOT EXISTS policy              jsonb,
    ADD COLUMN IF NOT EXISTS lock_key            text,
    ADD COLUMN IF NOT EXISTS partition_key       text,
    ADD COLUMN IF NOT EXISTS idempotency_key     text,
    ADD COLUMN IF NOT EXISTS headers             jsonb,
    -- For how long after its creation a job keeps its key although it has ended. NULL: a day.
    ADD COLUMN IF NOT EXISTS idempotency_window_s double precision,
    ADD COLUMN IF NOT EXISTS idempotency_released boolean NOT NULL DEFAULT false,
    -- When the limits of its partition admitted it.
    ADD COLUMN IF NOT EXISTS admitted_at timestamptz,
    ALTER COLUMN id SET DEFAULT gen_random_uuid()::text,
    SET (fillfactor = 70);
ALTER TABLE workflow_dispatch_events
    ADD COLUMN IF NOT EXISTS job_id       text,
    ADD COLUMN IF NOT EXISTS claim_no     bigint,
    ADD COLUMN IF NOT EXISTS generation   integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at timestamptz;
-- Without the foreign key: each of the two events of a job would have to look up the run. Deleting a run still
-- deletes its events.
ALTER TABLE workflow_node_events
    DROP CONSTRAINT IF EXISTS workflow_node_events_run_id_fkey,
    ADD COLUMN IF NOT EXISTS worker_id text,
    ADD COLUMN IF NOT EXISTS claim_no  bigint;
ALTER TABLE workflow_input_submissions
    ADD COLUMN IF NOT EXISTS attempts     integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at timestamptz,
    ALTER COLUMN id SET DEFAULT gen_random_uuid()::text;
ALTER TABLE worker_controls
    ADD COLUMN IF NOT EXISTS reason   text,
    ADD COLUMN IF NOT EXISTS until_at timestamptz,
    -- NOTIFY refuses payloads of 8,000 bytes, and a refused one would roll the writer back.
    ADD CONSTRAINT worker_controls_name_check
        CHECK (octet_length(host_label) BETWEEN 1 AND 400 AND octet_length(queue) BETWEEN 1 AND 200) NOT VALID;
ALTER TABLE worker_heartbeats
    ADD COLUMN IF NOT EXISTS vram_total_mb integer,
    ADD COLUMN IF NOT EXISTS detail        jsonb NOT NULL DEFAULT '{}'::jsonb,
    SET (fillfactor = 50);

DO $$
DECLARE
    v_one record;
BEGIN
    FOR v_one IN SELECT d.type, split_part(c.name, '.', 1) AS tab, split_part(c.name, '.', 2) AS col
      FROM (VALUES
        ('time', '{worker_heartbeats.last_seen, worker_heartbeats.last_flagged_dead_at, worker_controls.updated_at,
            worker_controls.until_at, workflow_dispatch_events.created_at, workflow_dispatch_events.processed_at,
            workflow_dispatch_events.available_at}'::text[]),
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

-- Rows of 0.3.0 ------------------------------------------------------------------------------------------------
-- The order of claims is that of age. A running job gets a claim of its host, fenced by its lease, which ends in 7
-- days at most. Any other job has no lease. An empty model is none.
UPDATE workflow_node_jobs j
   SET seq = line.seq, claim_no = CASE status WHEN 'running' THEN 1 ELSE 0 END,
       worker_id = CASE status WHEN 'running'
           THEN 'legacy:' || coalesce(claimed_by, host_label, 'unknown') END,
       lease_expires_at = CASE status WHEN 'running'
           THEN least(coalesce(lease_expires_at, now()), now() + interval '7 days') END,
       required_model = nullif(required_model, '')
  FROM (SELECT id, row_number() OVER (ORDER BY created_at, id) AS seq FROM workflow_node_jobs) line
 WHERE j.id = line.id;
SELECT setval(pg_get_serial_sequence('workflow_node_jobs', 'seq'),
              greatest(1, (SELECT coalesce(max(seq), 0) FROM workflow_node_jobs)));
UPDATE ingest_jobs j
   SET seq = line.seq, claim_no = CASE status WHEN 'running' THEN 1 ELSE 0 END,
       worker_id = CASE status WHEN 'running' THEN 'legacy:' || coalesce(claimed_by, 'unknown') END,
       lease_expires_at = CASE status WHEN 'running'
           THEN least(coalesce(lease_expires_at, now()), now() + interval '7 days') END
  FROM (SELECT id, row_number() OVER (ORDER BY created_at, id) AS seq FROM ingest_jobs) line
 WHERE j.id = line.id;
SELECT setval(pg_get_serial_sequence('ingest_jobs', 'seq'),
              greatest(1, (SELECT coalesce(max(seq), 0) FROM ingest_jobs)));
-- An app may have had idempotency keys of its own: of jobs that share one a live job keeps it, else the youngest.
UPDATE ingest_jobs j SET idempotency_released = true
  FROM (SELECT id, row_number() OVER (PARTITION BY idempotency_key
                                      ORDER BY status IN ('queued', 'running') DESC, seq DESC) AS place
          FROM ingest_jobs WHERE idempotency_key IS NOT NULL) line
 WHERE j.id = line.id AND line.place > 1;

-- Indexes of the tables of 0.3.0 -------------------------------------------------------------------------------
-- Where two indexes cost the same the planner may choose by their age, so their order is kept.
-- The order of claims is exactly an index. Jobs that are not due or blocked are not in it.
CREATE INDEX workflow_node_jobs_claim_idx ON workflow_node_jobs (queue, priority, seq)
    WHERE status = 'queued' AND blocked_reason IS NULL;
CREATE INDEX workflow_node_jobs_model_idx ON workflow_node_jobs (required_model, priority, seq)
    WHERE queue = 'gpu' AND status = 'queued' AND blocked_reason IS NULL;
CREATE INDEX workflow_node_jobs_blocked_idx ON workflow_node_jobs (available_at)
    WHERE status = 'queued' AND blocked_reason IS NOT NULL;
CREATE INDEX workflow_node_jobs_running_idx ON workflow_node_jobs (worker_id) WHERE status = 'running';
CREATE INDEX workflow_node_jobs_celery_task_id_idx ON workflow_node_jobs (celery_task_id)
    WHERE celery_task_id IS NOT NULL;
CREATE INDEX ingest_jobs_claim_idx ON ingest_jobs (queue, priority, seq)
    WHERE status = 'queued' AND blocked_reason IS NULL;
CREATE INDEX ingest_jobs_blocked_idx ON ingest_jobs (available_at)
    WHERE status = 'queued' AND blocked_reason IS NOT NULL;
CREATE INDEX ingest_jobs_running_idx ON ingest_jobs (worker_id) WHERE status = 'running';

-- One job of a lock key is admitted: it runs, or it is claimable. All others wait with blocked_reason 'locked'.
-- This index is the guarantee; a job without a key is not in it.
CREATE UNIQUE INDEX workflow_node_jobs_lock_idx ON workflow_node_jobs (lock_key)
    WHERE lock_key IS NOT NULL
      AND (status = 'running' OR (status = 'queued' AND blocked_reason IS NULL));
CREATE UNIQUE INDEX ingest_jobs_lock_idx ON ingest_jobs (lock_key)
    WHERE lock_key IS NOT NULL
      AND (status = 'running' OR (status = 'queued' AND blocked_reason IS NULL));
CREATE INDEX workflow_node_jobs_line_idx ON workflow_node_jobs (lock_key, priority, seq)
    WHERE lock_key IS NOT NULL AND status = 'queued' AND blocked_reason = 'locked';
CREATE INDEX ingest_jobs_line_idx ON ingest_jobs (lock_key, priority, seq)
    WHERE lock_key IS NOT NULL AND status = 'queued' AND blocked_reason = 'locked';

-- The oldest job of each model, beside its best priority.
CREATE INDEX workflow_node_jobs_age_idx ON workflow_node_jobs (required_model, seq)
    WHERE queue = 'gpu' AND status = 'queued' AND blocked_reason IS NULL;
CREATE UNIQUE INDEX ingest_jobs_idempotency_idx ON ingest_jobs (idempotency_key)
    WHERE idempotency_key IS NOT NULL AND NOT idempotency_released;

-- Jobs of a partition that run or are admitted, that wait, and that are admitted but not claimed. A job without a
-- partition key is in none of them.
CREATE INDEX ingest_jobs_partition_idx ON ingest_jobs (queue, partition_key, status)
    WHERE partition_key IS NOT NULL
      AND (status = 'running' OR (status = 'queued' AND (blocked_reason IS NULL OR admitted_at IS NOT NULL)));
CREATE INDEX ingest_jobs_limited_idx ON ingest_jobs (queue, partition_key, priority, seq)
    WHERE partition_key IS NOT NULL AND status = 'queued' AND blocked_reason = 'limited';
CREATE INDEX ingest_jobs_admitted_idx ON ingest_jobs (queue, partition_key, priority, seq)
    WHERE partition_key IS NOT NULL AND status = 'queued' AND admitted_at IS NOT NULL;
-- Jobs that wait for a lock key, by queue. The last condition is always true: only a statement that has it may use
-- the index. Without statistics others would sort all of it rather than walk the waiters of a key.
CREATE INDEX workflow_node_jobs_unserved_idx ON workflow_node_jobs (blocked_reason, queue, lock_key)
    WHERE status = 'queued' AND blocked_reason IN ('locked', 'unserved') AND octet_length(queue) >= 0;
CREATE INDEX ingest_jobs_unserved_idx ON ingest_jobs (blocked_reason, queue, lock_key)
    WHERE status = 'queued' AND blocked_reason IN ('locked', 'unserved') AND octet_length(queue) >= 0;

CREATE INDEX workflow_dispatch_events_run_idx ON workflow_dispatch_events (run_id, id) WHERE processed_at IS NULL;
-- Events are appended in time order and deleted by age: BRIN costs an insert next to nothing.
CREATE INDEX workflow_node_events_created_idx ON workflow_node_events USING brin (created_at);
CREATE INDEX workflow_runs_startable_idx ON workflow_runs (priority, queued_at, id)
    WHERE status = 'queued' AND mode = 'node' AND available_at IS NULL;
CREATE INDEX workflow_runs_delayed_idx ON workflow_runs (available_at)
    WHERE status = 'queued' AND mode = 'node' AND available_at IS NOT NULL;

-- New tables: workers, gpu fleet -------------------------------------------------------------------------------
CREATE TABLE workers (
    worker_id     text PRIMARY KEY,
    host_label    text NOT NULL,
    queue         text NOT NULL,
    pid           integer NOT NULL,
    state         text NOT NULL DEFAULT 'idle',
    job_ids       text[] NOT NULL DEFAULT '{}',
    detail        jsonb NOT NULL DEFAULT '{}'::jsonb,
    started_at    queue_workflows_time NOT NULL DEFAULT now(),
    last_seen     queue_workflows_time NOT NULL DEFAULT now(),
    -- What a gpu worker reported last. known_models NULL: it can load any model.
    current_model text,
    model_since   queue_workflows_time,
    known_models  text[],
    vram_total_mb integer,
    CONSTRAINT workers_state_check CHECK (state IN (
        'idle', 'busy', 'parked', 'draining', 'paused', 'throttled', 'stopped', 'dead'))
) WITH (fillfactor = 50);
CREATE INDEX workers_host_idx ON workers (host_label, queue);

-- A model on a host: its size as registered there, and moving averages of the times of loads and runs.
CREATE TABLE gpu_models (
    model       text NOT NULL,
    host_label  text NOT NULL,
    est_vram_gb double precision,
    load_s      queue_workflows_seconds,
    loads       bigint NOT NULL DEFAULT 0,
    run_s       queue_workflows_seconds,
    runs        bigint NOT NULL DEFAULT 0,
    updated_at  queue_workflows_time NOT NULL DEFAULT now(),
    PRIMARY KEY (model, host_label)
) WITH (fillfactor = 50);
-- The models whose jobs no live worker can take. One row a model, as many jobs may wait for it.
CREATE TABLE gpu_unassignable (
    model  text PRIMARY KEY,
    reason text NOT NULL,
    detail text NOT NULL,
    since  queue_workflows_time NOT NULL DEFAULT now()
);
-- Requests to gpu workers to load or unload a model: the newest for a host (worker_id '': each of its gpu workers)
-- or for one worker, which answers in its row of `workers`. A trigger numbers every write.
CREATE SEQUENCE model_controls_request_seq;
CREATE TABLE model_controls (
    host_label   text NOT NULL,
    worker_id    text NOT NULL DEFAULT '',
    action       text NOT NULL,
    model        text,
    requested_by text,
    request_no   bigint NOT NULL DEFAULT 0,
    requested_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (host_label, worker_id),
    CONSTRAINT model_controls_action_check CHECK (action IN ('load', 'unload')),
    CONSTRAINT model_controls_model_check CHECK (model IS NOT NULL OR action = 'unload')
);
ALTER SEQUENCE model_controls_request_seq OWNED BY model_controls.request_no;
-- Hardware samples of each host in two rings: one every 2 s for an hour, one every 60 s for a day. A slot that was
-- missed holds a sample that is older than its ring, so readers select by time.
CREATE TABLE hw_samples (
    host_label text NOT NULL,
    every_s    smallint NOT NULL,
    slot       smallint NOT NULL,
    sampled_at queue_workflows_time NOT NULL DEFAULT now(),
    sample     jsonb NOT NULL,
    PRIMARY KEY (host_label, every_s, slot),
    CONSTRAINT hw_samples_every_check CHECK (every_s IN (2, 60))
) WITH (fillfactor = 50);

-- New tables: history, logs, schedules, inputs -----------------------------------------------------------------
CREATE TABLE ingest_job_events (
    id         bigserial,
    job_id     text NOT NULL,
    attempt    integer NOT NULL DEFAULT 0,
    event_type text NOT NULL,
    claim_no   bigint,
    worker_id  text,
    host_label text,
    queue      text,
    elapsed_s  double precision,
    error      text,
    detail     jsonb NOT NULL DEFAULT '{}'::jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    -- Who, where no worker did it by itself: a person, plain SQL of an app, a sweep.
    actor      text,
    PRIMARY KEY (job_id, id)
);
CREATE INDEX ingest_job_events_created_idx ON ingest_job_events USING brin (created_at);
-- What handlers print: one row an attempt, only for those that print. Apart from the rows that claims write, and
-- without a foreign key, which every change of a job would have to check.
CREATE TABLE job_attempt_logs (
    job_table  text NOT NULL,
    job_id     text NOT NULL,
    claim_no   bigint NOT NULL,
    head       text NOT NULL DEFAULT '',
    tail       text NOT NULL DEFAULT '',
    cut_bytes  bigint NOT NULL DEFAULT 0,
    created_at queue_workflows_time NOT NULL DEFAULT now(),
    updated_at queue_workflows_time NOT NULL DEFAULT now(),
    PRIMARY KEY (job_id, claim_no, job_table)
);
CREATE INDEX job_attempt_logs_created_idx ON job_attempt_logs USING brin (created_at);
CREATE TABLE schedule_fires (
    name       text NOT NULL,
    fire_at    queue_workflows_time NOT NULL,
    job_id     text,
    created_at queue_workflows_time NOT NULL DEFAULT now(),
    PRIMARY KEY (name, fire_at)
);
-- Until when input nodes wait for an answer, for those that do not wait for ever.
CREATE TABLE workflow_input_timeouts (
    job_id   text PRIMARY KEY,
    claim_no bigint NOT NULL,
    due_at   queue_workflows_time NOT NULL
);
CREATE INDEX workflow_input_timeouts_due_idx ON workflow_input_timeouts (due_at);

-- New tables: settings and limits of queues --------------------------------------------------------------------
-- A queue without a row has the defaults.
CREATE TABLE queue_settings (
    queue          text PRIMARY KEY CHECK (queue <> ''),
    -- Days after which its finished jobs are deleted; 0: never. NULL: as configured.
    retention_days double precision CHECK (retention_days >= 0),
    updated_at     queue_workflows_time NOT NULL DEFAULT now(),
    paused_at      queue_workflows_time,
    -- When a pause ends by itself; NULL: never.
    paused_until   queue_workflows_time,
    paused_by      text,
    max_running    integer CHECK (max_running > 0),
    -- At most rate_limit starts in any rate_period_s seconds.
    rate_limit     integer CHECK (rate_limit > 0),
    rate_period_s  queue_workflows_period_s CHECK (rate_period_s > 0),
    -- The same for each of its partition keys, where queue_partitions does not say otherwise.
    partition_max_running   integer CHECK (partition_max_running > 0),
    partition_rate_limit    integer CHECK (partition_rate_limit > 0),
    partition_rate_period_s queue_workflows_period_s CHECK (partition_rate_period_s > 0),
    CONSTRAINT queue_settings_rates_check CHECK (
        (rate_limit IS NULL) = (rate_period_s IS NULL)
        AND (partition_rate_limit IS NULL) = (partition_rate_period_s IS NULL))
);
-- Settings of one partition key of a queue. NULL: as queue_settings says for each partition.
CREATE TABLE queue_partitions (
    queue         text NOT NULL CHECK (queue <> ''),
    partition_key text NOT NULL,
    paused_at     queue_workflows_time,
    paused_until  queue_workflows_time,
    paused_by     text,
    max_running   integer CHECK (max_running > 0),
    rate_limit    integer CHECK (rate_limit > 0),
    rate_period_s queue_workflows_period_s CHECK (rate_period_s > 0),
    updated_at    queue_workflows_time NOT NULL DEFAULT now(),
    PRIMARY KEY (queue, partition_key),
    CONSTRAINT queue_partitions_rate_check CHECK ((rate_limit IS NULL) = (rate_period_s IS NULL))
);
-- The queues whose partitions have limits.
CREATE VIEW queue_partition_limits AS
    SELECT s.queue FROM queue_settings s
     WHERE s.partition_max_running IS NOT NULL OR s.partition_rate_limit IS NOT NULL
        OR EXISTS (SELECT FROM queue_partitions p WHERE p.queue = s.queue);
-- The last rate_limit starts of a queue or partition, numbered: the n-th may follow when the one of rate_limit
-- places before it is as old as the period. A queue without a rate has no rows.
CREATE TABLE queue_starts (
    queue      text NOT NULL,
    n          queue_workflows_number NOT NULL,
    started_at queue_workflows_time NOT NULL,
    PRIMARY KEY (queue, n)
);
CREATE TABLE partition_starts (
    queue         text NOT NULL,
    partition_key text NOT NULL,
    n             queue_workflows_number NOT NULL,
    started_at    queue_workflows_time NOT NULL,
    PRIMARY KEY (queue, partition_key, n)
);
-- When a partition must be checked again. Rows are only added and deleted, so that an older snapshot may add one.
CREATE TABLE partition_dues (
    id            bigserial PRIMARY KEY,
    queue         text NOT NULL,
    partition_key text NOT NULL,
    due_at        queue_workflows_due NOT NULL
);
CREATE INDEX partition_dues_due_idx ON partition_dues (queue, due_at);
CREATE INDEX partition_dues_partition_idx ON partition_dues (queue, partition_key);
-- The lock keys, and the partitions with the number of their jobs that it started, that a transaction checks when it
-- commits. `admits`: the commit admits their jobs now. Empty but for open transactions, so that a crash of the
-- server, which empties them, loses nothing.
CREATE UNLOGGED TABLE lock_turns (
    id       bigserial PRIMARY KEY,
    xid      xid8 NOT NULL DEFAULT pg_current_xact_id(),
    jobs     text NOT NULL,
    lock_key text NOT NULL,
    admits   boolean NOT NULL DEFAULT false
);
CREATE INDEX lock_turns_xid_idx ON lock_turns (xid);
CREATE UNLOGGED TABLE partition_turns (
    xid           xid8 NOT NULL DEFAULT pg_current_xact_id(),
    queue         text NOT NULL,
    partition_key text NOT NULL,
    starts        integer NOT NULL DEFAULT 0,
    admits        boolean NOT NULL DEFAULT false,
    PRIMARY KEY (xid, queue, partition_key, admits)
);

-- Functions and triggers ---------------------------------------------------------------------------------------
-- What is installed of queue_workflows/sql/: the checksum of each part's files, the package that installed it, and
-- a hash of each object as the catalog described it then.
CREATE TABLE queue_schema_objects (
    part            text PRIMARY KEY,
    checksum        text NOT NULL,
    package_version text NOT NULL,
    objects         jsonb NOT NULL,
    installed_at    timestamptz NOT NULL DEFAULT now()
);
-- Every worker compares it with its own, whatever it may read else.
GRANT SELECT ON queue_schema_objects TO PUBLIC;
-- What queue_workflows_node_step returns of the node that it claims. run: its id, out_dir, workflow_name,
-- generation, and born, in microseconds since the epoch.
CREATE TYPE queue_workflows_claimed_node AS (
    id text, run_id text, node_id text, node_module text, queue text, required_model text,
    status text, pipeline_name text, priority smallint, seq bigint, claim_no bigint, worker_id text,
    claimed_by text, generation integer, attempts integer, max_attempts integer, crash_count integer,
    watchdog_retries integer, timeout_s double precision, inputs jsonb, input_template jsonb,
    ref_heads text[], run json, context jsonb);
-- A worker, the model that it holds or loads, in how many seconds it is free, and how long a run takes there.
CREATE TYPE queue_workflows_gpu_holder AS (
    host_label text, model text, free_s double precision, run_s double precision);
-- The waiting jobs of a model: the first of its best priority, and the oldest.
CREATE TYPE queue_workflows_gpu_line AS (
    model text, priority smallint, seq bigint, waited_s double precision,
    oldest_seq bigint, oldest_s double precision);

-- Constraints that no old row is checked for -------------------------------------------------------------------
ALTER DOMAIN queue_workflows_queue_name ADD CONSTRAINT queue_workflows_queue_name_check
    CHECK (octet_length(VALUE) BETWEEN 1 AND 200) NOT VALID;
ALTER DOMAIN queue_workflows_node_event ADD CONSTRAINT queue_workflows_node_event_check CHECK (VALUE IN (
    'claimed', 'model_load_start', 'model_load_done', 'progress_beat', 'stall_suspected',
    'stall_trip', 'gpu_health_trip', 'budget_trip', 'requeued', 'reassigned', 'lease_renew',
    'completed', 'failed', 'cancelled', 'error',
    'parked', 'reclaimed', 'retried', 'skipped', 'death', 'unassignable', 'assignable')) NOT VALID;
ALTER DOMAIN queue_workflows_time ADD CONSTRAINT queue_workflows_time_check
    CHECK (VALUE BETWEEN '2000-01-01+00' AND '9999-12-31+00') NOT VALID;
-- The check of a partition that is paused without an end is due at infinity.
ALTER DOMAIN queue_workflows_due ADD CONSTRAINT queue_workflows_due_check
    CHECK (VALUE >= '2000-01-01+00' AND (VALUE <= '9999-12-31+00' OR VALUE = 'infinity')) NOT VALID;
ALTER DOMAIN queue_workflows_period_s ADD CONSTRAINT queue_workflows_period_s_check
    CHECK (VALUE > 0 AND VALUE <= 31622400) NOT VALID;
ALTER DOMAIN queue_workflows_seconds ADD CONSTRAINT queue_workflows_seconds_check
    CHECK (VALUE BETWEEN 0 AND 31622400) NOT VALID;
ALTER DOMAIN queue_workflows_number ADD CONSTRAINT queue_workflows_number_check
    CHECK (VALUE BETWEEN 0 AND 1000000000000000000) NOT VALID;
ALTER DOMAIN queue_workflows_tries ADD CONSTRAINT queue_workflows_tries_check CHECK (VALUE >= 0) NOT VALID;
-- An upper bound also excludes NaN, which is above every number.
ALTER TABLE queue_settings ADD CONSTRAINT queue_settings_retention_bound CHECK (retention_days <= 36600) NOT VALID;
ALTER TABLE gpu_models ADD CONSTRAINT gpu_models_size_bound CHECK (est_vram_gb BETWEEN -1e9 AND 1e9) NOT VALID;
