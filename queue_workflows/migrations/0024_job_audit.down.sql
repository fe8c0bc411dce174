DROP TRIGGER IF EXISTS ingest_job_events_keep ON ingest_job_events;
DROP FUNCTION IF EXISTS queue_workflows_keep_events();
DROP TRIGGER IF EXISTS ingest_jobs_audit_gone ON ingest_jobs;
DROP FUNCTION IF EXISTS queue_workflows_audit_gone();
DROP TRIGGER IF EXISTS ingest_jobs_cancel_asked ON ingest_jobs;
DROP FUNCTION IF EXISTS queue_workflows_audit_cancel();
DO $patch$
DECLARE
    v_source text := pg_get_functiondef('queue_workflows_job_changed()'::regprocedure);
    v_added  text[] := ARRAY[$$
            IF TG_TABLE_NAME = 'ingest_jobs' THEN
                PERFORM queue_workflows_audit(NEW, 'claimed');
            END IF;$$,
        $$    IF TG_TABLE_NAME = 'ingest_jobs' AND (OLD.status <> 'running' OR NEW.worker_id IS NOT NULL) THEN
        PERFORM queue_workflows_audit(NEW, CASE WHEN NEW.status <> 'queued' THEN NEW.status::text
                                                WHEN OLD.status = 'running' THEN 'requeued' ELSE 'retried' END);
    END IF;
$$];
BEGIN
    FOR i IN 1..2 LOOP
        IF position(v_added[i] IN v_source) = 0 THEN
            RAISE EXCEPTION 'queue_workflows_job_changed() has not what migration 0024 put into it';
        END IF;
        v_source := replace(v_source, v_added[i], '');
    END LOOP;
    EXECUTE v_source;
END $patch$;
DROP FUNCTION IF EXISTS queue_workflows_audit(ingest_jobs, text);
DROP FUNCTION IF EXISTS queue_workflows_actor();
ALTER TABLE ingest_job_events DROP COLUMN IF EXISTS actor;
