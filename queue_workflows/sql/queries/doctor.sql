-- The facts that `queue-workflows doctor` and `connect` check. None reads jobs that have ended, and
-- none needs a right that a role for reading lacks. An infinite time counts as the nearest that the
-- server can subtract from now().

-- name: server row
-- Return the facts about the server: its version, whether it is a standby or read-only, and the role.
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
-- Return the oldest five transactions of this database except this one. `idle_s` is NULL unless the backend
-- is idle inside its transaction. With pg_read_all_stats, the transactions of other roles are included.
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

-- name: lapsed row
-- Return how many running jobs have a lapsed lease, and for how many seconds the oldest has.
SELECT count(*) AS n,
       max({age_s(lease_expires_at)}) AS since_s
  FROM (SELECT lease_expires_at FROM workflow_node_jobs WHERE status = 'running'
        UNION ALL
        SELECT lease_expires_at FROM ingest_jobs WHERE status = 'running') running
 WHERE lease_expires_at < now();

-- name: silent_workers many
-- Return the hosts and queues, up to 1,000, of which a heartbeat is flagged as dead while they are on, or a worker that is
-- dead, or was not seen for `stale_s` seconds, still has a running job.
SELECT host_label, queue
  FROM worker_heartbeats
 WHERE last_flagged_dead_at IS NOT NULL AND queue_workflows_off_policy(host_label, queue) IS NULL
 UNION
SELECT w.host_label, w.queue
  FROM workers w
 WHERE (w.state = 'dead' OR w.state <> 'stopped' AND w.last_seen < now() - %(stale_s)s::float8 * interval '1 second')
   AND w.last_seen > now() - interval '1 day'
   AND (EXISTS (SELECT FROM workflow_node_jobs j WHERE j.worker_id = w.worker_id AND j.status = 'running')
        OR EXISTS (SELECT FROM ingest_jobs j WHERE j.worker_id = w.worker_id AND j.status = 'running'))
 ORDER BY host_label, queue
 LIMIT 1000;

-- name: missing_versions many
-- Return the versions of nodes that due jobs need and no live worker of their queue has, up to
-- `listed`, with up to three of these jobs and the age of the oldest.
WITH needed AS (
    SELECT queue::text, required_version::text AS version, min(created_at) AS since
      FROM workflow_node_jobs
     WHERE required_version IS NOT NULL AND queue_workflows_is_claimable(status, blocked_reason)
     GROUP BY 1, 2)
SELECT n.queue, n.version, {age_s(n.since)} AS wait_s,
       ARRAY(SELECT j.id
               FROM workflow_node_jobs j
              WHERE j.queue = n.queue AND j.required_version = n.version
                AND queue_workflows_is_claimable(j.status, j.blocked_reason)
              ORDER BY j.required_version, j.priority, j.seq
              LIMIT 3) AS jobs
  FROM needed n
 WHERE NOT EXISTS (
       SELECT FROM workers w
        WHERE w.queue = n.queue AND {is_live(w, %(stale_s)s::float8)}
          AND w.detail #> '{claim,versions}' @> to_jsonb(n.version))
 ORDER BY 1, 2
 LIMIT %(listed)s;

-- name: alerts row
-- Return how many failures wait to be sent, for how many seconds the oldest has, and how many seconds ago a sender
-- was there, or NULL if there never was one.
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

-- name: indexes_on_renewed column
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
