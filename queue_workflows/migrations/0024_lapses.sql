-- Only the search for claims without a reply read the history by these.
DROP INDEX IF EXISTS ingest_job_events_reclaimed_idx, workflow_node_events_reclaimed_idx;
-- A lapse is a lease that ended without evidence of its cause: counted apart from crashes, and forgotten at the next
-- recorded end of a claim.
ALTER TABLE workflow_node_jobs ADD COLUMN IF NOT EXISTS lapse_count integer NOT NULL DEFAULT 0;
ALTER TABLE ingest_jobs ADD COLUMN IF NOT EXISTS lapse_count integer NOT NULL DEFAULT 0;
