CREATE TABLE IF NOT EXISTS worker_heartbeats (
    host_label    text NOT NULL,
    queue         text NOT NULL,
    concurrency   integer NOT NULL DEFAULT 1,
    current_model text,
    known_models  text[] NOT NULL DEFAULT '{}',
    last_seen     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (host_label, queue),
    CONSTRAINT worker_heartbeats_queue_check CHECK (queue IN ('cpu', 'gpu'))
);
CREATE INDEX IF NOT EXISTS worker_heartbeats_last_seen_idx ON worker_heartbeats (last_seen);
CREATE INDEX IF NOT EXISTS worker_heartbeats_known_models_gin
    ON worker_heartbeats USING gin (known_models);
