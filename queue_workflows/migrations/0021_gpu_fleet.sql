-- What gpu workers are asked to hold, beside ON/OFF: the newest request for a host (worker_id '': each of its
-- gpu workers) or for one worker. A write is a request, whoever makes it; it is numbered here, and wakes the
-- worker, which answers in its row of `workers`.
CREATE SEQUENCE IF NOT EXISTS model_controls_request_seq;
CREATE TABLE IF NOT EXISTS model_controls (
    host_label   text NOT NULL,
    worker_id    text NOT NULL DEFAULT '',
    action       text NOT NULL,
    model        text,
    requested_by text,
    request_no   bigint NOT NULL DEFAULT 0,
    requested_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (host_label, worker_id),
    CONSTRAINT model_controls_action_check CHECK (action IN ('load', 'unload')),
    CONSTRAINT model_controls_model_check CHECK (model IS NOT NULL OR action = 'unload')
);
ALTER SEQUENCE model_controls_request_seq OWNED BY model_controls.request_no;

CREATE OR REPLACE FUNCTION queue_workflows_number_model_request() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.request_no := nextval('model_controls_request_seq');
    -- Not now(): a worker that reported while this transaction was open is meant, too.
    NEW.requested_at := clock_timestamp();
    PERFORM pg_notify('worker_control', NEW.host_label || ':gpu');
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS model_controls_number ON model_controls;
CREATE TRIGGER model_controls_number BEFORE INSERT OR UPDATE ON model_controls
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_number_model_request();

-- What the boxes did lately: two rings a host, of a sample every 2 s for an hour and every 60 s for a day, each
-- slot overwritten in its turn. What lies in a slot that was missed is older than its ring: readers go by time.
CREATE TABLE IF NOT EXISTS hw_samples (
    host_label text NOT NULL,
    every_s    smallint NOT NULL,
    slot       smallint NOT NULL,
    sampled_at timestamptz NOT NULL DEFAULT now(),
    sample     jsonb NOT NULL,
    PRIMARY KEY (host_label, every_s, slot),
    CONSTRAINT hw_samples_every_check CHECK (every_s IN (2, 60))
) WITH (fillfactor = 50);

CREATE OR REPLACE FUNCTION queue_workflows_put_sample(host text, every integer, taken jsonb, tell boolean)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- The commit waits for no disk: the next sample is at hand.
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO hw_samples (host_label, every_s, slot, sampled_at, sample)
    SELECT host, every,
           floor(extract(epoch FROM now()) / every)::bigint % CASE every WHEN 2 THEN 1800 ELSE 1440 END,
           now(), taken
     WHERE every IS NOT NULL
    ON CONFLICT (host_label, every_s, slot)
    DO UPDATE SET sampled_at = excluded.sampled_at, sample = excluded.sample;
    IF tell THEN
        PERFORM pg_notify('hw_metrics', (jsonb_build_object('host', host, 'sampled_at',
            to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"+00:00"')) || taken)::text);
    END IF;
END $$;
