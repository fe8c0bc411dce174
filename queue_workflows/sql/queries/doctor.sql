-- The facts that `queue-workflows doctor` and `connect` check. All are cheap, and none needs a
-- right that a role for reading lacks. An infinite time counts as the nearest that the server can
-- subtract from now().

-- name: server row
-- Return what answers: its version, whether it is a standby or read-only, and the role.
SELECT current_setting('server_version_num')::int AS version_num,
       current_setting('server_version') AS version,
       pg_is_in_recovery() AS standby,
       current_setting('default_transaction_read_only') = 'on' AS read_only,
       current_user::text AS role;

-- name: clock value
-- Return the server's clock, which runs on within a transaction.
SELECT clock_timestamp() AS now;

-- name: backend_pid value
-- Return the process that executes this statement. Behind a pooler it is not the announced one.
SELECT pg_backend_pid() AS pid;

-- name: settings many
-- Return the settings of these names as they are in force for this role and database.
SELECT name, setting FROM pg_settings WHERE name = ANY (%(names)s::text[]);

-- name: notify none
-- Notify a channel.
SELECT pg_notify(%(channel)s::text, '');

-- name: notification_queue_usage value
-- Return how full the server's queue of notifications is, 0 to 1.
SELECT pg_notification_queue_usage() AS used;

-- name: transactions many
-- Return the oldest five transactions of this database except this one. `idle_s` is NULL unless
-- the backend is idle inside its transaction. pg_read_all_stats shows those of other roles too.
SELECT what, age_s, idle_s
  FROM (SELECT 'pid ' || pid || coalesce(' of ' || usename, '')
               || coalesce(' (' || nullif(application_name, '') || ')', '') AS what,
               extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age_s,
               CASE WHEN starts_with(state, 'idle in transaction') THEN
                   extract(epoch FROM clock_timestamp() - state_change)::float8 END AS idle_s
          FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()
           AND backend_type = 'client backend' AND xact_start IS NOT NULL
        UNION ALL
        SELECT 'the prepared transaction ' || gid,
               extract(epoch FROM clock_timestamp() - prepared)::float8, NULL
          FROM pg_prepared_xacts
         WHERE database = current_database()) t
 ORDER BY age_s DESC
 LIMIT 5;

-- name: connections row
-- Return how many connections are used, of all databases, and how many an ordinary role may open.
SELECT (SELECT coalesce(sum(numbackends), 0) FROM pg_stat_database)::int AS used,
       current_setting('max_connections')::int
       - current_setting('superuser_reserved_connections')::int AS allowed;

-- name: schema_seen row
-- Return whether this role finds and may read the ledger of migrations, and which schemas have
-- one that the search path or a missing USAGE hides.
SELECT to_regclass('queue_schema_version') IS NOT NULL AS found,
       coalesce(has_table_privilege(to_regclass('queue_schema_version'), 'SELECT'), false)
       AS readable,
       ARRAY(SELECT quote_ident(n.nspname)
               FROM pg_class c
               JOIN pg_namespace n ON n.oid = c.relnamespace
              WHERE c.relname = 'queue_schema_version' AND c.relkind = 'r'
              ORDER BY 1) AS elsewhere,
       quote_ident(current_user) AS role,
       quote_ident(coalesce(current_schema(), 'public')) AS schema,
       coalesce(has_schema_privilege(current_schema(), 'CREATE'), false) AS may_create;

-- name: schema_version row
-- Return the version of the schema, and the oldest version of the code that may work on it. An
-- older ledger has no column `compatible_with`.
SELECT coalesce(max(version), 0) AS version,
       coalesce(max((to_jsonb(l) ->> 'compatible_with')::int), 0) AS needs
  FROM queue_schema_version l;

-- name: machines column
-- Return the hosts that had a worker of nodes within the last day.
SELECT DISTINCT host_label
  FROM workers
 WHERE queue IN ('cpu', 'gpu') AND last_seen > now() - interval '1 day';

-- name: outbox one
-- Return the oldest open event that is due, and for how long it has been. No row: none is due.
SELECT {age_s(greatest(created_at, available_at))} AS lag_s,
       run_id, error
  FROM workflow_dispatch_events
 WHERE processed_at IS NULL AND (available_at IS NULL OR available_at <= now())
 ORDER BY id
 LIMIT 1;

