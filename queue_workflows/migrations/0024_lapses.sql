-- A lapse is a lease that ended without evidence of its cause: counted apart from crashes, and forgotten at the next
-- recorded end of a claim.
ALTER TABLE workflow_node_jobs ADD COLUMN IF NOT EXISTS lapse_count integer NOT NULL DEFAULT 0;
ALTER TABLE ingest_jobs ADD COLUMN IF NOT EXISTS lapse_count integer NOT NULL DEFAULT 0;
