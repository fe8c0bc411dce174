-- Failures that somebody has seen: the group of this signature is hidden until it fails after `until`.
CREATE TABLE failures_seen (
    signature text PRIMARY KEY CHECK (octet_length(signature) BETWEEN 1 AND 800),
    until     queue_workflows_time NOT NULL,
    seen_at   queue_workflows_time NOT NULL DEFAULT now(),
    seen_by   text NOT NULL CHECK (octet_length(seen_by) BETWEEN 1 AND 800)
);
-- The nodes that ask a person, the longest wait first. Both columns change only with the status.
CREATE INDEX workflow_node_jobs_asking_idx ON workflow_node_jobs ((coalesce(started_at, created_at)), seq)
    WHERE status = 'awaiting_input' AND child_run_id IS NULL;
