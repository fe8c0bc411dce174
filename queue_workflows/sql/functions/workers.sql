-- Switches, requests and samples of workers.

-- Return how the worker of a host and queue must stop, or NULL while it is ON. A row of queue 'all' applies to
-- every queue.
CREATE OR REPLACE FUNCTION queue_workflows_off_policy(p_host text, p_queue text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT stop_policy FROM worker_controls
     WHERE host_label = p_host AND queue IN (p_queue, 'all') AND queue_workflows_is_off(desired_state, until_at)
     ORDER BY stop_policy <> 'hard', queue = 'all' LIMIT 1
$$;

-- Drop the end of a switch when the state is written without a new end. Statements of 0.3.0 do not know
-- until_at: an end in the past would turn their OFF into ON.
CREATE OR REPLACE FUNCTION queue_workflows_drop_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.desired_state = 'on' OR (NEW.until_at = OLD.until_at AND OLD.until_at <= now()) THEN
        NEW.until_at := NULL;
    END IF;
    RETURN NEW;
END $$;

-- Number and date a request to load or unload a model, and wake the worker. Every write is a new request.
CREATE OR REPLACE FUNCTION queue_workflows_number_model_request() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.request_no := nextval('model_controls_request_seq');
    -- Not now(): the request also concerns a worker that reported while this transaction was open.
    NEW.requested_at := clock_timestamp();
    PERFORM pg_notify('worker_control', NEW.host_label || ':gpu');
    RETURN NEW;
END $$;

-- Store a hardware sample in its ring, and publish it if `tell`. The ring of 2 s holds an hour, that of 60 s a
-- day.
CREATE OR REPLACE FUNCTION queue_workflows_put_sample(host text, every integer, taken jsonb, tell boolean)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- The commit need not wait for the disk: the next sample replaces a lost one.
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

-- Return whether a control row with these columns switches workers off now. Without a SET clause, so that it is inlined.
CREATE OR REPLACE FUNCTION queue_workflows_is_off(p_desired_state text, p_until_at timestamptz)
RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT p_desired_state = 'off' AND (p_until_at IS NULL OR p_until_at > now())
$$;
