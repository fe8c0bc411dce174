-- Events of apps, which handlers wait for. The first of a name and key counts. Deleted by age.
CREATE TABLE events (
    name       text NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 400),
    key        text NOT NULL DEFAULT '' CHECK (octet_length(key) <= 1000),
    value      jsonb NOT NULL DEFAULT 'null' CONSTRAINT events_value_bound CHECK (octet_length(value::text) <= 1048576),
    created_at queue_workflows_time NOT NULL DEFAULT now(),
    PRIMARY KEY (name, key)
);
CREATE INDEX events_created_idx ON events USING brin (created_at);
-- The waits that a new event may end.
CREATE INDEX job_steps_waiting_idx ON job_steps (name, key) WHERE kind = 'event' AND state = 'waiting';
