-- The trace context of who submitted a run, in the member `traceparent` of its headers, as ingest jobs have it.
ALTER TABLE workflow_runs ADD COLUMN headers jsonb
    CHECK (jsonb_typeof(headers) = 'object' AND octet_length(headers::text) <= 8000);
-- Who exports the history: the last events that were exported, all earlier ones with them.
CREATE TABLE event_exports (
    name          text PRIMARY KEY CHECK (octet_length(name) <= 1000),
    node_event    bigint NOT NULL DEFAULT 0,
    ingest_event  bigint NOT NULL DEFAULT 0,
    taken_by      text CHECK (octet_length(taken_by) <= 1000),
    taken_until   queue_workflows_time,
    created_at    queue_workflows_time NOT NULL DEFAULT now(),
    updated_at    queue_workflows_time NOT NULL DEFAULT now()
);
-- Runs with exported events whose own end is not exported yet.
CREATE TABLE event_export_runs (
    name   text NOT NULL REFERENCES event_exports ON DELETE CASCADE,
    run_id text NOT NULL,
    PRIMARY KEY (name, run_id)
);
CREATE INDEX ingest_job_events_id_idx ON ingest_job_events USING brin (id)
    WITH (pages_per_range = 32, autosummarize = on);
