-- What a host may say of a job that it queues: keys by which a second request is the first one, for plain
-- SQL as well, and any number of jobs in one call on any driver's connection.

ALTER TABLE ingest_jobs
    -- For how long after its creation a job keeps its key although it has ended. NULL: a day.
    ADD COLUMN IF NOT EXISTS idempotency_window_s double precision,
    ADD COLUMN IF NOT EXISTS idempotency_released boolean NOT NULL DEFAULT false;

-- Of rows of before that share a key a live one keeps it, else the youngest.
UPDATE ingest_jobs j SET idempotency_released = true
  FROM (SELECT id, row_number() OVER (PARTITION BY idempotency_key
                                      ORDER BY status IN ('queued', 'running') DESC, seq DESC) AS place
          FROM ingest_jobs WHERE idempotency_key IS NOT NULL) line
 WHERE j.id = line.id AND line.place > 1;

CREATE UNIQUE INDEX ingest_jobs_idempotency_idx ON ingest_jobs (idempotency_key)
    WHERE idempotency_key IS NOT NULL AND NOT idempotency_released;

-- Take a key from a job that has ended and whose window is over. As its owner (see the end): whoever may
-- only insert jobs may give them a key.
CREATE OR REPLACE FUNCTION queue_workflows_release_key(p_key text) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
BEGIN
    UPDATE ingest_jobs j SET idempotency_released = true
     WHERE j.idempotency_key = p_key AND NOT j.idempotency_released
       AND j.status IN ('completed', 'failed', 'cancelled')
       -- 366 days at the most, whatever a plain UPDATE put there.
       AND j.created_at <= now() - least(greatest(coalesce(j.idempotency_window_s, 86400), 0), 31622400)
           * interval '1 second';
END $$;

-- As 0017's for both families, which stays the nodes'; and a key is taken from whom it is no longer due.
CREATE OR REPLACE FUNCTION queue_workflows_hold_ingest() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.available_at > now() AND NEW.blocked_reason IS NULL THEN
        NEW.blocked_reason := 'not_due';
    END IF;
    IF NEW.lock_key IS NOT NULL AND NEW.status = 'queued' THEN
        IF NEW.blocked_reason IS NULL THEN
            NEW.blocked_reason := 'locked';
        END IF;
        PERFORM queue_workflows_ask_turn(TG_TABLE_NAME, NEW.lock_key);
    END IF;
    IF NEW.idempotency_key IS NOT NULL AND NOT NEW.idempotency_released THEN
        IF NOT coalesce(NEW.idempotency_window_s, 0) BETWEEN 0 AND 31622400 THEN
            RAISE EXCEPTION 'idempotency_window_s must be 0 to 31622400 (366 days), not %',
                NEW.idempotency_window_s USING ERRCODE = 'check_violation';
        END IF;
        PERFORM queue_workflows_release_key(NEW.idempotency_key);
    END IF;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS ingest_jobs_hold ON ingest_jobs;
CREATE TRIGGER ingest_jobs_hold BEFORE INSERT ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_hold_ingest();

-- A job that runs again needs its key again; whoever has it by now keeps it, which the index says.
CREATE OR REPLACE FUNCTION queue_workflows_reopen_ingest() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.idempotency_released AND NEW.idempotency_key IS NOT NULL
       AND NEW.generation > OLD.generation AND NEW.status = 'queued' THEN
        PERFORM queue_workflows_release_key(NEW.idempotency_key);
        NEW.idempotency_released := false;
    END IF;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS ingest_jobs_reopened ON ingest_jobs;
CREATE TRIGGER ingest_jobs_reopened BEFORE UPDATE OF generation ON ingest_jobs
    FOR EACH ROW EXECUTE FUNCTION queue_workflows_reopen_ingest();

-- Insert a JSON array of jobs, whose ids are p_prefix and their place as 12 hexadecimal digits. Rows: the
-- places whose key another job has, with that job's id and whether its task, queue and args are the same.
-- Keys are met in one order by everybody, so that two calls cannot wait for each other.
CREATE OR REPLACE FUNCTION queue_workflows_put_jobs(p_prefix text, p_jobs jsonb)
RETURNS TABLE (place bigint, id text, same boolean) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_seq    regclass := pg_get_serial_sequence('ingest_jobs', 'seq');
    v_places bigint[];
    v_ids    text[];
    v_same   boolean[];
    v_lost   bigint;
