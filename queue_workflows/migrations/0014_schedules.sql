-- Schedules as rows: cron expressions, intervals, zones, policies, and what their last fire became.
CREATE TABLE schedules (
    name              text PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 1000 AND name NOT LIKE '%:boot'),
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
    -- Why it could not fire; the next fire or a change of the row clears it.
    error             text,
    -- The last instant that passed without a fire for it or after it, since catch_up left it out.
    missed_at         queue_workflows_time,
    source            text NOT NULL DEFAULT 'table' CHECK (source IN ('code', 'table')),
    -- The app whose code has it: only schedulers of this app store, fire and mark it.
    app               text CHECK (octet_length(app) BETWEEN 1 AND 800),
    -- Whether that code has a function for its failures: their alerts are left to schedulers of this app for a minute.
    on_failure        boolean NOT NULL DEFAULT false,
    -- Another app whose code has a schedule of this name too, which is not stored.
    clash             text,
    definition_hash   text,
    -- What the last change in code replaced: column, old and new value.
    changes           jsonb,
    gone_at           queue_workflows_time,
    changed_at        queue_workflows_time NOT NULL DEFAULT now(),
    created_at        queue_workflows_time NOT NULL DEFAULT now(),
    CONSTRAINT schedules_target_check CHECK ((task_name IS NULL) <> (workflow_name IS NULL)),
    CONSTRAINT schedules_source_app_check CHECK ((app IS NOT NULL) = (source = 'code'))
);
CREATE INDEX schedules_wake_idx ON schedules (wake_at NULLS FIRST, name)
    WHERE NOT paused AND NOT ended AND gone_at IS NULL;
-- The run that a fire submitted, or why an instant queued nothing.
ALTER TABLE schedule_fires ADD COLUMN run_id text, ADD COLUMN skipped text;
-- An alert of a failed run names the schedule that submitted it.
CREATE INDEX schedule_fires_run_idx ON schedule_fires (run_id) WHERE run_id IS NOT NULL;
-- The claims that crash recovery took from workers: few rows, so that a claim or a result costs nothing more. A
-- worker looks among them for claims whose reply it never got, and their crashes are subtracted.
CREATE INDEX ingest_job_events_reclaimed_idx ON ingest_job_events (created_at) WHERE event_type = 'reclaimed';
CREATE INDEX workflow_node_events_reclaimed_idx ON workflow_node_events (created_at) WHERE event_type = 'reclaimed';
