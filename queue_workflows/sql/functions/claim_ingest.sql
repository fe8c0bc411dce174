-- Finish and claim ingest jobs: one call of a worker is one transaction and one round trip. Planner settings
-- hold each query to its index, whatever the statistics say (decision 0019).

-- Record the completed jobs `p_done`, then claim up to `p_claim` jobs of a queue; return the claimed jobs. The jobs are
-- finished first: one statement for both could keep rows locked that its claim rejected. SQLSTATE QW001: a claim was lost,
-- and nothing was written. The queue's pause and limits come before the claim. If `p_look_ahead_s` is given and fewer than
-- `p_claim` jobs were claimed, the last row has no id. Its `wait_s` is the number of seconds after which a limit admits
-- the next job, if nothing was claimed. Its `due_s` is the number of seconds after which the next delayed job is due, if
-- that is within `p_look_ahead_s`. Both are NULL if unknown. `due_s` is also 0 if a job that may have killed its worker
-- was claimed or left: then more jobs may be claimable. `p_only`: claim this job, wherever it stands in the queue, or
-- none.
CREATE OR REPLACE FUNCTION queue_workflows_ingest_step(
    p_worker text, p_host text, p_queue text, p_lease_s double precision,
    p_claim integer, p_obey boolean, p_promote boolean, p_done jsonb, p_look_ahead_s double precision DEFAULT NULL,
    p_only text DEFAULT NULL)
RETURNS TABLE (
    id text, task_name text, queue text, reason text, priority smallint, seq bigint, args jsonb,
    claim_no bigint, worker_id text, claimed_by text, attempts integer, max_attempts integer,
    crash_count integer, timeout_s double precision, headers jsonb, partition_key text, lock_key text,
    wait_s double precision, due_s double precision)
LANGUAGE plpgsql
{by_index()} AS $$
#variable_conflict use_column
DECLARE
    v_count   bigint;
    v_limited boolean := EXISTS (SELECT FROM queue_settings s WHERE s.queue = p_queue);
    v_room    integer := p_claim;
    v_wait_s  double precision;
    v_due_s   double precision;
    v_held    boolean;
    v_past    text;
    v_ids     text[] := '{}';