BEGIN
    FOR v_try IN 1..10 LOOP
        INSERT INTO ingest_jobs
               (id, seq, task_name, queue, reason, priority, args, idempotency_key, idempotency_window_s,
                lock_key, partition_key, available_at, max_attempts, timeout_s, policy, headers)
        SELECT n.id, n.seq, n.task_name, n.queue, coalesce(n.reason, 'tick'), coalesce(n.priority, 100),
               coalesce(n.args, '{}'), n.idempotency_key, n.idempotency_window_s, n.lock_key,
               n.partition_key, n.available_at, coalesce(n.max_attempts, 1), n.timeout_s, n.policy,
               n.headers
          FROM (SELECT p_prefix || lpad(to_hex(g.ordinality), 12, '0') AS id, nextval(v_seq) AS seq, g.*
                  FROM ROWS FROM (jsonb_to_recordset(p_jobs) AS (
                       task_name text, queue text, reason text, priority smallint, args jsonb,
                       idempotency_key text, idempotency_window_s double precision, lock_key text,
                       partition_key text, available_at timestamptz, max_attempts integer,
                       timeout_s double precision, policy jsonb, headers jsonb)) WITH ORDINALITY AS g
                 WHERE v_try = 1 OR g.idempotency_key IS NOT NULL AND NOT EXISTS (
                       SELECT FROM ingest_jobs o
                        WHERE o.idempotency_key = g.idempotency_key AND NOT o.idempotency_released)) n
         ORDER BY n.idempotency_key
            ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL AND NOT idempotency_released
            DO NOTHING;
        IF v_try = 1 AND NOT jsonb_path_exists(p_jobs, '$[*].idempotency_key') THEN
            RETURN;
        END IF;
        SELECT array_agg(g.ordinality) FILTER (WHERE o.id <> m.id),
               array_agg(o.id) FILTER (WHERE o.id <> m.id),
               array_agg(o.task_name = g.task_name AND o.queue = g.queue
                         AND o.args = coalesce(g.args, '{}')) FILTER (WHERE o.id <> m.id),
               count(*) FILTER (WHERE o.id IS NULL)
          INTO v_places, v_ids, v_same, v_lost
          FROM ROWS FROM (jsonb_to_recordset(p_jobs) AS (
               task_name text, queue text, args jsonb, idempotency_key text)) WITH ORDINALITY AS g
          CROSS JOIN LATERAL (SELECT p_prefix || lpad(to_hex(g.ordinality), 12, '0')) AS m (id)
          LEFT JOIN ingest_jobs o
            ON o.idempotency_key = g.idempotency_key AND NOT o.idempotency_released
         WHERE g.idempotency_key IS NOT NULL;
        IF v_lost = 0 THEN
            RETURN QUERY SELECT * FROM unnest(v_places, v_ids, v_same);
            RETURN;
        END IF;
        -- Whoever had such a key has lost it since: try again.
    END LOOP;
    RAISE EXCEPTION 'idempotency keys change hands too fast' USING ERRCODE = 'serialization_failure';
END $$;

-- The same, all or none: a key that another payload has undoes what was inserted, and nothing else of the
-- transaction. A single job needs no undoing.
CREATE OR REPLACE FUNCTION queue_workflows_enqueue(p_prefix text, p_jobs jsonb)
RETURNS TABLE (place bigint, id text, same boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_places bigint[];
    v_ids    text[];
    v_same   boolean[];
BEGIN
    IF jsonb_array_length(p_jobs) = 1 THEN
        RETURN QUERY SELECT * FROM queue_workflows_put_jobs(p_prefix, p_jobs);
        RETURN;
    END IF;
    BEGIN
        SELECT array_agg(d.place), array_agg(d.id), array_agg(d.same) INTO v_places, v_ids, v_same
          FROM queue_workflows_put_jobs(p_prefix, p_jobs) d;
        IF false = ANY (v_same) THEN
            RAISE EXCEPTION 'an idempotency key that another payload has' USING ERRCODE = 'QW003';
        END IF;
    EXCEPTION WHEN SQLSTATE 'QW003' THEN
        NULL;
    END;
    RETURN QUERY SELECT * FROM unnest(v_places, v_ids, v_same);
END $$;

DO $$
BEGIN
    -- A session's temporary tables come first where they are not named.
    EXECUTE format('ALTER FUNCTION queue_workflows_release_key(text) SECURITY DEFINER'
                   ' SET search_path = %I, pg_temp', current_schema());
END $$;
