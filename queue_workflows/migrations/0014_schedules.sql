-- Schedules as rows: cron expressions, intervals, zones, policies, and what their last fire became.
CREATE TABLE schedules (
    name              text PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 400 AND name NOT LIKE '%:boot'),
    expression        text NOT NULL CHECK (octet_length(expression) BETWEEN 1 AND 800),
    tz                text NOT NULL DEFAULT 'UTC' CHECK (octet_length(tz) BETWEEN 1 AND 200),
    task_name         text CHECK (octet_length(task_name) BETWEEN 1 AND 800),
    args              jsonb NOT NULL DEFAULT '{}',
    workflow_name     text CHECK (octet_length(workflow_name) BETWEEN 1 AND 800),
    inputs            jsonb NOT NULL DEFAULT '{}',
    queue             text CHECK (octet_length(queue) BETWEEN 1 AND 200),
    priority          smallint,
    idempotency_key   text CHECK (octet_length(idempotency_key) BETWEEN 1 AND 800),
    headers           jsonb,
    catch_up          text NOT NULL DEFAULT 'last' CHECK (catch_up IN ('none', 'last', 'all')),
    catch_up_max      integer NOT NULL DEFAULT 100 CHECK (catch_up_max BETWEEN 1 AND 1000),
    catch_up_within_s queue_workflows_period_s NOT NULL DEFAULT 86400,
    overlap           text NOT NULL DEFAULT 'skip' CHECK (overlap IN ('allow', 'skip', 'replace', 'queue')),
    jitter_s          queue_workflows_seconds NOT NULL DEFAULT 0,
    start_at          queue_workflows_time,
    end_at            queue_workflows_time,
    paused            boolean NOT NULL DEFAULT false,
    -- The next instant, and when it is due: later by the jitter, or while an earlier job still runs. NULL: a
    -- scheduler has not computed them since the row was written.
    next_at           queue_workflows_time,
    wake_at           queue_workflows_time,
    ended             boolean NOT NULL DEFAULT false,
    last_fire_at      queue_workflows_time,
    last_job_id       text,
    last_run_id       text,
    -- Why a scheduler cannot fire it; a change of the row clears it.
    error             text,
    source            text NOT NULL DEFAULT 'table' CHECK (source IN ('code', 'table')),
    definition_hash   text,
    -- What the last change in code replaced: column, old and new value.
    changes           jsonb,
    gone_at           queue_workflows_time,
    changed_at        queue_workflows_time NOT NULL DEFAULT now(),
    created_at        queue_workflows_time NOT NULL DEFAULT now(),
    CONSTRAINT schedules_target_check CHECK ((task_name IS NULL) <> (workflow_name IS NULL))
);
CREATE INDEX schedules_wake_idx ON schedules (wake_at NULLS FIRST, name)
    WHERE NOT paused AND NOT ended AND gone_at IS NULL AND error IS NULL;
-- The run that a fire submitted, or why an instant queued nothing.
ALTER TABLE schedule_fires ADD COLUMN run_id text, ADD COLUMN skipped text;
