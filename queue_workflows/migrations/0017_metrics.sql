-- Counters of `queue-workflows metrics`: sums over the history of jobs, which go on when the history is deleted.
-- Each event carries its transaction, so that one is counted once, whenever its transaction commits. Events of before
-- have none and are not counted. A BRIN index costs an insert next to nothing; its summaries are what makes it useful.
ALTER TABLE workflow_node_events ADD COLUMN xid bigint;
ALTER TABLE workflow_node_events ALTER COLUMN xid SET DEFAULT (pg_current_xact_id()::text)::bigint;
CREATE INDEX workflow_node_events_xid_idx ON workflow_node_events USING brin (xid) WITH (autosummarize = on);
ALTER TABLE ingest_job_events ADD COLUMN xid bigint;
ALTER TABLE ingest_job_events ALTER COLUMN xid SET DEFAULT (pg_current_xact_id()::text)::bigint;
CREATE INDEX ingest_job_events_xid_idx ON ingest_job_events USING brin (xid) WITH (autosummarize = on);
-- One row for a counter, and one for each bucket of a histogram.
CREATE TABLE metric_totals (
    metric  text NOT NULL CHECK (octet_length(metric) <= 100),
    -- The queue; of the times of loads, the model.
    name    text NOT NULL CHECK (octet_length(name) <= 800),
    -- A second label of the series: an outcome or a cause.
    label   text NOT NULL DEFAULT '' CHECK (octet_length(label) <= 100),
    -- The number of bounds that are below the values; 0 for a counter.
    bucket  smallint NOT NULL DEFAULT 0 CHECK (bucket BETWEEN 0 AND 100),
    n       queue_workflows_number NOT NULL DEFAULT 0,
    -- The sum of a histogram's values, in seconds.
    seconds double precision NOT NULL DEFAULT 0 CHECK (seconds BETWEEN 0 AND 1e15),
    PRIMARY KEY (metric, name, label, bucket)
) WITH (fillfactor = 50);
-- How far the history is counted. One row, from the first count on.
CREATE TABLE metric_position (
    only_row   boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- Events of transactions that this snapshot sees are counted.
    counted    pg_snapshot NOT NULL,
    counted_at queue_workflows_time NOT NULL DEFAULT now(),
    -- Older events are not counted: they came with a dump, out of a server that had other transactions.
    since      queue_workflows_time NOT NULL DEFAULT '2000-01-01+00'
) WITH (fillfactor = 50);
-- Few rows, which otherwise only a scan of all nodes would count.
CREATE INDEX workflow_node_jobs_awaiting_idx ON workflow_node_jobs (queue) WHERE status = 'awaiting_input';
