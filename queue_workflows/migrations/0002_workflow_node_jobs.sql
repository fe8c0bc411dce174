CREATE TABLE IF NOT EXISTS workflow_node_jobs (
    id              text PRIMARY KEY,
    run_id          text NOT NULL REFERENCES workflow_runs (id) ON DELETE CASCADE,
    node_id         text NOT NULL,
    node_module     text NOT NULL,
    pipeline_name   text,
    queue           text NOT NULL,
    required_model  text,
    status          text NOT NULL,
    priority        smallint NOT NULL DEFAULT 100,
    worker_lane     smallint,
    inputs          jsonb NOT NULL DEFAULT '{}'::jsonb,
    resolved_inputs jsonb,
    input_spec      jsonb,
    context_delta   jsonb NOT NULL DEFAULT '{}'::jsonb,
    host_label      text,
    celery_task_id  text,
    error           text,
    vm_rss_mb_peak  integer,
    seconds         double precision,
    created_at      timestamptz NOT NULL DEFAULT now(),
    started_at      timestamptz,
    finished_at     timestamptz,
    CONSTRAINT workflow_node_jobs_queue_check CHECK (queue IN ('cpu', 'gpu')),
    CONSTRAINT workflow_node_jobs_status_check CHECK (status IN (
        'queued', 'running', 'completed', 'failed', 'cancelled', 'awaiting_input', 'skipped')),
    CONSTRAINT workflow_node_jobs_check CHECK (queue = 'gpu' OR required_model IS NULL),
    UNIQUE (run_id, node_id)
);
CREATE INDEX IF NOT EXISTS workflow_node_jobs_claim_idx
    ON workflow_node_jobs (queue, status, priority, created_at);
CREATE INDEX IF NOT EXISTS workflow_node_jobs_run_idx ON workflow_node_jobs (run_id);
CREATE INDEX IF NOT EXISTS workflow_node_jobs_status_idx ON workflow_node_jobs (status);
CREATE INDEX IF NOT EXISTS workflow_node_jobs_model_idx
    ON workflow_node_jobs (required_model) WHERE required_model IS NOT NULL;
CREATE INDEX IF NOT EXISTS workflow_node_jobs_pipeline_idx ON workflow_node_jobs (pipeline_name);
CREATE INDEX IF NOT EXISTS workflow_node_jobs_host_label_idx ON workflow_node_jobs (host_label);
CREATE INDEX IF NOT EXISTS workflow_node_jobs_celery_task_id_idx ON workflow_node_jobs (celery_task_id);
