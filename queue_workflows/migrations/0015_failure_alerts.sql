-- Failures of runs, ingest jobs and schedules that are to be sent as alerts. A row is deleted when it was sent.
CREATE TABLE failure_alerts (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind        text NOT NULL CHECK (kind IN ('run', 'job', 'schedule')),
    -- The id of the run or job, or the name of the schedule.
    subject     text NOT NULL CHECK (octet_length(subject) <= 2000),
    -- The generation of the run or job, or the instant of the schedule: one failure is one row.
    occurrence  text NOT NULL CHECK (octet_length(occurrence) <= 200),
    name        text CHECK (octet_length(name) <= 2000),
    queue       text CHECK (octet_length(queue) <= 2000),
    schedule    text CHECK (octet_length(schedule) <= 2000),
    -- The app whose code has a function for failures of that schedule.
    app         text CHECK (octet_length(app) <= 2000),
    reason      text NOT NULL CHECK (reason IN ('failed', 'cannot_fire', 'missed')),
    error       text CHECK (octet_length(error) <= 8000),
    failed_at   queue_workflows_time NOT NULL DEFAULT now(),
    -- How often a sender took it, which one did last, when, and until when nobody else may.
    claims      queue_workflows_tries NOT NULL DEFAULT 0,
    taken_by    text,
    taken_at    queue_workflows_time,
    taken_until queue_workflows_time,
    -- For a minute after it was sent, the row counts against ALERTS_PER_MINUTE.
    sent_at     queue_workflows_time,
    UNIQUE (kind, subject, occurrence)
);
-- One row for all senders, from the first one on. Failures are noted until `wanted_until`.
CREATE TABLE failure_alert_state (
    only_row     boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    seen_at      queue_workflows_time NOT NULL DEFAULT now(),
    wanted_until queue_workflows_time NOT NULL,
    -- ALERTS_PER_MINUTE was reached: until then nothing is sent.
    quiet_until  queue_workflows_time
);
-- A commit with thousands of lock keys finds each note by its key, instead of reading all of its notes for each key.
DROP INDEX lock_turns_xid_idx;
CREATE INDEX lock_turns_xid_idx ON lock_turns (xid, lock_key);
