-- A claim that one row makes fail would stop its whole queue. These functions find that row and move it out of
-- the way. They run only after a claim has raised, so that an ordinary claim costs nothing more.

-- Return whether an error is not about the row: connection, transaction, rights, missing objects,
-- resources, locks, shutdown, storage, internal errors. No job is ended for one of these.
CREATE OR REPLACE FUNCTION queue_workflows_is_systemic(p_state text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT left(p_state, 2) IN ('08', '25', '28', '2D', '3B', '3D', '3F', '40', '42', '53', '55', '57', '58', '72',
                                'F0', 'HV', 'XX')
$$;

-- Return whether the error means that the row itself cannot be computed with or stored. Any other error may be a
-- trigger's passing condition.
CREATE OR REPLACE FUNCTION queue_workflows_is_about_data(p_state text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT left(p_state, 2) IN ('0A', '21', '22', '23', '54')
$$;

-- tables: ingest_jobs workflow_node_jobs
-- End a job that the database itself refuses to run. Return 'failed' (with its event and outbox row), else
-- 'set_aside' (blocked, so that no claim finds it), else NULL: the row cannot be written at all. `p_worker` and
-- `p_claim_no` name the claim that holds it; NULL: the job is queued.
CREATE OR REPLACE FUNCTION queue_workflows_ingest_set_aside(
    p_id text, p_error text, p_worker text DEFAULT NULL, p_claim_no bigint DEFAULT NULL)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_job     ingest_jobs;
    v_state   text;
    v_message text;
BEGIN
    BEGIN
        UPDATE ingest_jobs j
           SET status = 'failed', error = p_error, finished_at = now(), blocked_reason = NULL, worker_id = NULL,
               lease_expires_at = NULL
         WHERE {is_set_aside(j)} RETURNING * INTO v_job;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
        IF p_worker IS NOT NULL THEN  -- ingest only
        -- A trigger records the end of a queued ingest job.
        PERFORM queue_workflows_record(v_job, 'failed', worker => p_worker, detail => '{"by": "database"}');
        END IF;  -- ingest only
        RETURN 'failed';
    EXCEPTION WHEN OTHERS THEN
        {raise_systemic()}
    END;
    BEGIN
        UPDATE ingest_jobs j
           SET status = 'queued', blocked_reason = 'set_aside', available_at = NULL, worker_id = NULL,
               lease_expires_at = NULL
         WHERE {is_set_aside(j)};
        RETURN CASE WHEN FOUND THEN 'set_aside' END;
    EXCEPTION WHEN OTHERS THEN
        {raise_systemic()}
    END;
    RETURN NULL;
END $$;

-- tables: ingest_jobs workflow_node_jobs
-- Claim one job of a queue after the ordinary claim has raised. The first 100 jobs are tried in claim order,
-- each in its own subtransaction, and those that raise are moved out of the way. job_id: the job that is claimed
-- now, or NULL. aside: of each job that raised its id, its run, its outcome ('failed', 'set_aside', 'postponed',
-- 'skipped') and the error. A row whose error may be a trigger's passing condition is ended only if another job
-- could be claimed; else it is tried again in a minute, as the reason may concern all jobs and pass.
CREATE OR REPLACE FUNCTION queue_workflows_ingest_claim_apart(
    p_worker text, p_host text, p_queue text, p_lease_s double precision, p_obey boolean, p_models text[],
    p_lane smallint, p_versions text[], OUT job_id text, OUT aside jsonb)
LANGUAGE plpgsql
{by_index()} AS $$
DECLARE
    c_window CONSTANT integer := 100;
    v_limited boolean := EXISTS (SELECT FROM queue_settings s WHERE s.queue = p_queue);  -- ingest only
    v_vram    integer := (SELECT w.vram_total_mb FROM workers w WHERE w.worker_id = p_worker);  -- nodes only
    v_raised  jsonb := '[]';
    v_id      text;
    v_status  text;
    v_state   text;
    v_message text;
    v_became  text;
    v_one     record;
BEGIN
    aside := '[]';
    IF p_obey AND {is_off(p_host, p_queue)}
       OR EXISTS (SELECT FROM queue_settings s
                   WHERE s.queue = p_queue AND queue_workflows_is_paused(s.paused_at, s.paused_until)) THEN
        RETURN;
    END IF;
    -- Jobs that are due, or kept for the host, may have made the claim fail: anyone may claim them from now on.
    FOR v_id IN
        SELECT l.id FROM ingest_jobs l
         WHERE l.id = ANY (ARRAY(SELECT j.id FROM ingest_jobs j WHERE {due(j)} ORDER BY j.available_at LIMIT c_window)
                           || ARRAY(SELECT k.id FROM ingest_jobs k WHERE {kept(k)} AND k.resume_at <= now()
                                     ORDER BY k.resume_host, k.queue, k.resume_at LIMIT c_window))
           AND (l.status = 'queued' AND l.blocked_reason = 'not_due') IS TRUE FOR UPDATE SKIP LOCKED
    LOOP
        BEGIN
            UPDATE ingest_jobs SET blocked_reason = NULL, available_at = NULL WHERE id = v_id;
        EXCEPTION WHEN OTHERS THEN
            {raise_systemic()}
            v_raised := v_raised || jsonb_build_object('id', v_id, 'state', v_state, 'message', v_message);
        END;
    END LOOP;
    IF v_limited AND (SELECT r.room < 1 FROM queue_workflows_queue_room(p_queue, 1) r) THEN  -- ingest only
        RETURN;  -- ingest only
    END IF;  -- ingest only
    FOR v_id IN
        SELECT q.id FROM (
            SELECT j.* FROM ingest_jobs j
             WHERE j.queue = p_queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
               AND (j.required_version IS NULL OR j.required_version = ANY (p_versions))  -- nodes only
             ORDER BY j.priority, j.seq LIMIT 10 * c_window) q
         WHERE {live(q)} AND (p_queue <> 'gpu'  -- nodes only
               OR queue_workflows_gpu_misfit(p_host, p_models, v_vram, q.required_model) IS NULL)  -- nodes only
         LIMIT c_window
    LOOP
        -- Outside of the subtransaction: a row that raises stays locked until it is moved out of the way.
        PERFORM FROM ingest_jobs j
          WHERE j.id = v_id AND queue_workflows_is_claimable(j.status, j.blocked_reason) IS TRUE FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        BEGIN
            UPDATE ingest_jobs j SET {to_running(j, p_worker, p_host, p_lease_s, p_lane)}
             WHERE j.id = v_id RETURNING j.status INTO v_status;
            {note_claim(j)} FROM ingest_jobs j WHERE j.id = v_id AND v_status = 'running';
        EXCEPTION WHEN OTHERS THEN
            {raise_systemic()}
            v_raised := v_raised || jsonb_build_object('id', v_id, 'state', v_state, 'message', v_message);
            v_status := NULL;
        END;
        IF v_status = 'running' THEN
            job_id := v_id;
            EXIT;
        END IF;  -- else it raised, or its partition's limits have blocked it
    END LOOP;
    IF v_limited AND job_id IS NOT NULL THEN  -- ingest only
        PERFORM queue_workflows_note_starts(p_queue, 1);  -- ingest only
    END IF;  -- ingest only
    FOR v_one IN SELECT * FROM jsonb_to_recordset(v_raised) AS r (id text, state text, message text) LOOP
        IF job_id IS NOT NULL OR queue_workflows_is_about_data(v_one.state) THEN
            v_became := queue_workflows_ingest_set_aside(
                v_one.id, left('the database refuses its claim: ' || v_one.message, 8000));
        ELSE
            BEGIN
                UPDATE ingest_jobs SET blocked_reason = 'not_due', available_at = now() + interval '1 minute'
                 WHERE id = v_one.id;
                v_became := 'postponed';
            EXCEPTION WHEN OTHERS THEN
                v_became := NULL;
            END;
        END IF;
        aside := aside || jsonb_build_object(
            'id', v_one.id, 'became', coalesce(v_became, 'skipped'), 'error', left(v_one.message, 1000), 'run_id',
            (SELECT j.run_id FROM workflow_node_jobs j WHERE j.id = v_one.id));
    END LOOP;
END $$;
