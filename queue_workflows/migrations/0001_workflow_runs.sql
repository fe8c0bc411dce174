CREATE TABLE IF NOT EXISTS workflow_runs (
    id              text PRIMARY KEY,
    parcel_id       text,
    workflow_name   text NOT NULL,
    status          text NOT NULL,
    priority        smallint NOT NULL DEFAULT 100,
    current_step_id text,
    progress_pct    real NOT NULL DEFAULT 0,
    steps_done      jsonb NOT NULL DEFAULT '[]'::jsonb,
    context         jsonb NOT NULL DEFAULT '{}'::jsonb,
    input_spec      jsonb,
    error           text,
    out_dir         text,
    mode            text NOT NULL DEFAULT 'step',
    resume_count    smallint NOT NULL DEFAULT 0,
    created_at      timestamptz NOT NULL DEFAULT now(),
    updated_at      timestamptz NOT NULL DEFAULT now(),
    queued_at       timestamptz,
    started_at      timestamptz,
    finished_at     timestamptz,
    CONSTRAINT workflow_runs_mode_check CHECK (mode IN ('step', 'node'))
);
CREATE INDEX IF NOT EXISTS workflow_runs_claim_idx ON workflow_runs (status, priority, queued_at);
CREATE INDEX IF NOT EXISTS workflow_runs_parcel_created_idx ON workflow_runs (parcel_id, created_at DESC);
CREATE INDEX IF NOT EXISTS workflow_runs_status_idx ON workflow_runs (status);

CREATE TABLE IF NOT EXISTS workflow_run_files (
    id         bigserial PRIMARY KEY,
    run_id     text NOT NULL REFERENCES workflow_runs (id) ON DELETE CASCADE,
    step_id    text,
    rel_path   text NOT NULL,
    kind       text,
    size_bytes bigint,
    is_primary boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (run_id, rel_path)
);
CREATE INDEX IF NOT EXISTS workflow_run_files_run_idx ON workflow_run_files (run_id);
CREATE INDEX IF NOT EXISTS workflow_run_files_kind_idx ON workflow_run_files (kind);
