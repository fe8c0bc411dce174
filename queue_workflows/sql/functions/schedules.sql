-- Schedules: a row that is written is planned again, and wakes the schedulers.

-- Drop the planned instant of a schedule whose definition, pause or mark changes, and wake the schedulers. Instants
-- from before the change never fire. An update without a change keeps the plan. Without its hash, a definition that SQL
-- has changed is replaced when the code or `schedules.add` stores the schedule again. A new definition is refused as in
-- Python for JSON that no process can load, fields of the other kind of target, and an end before the start. An
-- existing row can be paused, whatever it holds. It runs as its owner, since no role may call the functions that check
-- a payload.
CREATE OR REPLACE FUNCTION queue_workflows_schedule_changed() RETURNS trigger LANGUAGE plpgsql
SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    v_same boolean := false;
BEGIN
    IF TG_OP = 'UPDATE' THEN
        v_same := (NEW.expression, NEW.tz, NEW.task_name, NEW.args, NEW.workflow_name, NEW.inputs, NEW.queue, NEW.priority,
                   NEW.idempotency_key, NEW.headers, NEW.catch_up, NEW.catch_up_max, NEW.catch_up_within_s, NEW.overlap,
                   NEW.jitter_s, NEW.start_at, NEW.end_at)
                  IS NOT DISTINCT FROM
                  (OLD.expression, OLD.tz, OLD.task_name, OLD.args, OLD.workflow_name, OLD.inputs, OLD.queue, OLD.priority,
                   OLD.idempotency_key, OLD.headers, OLD.catch_up, OLD.catch_up_max, OLD.catch_up_within_s, OLD.overlap,
                   OLD.jitter_s, OLD.start_at, OLD.end_at);
        IF v_same AND (NEW.name, NEW.paused, NEW.gone_at) IS NOT DISTINCT FROM (OLD.name, OLD.paused, OLD.gone_at) THEN
            RETURN NEW;
        END IF;
        IF NOT v_same AND NEW.definition_hash IS NOT DISTINCT FROM OLD.definition_hash THEN
            NEW.definition_hash := NULL;
        END IF;
    END IF;
    IF NOT v_same THEN
        PERFORM queue_workflows_check_payload(NEW.args, 'schedules.args', 1048576);
        PERFORM queue_workflows_check_payload(NEW.inputs, 'schedules.inputs', 1048576);
        PERFORM queue_workflows_check_payload(NEW.headers, 'schedules.headers', 1048576);
        IF jsonb_typeof(NEW.args) <> 'object' OR jsonb_typeof(NEW.inputs) <> 'object'
           OR jsonb_typeof(NEW.headers) <> 'object' THEN
            RAISE EXCEPTION 'schedules.args, inputs and headers must be JSON objects' USING ERRCODE = 'check_violation';
        END IF;
        IF NEW.workflow_name IS NOT NULL AND (NEW.args <> '{}' OR coalesce(NEW.queue, NEW.idempotency_key,
                                                                           NEW.headers::text) IS NOT NULL)
           OR NEW.task_name IS NOT NULL AND NEW.inputs <> '{}' THEN
            RAISE EXCEPTION 'schedules.args, queue, idempotency_key and headers belong to a task, inputs to a workflow'
                USING ERRCODE = 'check_violation';
        END IF;
        IF NEW.end_at < NEW.start_at THEN
            RAISE EXCEPTION 'schedules.end_at is before start_at' USING ERRCODE = 'check_violation';
        END IF;
    END IF;
    NEW.next_at := NULL;
    NEW.wake_at := NULL;
    NEW.ended := false;
    NEW.error := NULL;
    NEW.changed_at := clock_timestamp();
    PERFORM pg_notify('schedules_changed', '');
    RETURN NEW;
END $$;

-- Return when the next schedule is due that a scheduler of `p_app` fires, or NULL if none is planned. If `p_names` is
-- given, only these count; `p_aside` never do. A schedule whose task is not in `p_tasks` is due for this scheduler
-- `p_patience_s` later. Both searches end at the first row of the index that fits, and the second does not go beyond
-- what the first found. Sorts are off, since without statistics a sort of all schedules costs as little as the index
-- that has the order (decision 0019).
CREATE OR REPLACE FUNCTION queue_workflows_next_wake(
    p_app text, p_names text[], p_aside text[], p_tasks text[], p_patience_s double precision)
RETURNS timestamptz LANGUAGE plpgsql STABLE
{by_index()}
SET search_path FROM CURRENT AS $$
DECLARE
    v_known timestamptz;
    v_unknown timestamptz;
BEGIN
    v_known := (
        SELECT s.wake_at FROM schedules s
         WHERE NOT s.paused AND NOT s.ended AND s.gone_at IS NULL AND s.wake_at IS NOT NULL
           AND (s.source = 'table' OR s.app = p_app)
           AND (p_names IS NULL OR s.name = ANY (p_names)) AND s.name <> ALL (p_aside)
           AND (s.workflow_name IS NOT NULL OR s.task_name = ANY (p_tasks))
         ORDER BY s.wake_at NULLS FIRST, s.name LIMIT 1);
    v_unknown := (
        SELECT s.wake_at FROM schedules s
         WHERE NOT s.paused AND NOT s.ended AND s.gone_at IS NULL
           AND s.wake_at < coalesce(v_known, 'infinity') - make_interval(secs => p_patience_s)
           AND (s.source = 'table' OR s.app = p_app)
           AND (p_names IS NULL OR s.name = ANY (p_names)) AND s.name <> ALL (p_aside)
           AND s.task_name <> ALL (p_tasks)
         ORDER BY s.wake_at NULLS FIRST, s.name LIMIT 1);
    RETURN least(v_known, v_unknown + make_interval(secs => p_patience_s));
END $$;
