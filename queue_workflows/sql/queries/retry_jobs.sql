-- Queue failed or cancelled ingest jobs again, in a new generation.

-- name: reopen_ingest many
-- Queue failed and cancelled ingest jobs again in a new generation, with all counters at zero. A
-- trigger adds the event. Returns no row for a job in another state or in the last possible
-- generation.
UPDATE ingest_jobs j
   SET status = 'queued', generation = j.generation + 1, error = NULL, finished_at = NULL,
       started_at = NULL, attempts = 0, crash_count = 0, lapse_count = 0, watchdog_retries = 0,
       cancel_requested_at = NULL, blocked_reason = NULL, available_at = NULL, progress = NULL,
       result = NULL
 WHERE j.status IN ('failed', 'cancelled') AND j.generation < 1000000
   AND j.id = ANY (%(jobs)s::text[])
RETURNING j.*;

-- name: key_owner one
-- Return the job that owns the idempotency key of a job now, and the key.
SELECT o.id, o.idempotency_key AS key
  FROM ingest_jobs j
  JOIN ingest_jobs o ON o.idempotency_key = j.idempotency_key AND NOT o.idempotency_released
 WHERE j.id = %(job)s;
