-- What an operator says about one queue; a queue without a row has the defaults.
CREATE TABLE IF NOT EXISTS queue_settings (
    queue          text PRIMARY KEY CHECK (queue <> ''),
    -- Days after which its finished jobs are deleted; 0: never. NULL: the knob's.
    retention_days double precision CHECK (retention_days >= 0),
    updated_at     timestamptz NOT NULL DEFAULT now()
);