-- name: waiting_runs one
-- Return the run that has waited longest for its start, and whether others were started within
-- the last minute. No row: none waits.
SELECT {age_s(queued_at)} AS wait_s,
       id AS run_id,
       EXISTS (SELECT FROM workflow_runs
                WHERE status = 'running' AND mode = 'node'
                  AND started_at BETWEEN now() - interval '60 seconds' AND now()) AS others
  FROM workflow_runs
 WHERE status = 'queued' AND mode = 'node' AND available_at IS NULL
 ORDER BY queued_at
 LIMIT 1;

-- name: stalled_runs row
-- Return how many runs are running although nothing has moved them forward for `quiet_s`, and one
-- of them.
SELECT count(*) AS n, min(run_id) AS run_id
  FROM queue_workflows_stalled_runs(%(quiet_s)s::float8, NULL);

-- name: lapsed row
-- Return how many running jobs have a lapsed lease, and for how many seconds the oldest has.
SELECT count(*) AS n,
       max({age_s(lease_expires_at)}) AS since_s
  FROM (SELECT lease_expires_at FROM workflow_node_jobs WHERE status = 'running'
        UNION ALL
        SELECT lease_expires_at FROM ingest_jobs WHERE status = 'running') running
 WHERE lease_expires_at < now();

-- name: unserved many
-- Return the queues that have due jobs and no live worker which takes them. `n` counts at most
-- `counted` jobs, `wait_s` is the age of the first in line, `alive` how many workers are there
-- and take none. A worker of 0.3.0 has a heartbeat only. Each step reads one index entry.
WITH heads (queue, n, created_at) AS (
    -- both:
    SELECT q.queue,
           (SELECT count(*)
              FROM (SELECT FROM ingest_jobs j
                     WHERE j.queue = q.queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
                     LIMIT %(counted)s) c),
           coalesce((SELECT j.created_at FROM ingest_jobs j
                      WHERE j.queue = q.queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
                        AND j.required_version IS NULL  -- nodes only
                     {first(j)}),
                    (SELECT j.created_at FROM ingest_jobs j
                      WHERE j.queue = q.queue AND queue_workflows_is_claimable(j.status, j.blocked_reason)
                     {first(j)}))
      FROM (WITH RECURSIVE line (queue) AS ({queues_of(ingest_jobs, line)}) SELECT queue FROM line) q
     WHERE q.queue IS NOT NULL
    -- end
)
SELECT h.queue, h.n,
       {age_s(h.created_at)} AS wait_s,
       (SELECT count(*)
          FROM workers w
         WHERE w.queue = h.queue AND w.state NOT IN ('stopped', 'dead')
           AND w.last_seen > now() - %(stale_s)s::float8 * interval '1 second') AS alive
  FROM heads h
 WHERE NOT EXISTS (
       SELECT FROM workers w
        WHERE w.queue = h.queue
          AND w.state NOT IN ('stopped', 'dead', 'parked', 'paused', 'draining')
          AND w.last_seen > now() - %(stale_s)s::float8 * interval '1 second')
   AND NOT EXISTS (
       SELECT FROM worker_heartbeats b
        WHERE b.queue = h.queue AND b.last_seen > now() - %(stale_s)s::float8 * interval '1 second'
          AND NOT EXISTS (
              SELECT FROM workers w WHERE w.host_label = b.host_label AND w.queue = b.queue))
 ORDER BY h.queue;

