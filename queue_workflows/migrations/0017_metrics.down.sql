DROP FUNCTION IF EXISTS queue_workflows_count_events(bigint), queue_workflows_metric_bounds(),
    queue_workflows_uncounted_events(bigint, bigint, pg_snapshot, pg_snapshot, timestamptz);
DROP INDEX workflow_node_jobs_awaiting_idx;
DROP TABLE metric_position, metric_totals;
DROP INDEX ingest_job_events_xid_idx, workflow_node_events_xid_idx;
ALTER TABLE ingest_job_events DROP COLUMN xid;
ALTER TABLE workflow_node_events DROP COLUMN xid;
