CREATE TABLE IF NOT EXISTS workflow_input_submissions (
    id           text PRIMARY KEY,
    run_id       text NOT NULL REFERENCES workflow_runs (id) ON DELETE CASCADE,
    node_id      text NOT NULL,
    value        jsonb,
    status       text NOT NULL DEFAULT 'pending',
    error        text,
    claimed_at   timestamptz,
    created_at   timestamptz NOT NULL DEFAULT now(),
    processed_at timestamptz,
    CONSTRAINT workflow_input_submissions_status_check CHECK (status IN (
        'pending', 'processing', 'processed', 'failed'))
);
CREATE INDEX IF NOT EXISTS workflow_input_submissions_pending_idx
    ON workflow_input_submissions (created_at) WHERE status = 'pending';
CREATE UNIQUE INDEX IF NOT EXISTS workflow_input_submissions_inflight_unique
    ON workflow_input_submissions (run_id, node_id) WHERE status IN ('pending', 'processing');
