CREATE TABLE IF NOT EXISTS workflow_dispatch_events (
    id           bigserial PRIMARY KEY,
    run_id       text NOT NULL REFERENCES workflow_runs (id) ON DELETE CASCADE,
    node_id      text NOT NULL,
    kind         text NOT NULL,
    processed_at timestamptz,
    error        text,
    attempts     smallint NOT NULL DEFAULT 0,
    created_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT workflow_dispatch_events_kind_check CHECK (kind IN (
        'completed', 'failed', 'awaiting_input'))
);
CREATE INDEX IF NOT EXISTS workflow_dispatch_events_unprocessed_idx
    ON workflow_dispatch_events (id) WHERE processed_at IS NULL;
