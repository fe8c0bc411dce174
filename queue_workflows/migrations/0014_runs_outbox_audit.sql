-- Outbox rows know the claim that wrote them; input answers are retried; every ingest transition is audited.
ALTER TABLE workflow_dispatch_events
    ADD COLUMN IF NOT EXISTS job_id       text,
    ADD COLUMN IF NOT EXISTS claim_no     bigint,
    ADD COLUMN IF NOT EXISTS generation   integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at timestamptz;
CREATE INDEX IF NOT EXISTS workflow_dispatch_events_run_idx
    ON workflow_dispatch_events (run_id, id) WHERE processed_at IS NULL;

ALTER TABLE workflow_node_events
    ADD COLUMN IF NOT EXISTS worker_id text,
    ADD COLUMN IF NOT EXISTS claim_no  bigint;
ALTER TABLE workflow_node_events DROP CONSTRAINT IF EXISTS workflow_node_events_type_check;
ALTER TABLE workflow_node_events ADD CONSTRAINT workflow_node_events_type_check CHECK (event_type IN (
    'claimed', 'model_load_start', 'model_load_done', 'progress_beat', 'stall_suspected',
    'stall_trip', 'gpu_health_trip', 'budget_trip', 'requeued', 'reassigned', 'lease_renew',
    'completed', 'failed', 'cancelled', 'error',
    'parked', 'reclaimed', 'retried', 'skipped', 'death')) NOT VALID;

ALTER TABLE workflow_input_submissions
    ADD COLUMN IF NOT EXISTS attempts     integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at timestamptz,
    ALTER COLUMN id SET DEFAULT gen_random_uuid()::text;

CREATE INDEX IF NOT EXISTS workflow_runs_startable_idx ON workflow_runs (priority, queued_at, id)
    WHERE status = 'queued' AND mode = 'node' AND available_at IS NULL;
CREATE INDEX IF NOT EXISTS workflow_runs_delayed_idx ON workflow_runs (available_at)
    WHERE status = 'queued' AND mode = 'node' AND available_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS ingest_job_events (
    id         bigserial PRIMARY KEY,
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
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS ingest_job_events_job_idx ON ingest_job_events (job_id, id);

CREATE TABLE IF NOT EXISTS schedule_fires (
    name       text NOT NULL,
    fire_at    timestamptz NOT NULL,
    job_id     text,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (name, fire_at)
);

CREATE TABLE IF NOT EXISTS workers (
    worker_id  text PRIMARY KEY,
    host_label text NOT NULL,
    queue      text NOT NULL,
    pid        integer NOT NULL,
    state      text NOT NULL DEFAULT 'idle',
    job_ids    text[] NOT NULL DEFAULT '{}',
    detail     jsonb NOT NULL DEFAULT '{}'::jsonb,
    started_at timestamptz NOT NULL DEFAULT now(),
    last_seen  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT workers_state_check CHECK (state IN (
        'idle', 'busy', 'parked', 'draining', 'paused', 'throttled', 'stopped', 'dead'))
) WITH (fillfactor = 50);
CREATE INDEX IF NOT EXISTS workers_host_idx ON workers (host_label, queue);

ALTER TABLE worker_controls
    ADD COLUMN IF NOT EXISTS reason   text,
    ADD COLUMN IF NOT EXISTS until_at timestamptz;
ALTER TABLE worker_heartbeats
    ADD COLUMN IF NOT EXISTS vram_total_mb integer,
    ADD COLUMN IF NOT EXISTS detail        jsonb NOT NULL DEFAULT '{}'::jsonb;
