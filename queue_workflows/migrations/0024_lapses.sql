-- Only the search for claims without a reply read the history by these.
DROP INDEX IF EXISTS ingest_job_events_reclaimed_idx, workflow_node_events_reclaimed_idx;
-- A lapse is a lease that ended without evidence of its cause: counted apart from crashes, and forgotten at the next
-- recorded end of a claim. The domain gets its check after the columns: to add a column of a domain with a check writes
-- the whole table again.
CREATE DOMAIN queue_workflows_lapse_count AS integer;
ALTER TABLE workflow_node_jobs ADD COLUMN lapse_count queue_workflows_lapse_count NOT NULL DEFAULT 0;
ALTER TABLE ingest_jobs ADD COLUMN lapse_count queue_workflows_lapse_count NOT NULL DEFAULT 0;
ALTER DOMAIN queue_workflows_lapse_count ADD CONSTRAINT queue_workflows_lapse_count_check
    CHECK (VALUE BETWEEN 0 AND 1000000) NOT VALID;
