CREATE TABLE IF NOT EXISTS workflow_node_events (
    id         bigserial PRIMARY KEY,
    run_id     text NOT NULL REFERENCES workflow_runs (id) ON DELETE CASCADE,
    node_id    text NOT NULL,
    job_id     text,
    attempt    smallint NOT NULL DEFAULT 0,
    event_type text NOT NULL,
    host_label text,
    queue      text,
    model      text,
    elapsed_s  double precision,
    error      text,
    detail     jsonb NOT NULL DEFAULT '{}'::jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT workflow_node_events_type_check CHECK (event_type IN (
        'claimed', 'model_load_start', 'model_load_done', 'progress_beat', 'stall_suspected',
        'stall_trip', 'gpu_health_trip', 'budget_trip', 'requeued', 'reassigned', 'lease_renew',
        'completed', 'failed', 'cancelled', 'error'))
);
CREATE INDEX IF NOT EXISTS workflow_node_events_node_idx
    ON workflow_node_events (run_id, node_id, created_at);
CREATE INDEX IF NOT EXISTS workflow_node_events_created_idx ON workflow_node_events (created_at);
