ALTER TABLE worker_heartbeats DROP COLUMN IF EXISTS detail, DROP COLUMN IF EXISTS vram_total_mb;
ALTER TABLE worker_controls DROP COLUMN IF EXISTS until_at, DROP COLUMN IF EXISTS reason;
DROP TABLE IF EXISTS workers;
DROP TABLE IF EXISTS schedule_fires;
DROP TABLE IF EXISTS ingest_job_events;
DROP INDEX IF EXISTS workflow_runs_delayed_idx, workflow_runs_startable_idx;
ALTER TABLE workflow_input_submissions
    ALTER COLUMN id DROP DEFAULT,
    DROP COLUMN IF EXISTS available_at, DROP COLUMN IF EXISTS attempts;
DELETE FROM workflow_node_events
 WHERE event_type IN ('parked', 'reclaimed', 'retried', 'skipped', 'death');
DROP TRIGGER IF EXISTS workflow_runs_forget ON workflow_runs;
DROP FUNCTION IF EXISTS queue_workflows_forget_runs();
DELETE FROM workflow_node_events e
 WHERE NOT EXISTS (SELECT FROM workflow_runs r WHERE r.id = e.run_id);
ALTER TABLE workflow_node_events DROP CONSTRAINT IF EXISTS workflow_node_events_type_check;
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'workflow_node_events'::regclass
               AND attname = 'event_type' AND atttypid = 'queue_workflows_node_event'::regtype) THEN
        ALTER TABLE workflow_node_events ALTER COLUMN event_type TYPE text;
    END IF;
END $$;
ALTER TABLE workflow_node_events
    ADD CONSTRAINT workflow_node_events_run_id_fkey
        FOREIGN KEY (run_id) REFERENCES workflow_runs (id) ON DELETE CASCADE,
    ADD CONSTRAINT workflow_node_events_type_check CHECK (event_type IN (
        'claimed', 'model_load_start', 'model_load_done', 'progress_beat', 'stall_suspected',
        'stall_trip', 'gpu_health_trip', 'budget_trip', 'requeued', 'reassigned', 'lease_renew',
        'completed', 'failed', 'cancelled', 'error'));
DROP DOMAIN IF EXISTS queue_workflows_node_event;
ALTER TABLE workflow_node_events DROP COLUMN IF EXISTS claim_no, DROP COLUMN IF EXISTS worker_id;
DROP INDEX IF EXISTS workflow_node_events_created_idx;
CREATE INDEX workflow_node_events_created_idx ON workflow_node_events (created_at);
DROP INDEX IF EXISTS workflow_dispatch_events_run_idx;
ALTER TABLE workflow_dispatch_events
    DROP COLUMN IF EXISTS available_at, DROP COLUMN IF EXISTS generation,
    DROP COLUMN IF EXISTS claim_no, DROP COLUMN IF EXISTS job_id;
