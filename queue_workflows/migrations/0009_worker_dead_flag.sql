ALTER TABLE worker_heartbeats ADD COLUMN IF NOT EXISTS last_flagged_dead_at timestamptz;
CREATE INDEX IF NOT EXISTS worker_heartbeats_flagged_dead_idx
    ON worker_heartbeats (last_flagged_dead_at) WHERE last_flagged_dead_at IS NOT NULL;