-- name: missing_versions many
-- Return the versions of nodes that due jobs need and no live worker of their queue has, up to
-- `listed`, with up to three of these jobs and the age of the first. It steps from version to
-- version, 1,000 of each queue, however many jobs need one.
SELECT q.queue, v.version,
       ARRAY(SELECT j.id
               FROM workflow_node_jobs j
              WHERE j.queue = q.queue AND j.required_version = v.version
                AND queue_workflows_is_claimable(j.status, j.blocked_reason)
              ORDER BY j.required_version, j.priority, j.seq
              LIMIT 3) AS jobs,
       (SELECT {age_s(j.created_at)}
          FROM workflow_node_jobs j
         WHERE j.queue = q.queue AND j.required_version = v.version
           AND queue_workflows_is_claimable(j.status, j.blocked_reason)
         ORDER BY j.required_version, j.priority, j.seq
         LIMIT 1) AS wait_s
  FROM (VALUES ('cpu'), ('gpu')) AS q (queue)
 CROSS JOIN LATERAL (
       WITH RECURSIVE needed (version, n) AS (
           (SELECT j.required_version::text, 1
              FROM workflow_node_jobs j
             WHERE j.queue = q.queue AND j.required_version IS NOT NULL
               AND queue_workflows_is_claimable(j.status, j.blocked_reason)
             ORDER BY j.required_version
             LIMIT 1)
           UNION ALL
           SELECT f.*
             FROM needed
            CROSS JOIN LATERAL (
                  SELECT j.required_version::text, needed.n + 1
                    FROM workflow_node_jobs j
                   WHERE j.queue = q.queue AND j.required_version > needed.version
                     AND queue_workflows_is_claimable(j.status, j.blocked_reason)
                   ORDER BY j.required_version
                   LIMIT 1) f
            WHERE needed.n < 1000)
       SELECT version FROM needed) AS v
 WHERE NOT EXISTS (
       SELECT FROM workers w
        WHERE w.queue = q.queue AND w.state NOT IN ('stopped', 'dead')
          AND w.last_seen > now() - %(stale_s)s::float8 * interval '1 second'
          AND w.detail #> '{claim,versions}' @> to_jsonb(v.version))
 ORDER BY 1, 2
 LIMIT %(listed)s;

-- name: dead_workers column
-- Return `host queue` of the heartbeats that are flagged dead, and of the workers that have been
-- silent for `stale_s` seconds and have a running job.
SELECT host_label || ' ' || queue AS who
  FROM worker_heartbeats
 WHERE last_flagged_dead_at IS NOT NULL
UNION
SELECT host_label || ' ' || queue
  FROM workers w
 WHERE state <> 'stopped' AND last_seen < now() - %(stale_s)s::float8 * interval '1 second'
   AND (EXISTS (SELECT FROM workflow_node_jobs j
                 WHERE j.worker_id = w.worker_id AND j.status = 'running')
        OR EXISTS (SELECT FROM ingest_jobs j
                    WHERE j.worker_id = w.worker_id AND j.status = 'running'))
 ORDER BY 1;

-- name: alerts row
-- Return how many failures wait to be sent, for how many seconds the oldest has, and how many seconds ago a sender
-- was there; NULL: none ever was.
SELECT count(*) AS n,
       max(extract(epoch FROM now() - failed_at))::float8 AS wait_s,
       (SELECT extract(epoch FROM now() - seen_at)::float8 FROM failure_alert_state) AS seen_s
  FROM failure_alerts
 WHERE sent_at IS NULL;

-- name: table_statistics many
-- Return what autovacuum and updates do to these tables.
SELECT s.relname::text AS name, s.n_dead_tup AS dead, s.n_live_tup AS live,
       s.n_tup_upd AS updates, s.n_tup_hot_upd AS hot, s.n_tup_ins AS inserts,
       coalesce('autovacuum_enabled=false' = ANY (c.reloptions)
                OR 'autovacuum_enabled=off' = ANY (c.reloptions), false) AS vacuum_off
  FROM unnest(%(tables)s::text[]) AS t (name)
  JOIN pg_stat_all_tables s ON s.relid = to_regclass(t.name)
  JOIN pg_class c ON c.oid = s.relid
 ORDER BY s.relname;

-- name: indexes_on_renewed many
-- Return the indexes over one of these columns, each given with its table.
SELECT DISTINCT i.indexrelid::regclass::text AS name
  FROM unnest(%(tables)s::text[], %(columns)s::text[]) AS renewed (table_name, column_name)
  JOIN pg_index i ON i.indrelid = to_regclass(renewed.table_name)
  JOIN pg_depend d
    ON d.classid = 'pg_class'::regclass AND d.objid = i.indexrelid AND d.refobjid = i.indrelid
  JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = d.refobjsubid
   AND a.attname = renewed.column_name
 ORDER BY 1;

-- name: input_index row
-- Return about how many runs there are, whether an index finds them by their inputs, and the statement that makes it.
SELECT greatest(reltuples, 0)::bigint AS runs, EXISTS ({input_index()}) AS is_there,
       'CREATE INDEX CONCURRENTLY ON workflow_runs USING gin (context jsonb_path_ops)' AS statement
  FROM pg_class WHERE oid = 'workflow_runs'::regclass;