BEGIN
    IF p_done IS NOT NULL THEN
        WITH f AS MATERIALIZED (
            SELECT * FROM jsonb_to_recordset(p_done) AS d (
                id text, claim_no bigint, result jsonb, seconds float8, detail jsonb)),
        done AS (
            UPDATE ingest_jobs j SET {ingest:to_completed(j, f.result, f.seconds, 0, 0)}
              FROM f
             WHERE j.id = ANY (ARRAY(SELECT i.id FROM f i)) AND j.id = f.id
               AND (j.worker_id IS NOT DISTINCT FROM p_worker
                    AND j.claim_no = f.claim_no AND j.status = 'running') IS TRUE
            RETURNING j.id, j.claim_no, j.attempts, j.queue, j.seconds, j.claimed_by, coalesce(f.detail, '{}') AS detail)
        INSERT INTO ingest_job_events
               (job_id, attempt, event_type, claim_no, worker_id, host_label, queue, elapsed_s, detail)
        SELECT id, attempts, 'completed', claim_no, p_worker, claimed_by, queue, seconds, detail FROM done;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count <> jsonb_array_length(p_done) THEN
            RAISE EXCEPTION '% of % claims are no longer held', jsonb_array_length(p_done) - v_count,
                jsonb_array_length(p_done) USING ERRCODE = 'QW001';
        END IF;
        IF v_limited AND p_claim < 1 THEN
            PERFORM pg_notify('ingest_job_ready', p_queue) FROM queue_settings s
              WHERE s.queue = p_queue AND s.max_running IS NOT NULL;
        END IF;
    END IF;
    IF p_claim < 1 OR p_obey AND {is_off(p_host, p_queue)} THEN
        RETURN;
    END IF;
    IF p_promote THEN
        {ingest:promote_due()}
    END IF;
    IF v_limited THEN
        SELECT r.room, r.wait_s INTO v_room, v_wait_s FROM queue_workflows_queue_room(p_queue, p_claim) r;
    END IF;
    IF v_limited AND v_room > 0 AND p_only IS NULL THEN
        SELECT p.held, p.id INTO v_held, v_past FROM queue_workflows_past_lines(p_queue) p;
        IF v_held THEN
            v_wait_s := 0;
            v_room := CASE WHEN v_past IS NULL THEN 0 ELSE 1 END;
        END IF;
    END IF;
    v_count := 0;
    IF p_only IS NOT NULL THEN
        -- LIMIT forces a look-up by id, whatever the statistics say.
        v_ids := ARRAY(SELECT q.id
                         FROM (SELECT * FROM ingest_jobs WHERE id = p_only AND v_room > 0 LIMIT 1 FOR UPDATE SKIP LOCKED) q
                        WHERE {ingest:claimable(q)});
        v_room := cardinality(v_ids);
    ELSIF v_past IS NOT NULL THEN
        v_ids := ARRAY[v_past];
    ELSIF v_room > 0 AND {ingest:any_kept()} THEN
        v_ids := queue_workflows_ingest_kept(p_worker, p_host, p_queue, NULL, NULL, NULL, v_room);
    END IF;
    -- A job that may have killed its worker is claimed alone, so that no other job dies with it.
    IF v_room > 1 AND (CASE WHEN v_ids = '{}' THEN {ingest:first_may_kill()} ELSE (
                            SELECT {may_kill(k)} FROM ingest_jobs k WHERE k.id = v_ids[1]) END) THEN
        v_room := 1;
    END IF;
    IF v_room > cardinality(v_ids) THEN
        SELECT v_ids || array_agg(p.id) INTO v_ids FROM (
            SELECT q.id FROM ingest_jobs q
             WHERE {ingest:claimable(q)} AND (v_room = 1 OR greatest(q.crash_count, q.lapse_count) <= 0)
             ORDER BY q.priority, q.seq LIMIT v_room - cardinality(v_ids) FOR UPDATE SKIP LOCKED) p;
    END IF;
    IF v_ids <> '{}' THEN
        RETURN QUERY
        WITH changed AS (
            UPDATE ingest_jobs j SET {ingest:to_running(j, p_worker, p_host, p_lease_s, 0)}
             WHERE j.id = ANY (v_ids) RETURNING j.*),
        claimed AS (SELECT * FROM changed c WHERE c.status = 'running'),
        logged AS ({ingest:note_claim(c)} FROM claimed c)
        SELECT c.id, c.task_name, c.queue::text, c.reason, c.priority, c.seq, c.args, c.claim_no, c.worker_id,
               c.claimed_by, c.attempts, c.max_attempts, c.crash_count, c.timeout_s, c.headers, c.partition_key,
               c.lock_key, NULL::float8, NULL::float8 FROM claimed c;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count = 0 AND v_room = 1 THEN
            v_wait_s := 0;  -- its partition has limits by now: the trigger has blocked it
        END IF;
    END IF;
    IF v_limited AND v_count > 0 THEN
        PERFORM queue_workflows_note_starts(p_queue, v_count::integer);
    END IF;
    IF p_look_ahead_s IS NULL OR v_count >= p_claim THEN
        RETURN;
    END IF;
    IF v_limited AND v_count = 0 AND v_room > 0 AND v_wait_s IS NULL THEN
        SELECT extract(epoch FROM least(d.due_at, now() + interval '366 days') - now())
          INTO v_wait_s FROM partition_dues d
         WHERE d.queue = p_queue AND isfinite(d.due_at) ORDER BY d.queue, d.due_at LIMIT 1;
    END IF;
    -- If a job that must be claimed alone was claimed, or comes next, more jobs can be claimed at once.
    IF v_count > 0 AND p_claim > 1 AND (
           (SELECT {may_kill(k)} FROM ingest_jobs k WHERE k.id = v_ids[1]) OR {ingest:first_may_kill()}) THEN
        v_due_s := 0;
    ELSIF v_count < v_room THEN
        v_due_s := queue_workflows_ingest_due_in(p_host, p_queue, p_look_ahead_s, NOT p_promote);
    END IF;
    IF v_count > 0 THEN
        v_wait_s := NULL;
    END IF;
    IF coalesce(v_wait_s, v_due_s) IS NOT NULL THEN
        RETURN QUERY SELECT NULL, NULL, NULL, NULL, NULL::smallint, NULL::bigint, NULL::jsonb, NULL::bigint,
            NULL, NULL, NULL::integer, NULL::integer, NULL::integer, NULL::float8, NULL::jsonb, NULL, NULL,
            v_wait_s, v_due_s;
    END IF;
END $$;
