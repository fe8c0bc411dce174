-- Outbox rows know the claim that wrote them; input answers are retried; every ingest transition is audited.
ALTER TABLE workflow_dispatch_events
    ADD COLUMN IF NOT EXISTS job_id       text,
    ADD COLUMN IF NOT EXISTS claim_no     bigint,
    ADD COLUMN IF NOT EXISTS generation   integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at timestamptz;
CREATE INDEX IF NOT EXISTS workflow_dispatch_events_run_idx
    ON workflow_dispatch_events (run_id, id) WHERE processed_at IS NULL;

-- Two events a job: neither a CHECK to parse nor a look-up of the run for each. Deleting a run still
-- deletes its events.
CREATE DOMAIN queue_workflows_node_event AS text CHECK (VALUE IN (
    'claimed', 'model_load_start', 'model_load_done', 'progress_beat', 'stall_suspected',
    'stall_trip', 'gpu_health_trip', 'budget_trip', 'requeued', 'reassigned', 'lease_renew',
    'completed', 'failed', 'cancelled', 'error',
    'parked', 'reclaimed', 'retried', 'skipped', 'death'));
ALTER TABLE workflow_node_events DROP CONSTRAINT IF EXISTS workflow_node_events_type_check;
DO $$ BEGIN
    ALTER TABLE workflow_node_events ALTER COLUMN event_type TYPE queue_workflows_node_event;
EXCEPTION WHEN feature_not_supported THEN
    -- A view of the host's names the column: its type stays, and a CHECK says the same.
    ALTER TABLE workflow_node_events ADD CONSTRAINT workflow_node_events_type_check
        CHECK (event_type::queue_workflows_node_event IS NOT NULL);
END $$;
ALTER TABLE workflow_node_events
    DROP CONSTRAINT IF EXISTS workflow_node_events_run_id_fkey,
    ADD COLUMN IF NOT EXISTS worker_id text,
    ADD COLUMN IF NOT EXISTS claim_no  bigint;
CREATE OR REPLACE FUNCTION queue_workflows_forget_runs() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM workflow_node_events e USING gone WHERE e.run_id = gone.id;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS workflow_runs_forget ON workflow_runs;
CREATE TRIGGER workflow_runs_forget AFTER DELETE ON workflow_runs
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION queue_workflows_forget_runs();
-- Events are appended in time order and pruned by age: BRIN costs an insert next to nothing.
DROP INDEX IF EXISTS workflow_node_events_created_idx;
CREATE INDEX workflow_node_events_created_idx ON workflow_node_events USING brin (created_at);

ALTER TABLE workflow_input_submissions
    ADD COLUMN IF NOT EXISTS attempts     integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS available_at timestamptz,
    ALTER COLUMN id SET DEFAULT gen_random_uuid()::text;

CREATE INDEX IF NOT EXISTS workflow_runs_startable_idx ON workflow_runs (priority, queued_at, id)
    WHERE status = 'queued' AND mode = 'node' AND available_at IS NULL;
CREATE INDEX IF NOT EXISTS workflow_runs_delayed_idx ON workflow_runs (available_at)
    WHERE status = 'queued' AND mode = 'node' AND available_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS ingest_job_events (
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
    PRIMARY KEY (job_id, id)
);
CREATE INDEX IF NOT EXISTS ingest_job_events_created_idx ON ingest_job_events USING brin (created_at);

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
