-- Claim jobs one by one when a batch fails, and block the row that makes a claim fail.

-- name: claim_apart row
-- tables: ingest_jobs workflow_node_jobs
-- Claim one job, trying the rows one by one, each in a savepoint. `aside`: of each row that raised its id, its run, the
-- error, and its state now.
SELECT *
  FROM queue_workflows_ingest_claim_apart(
           %(worker)s::text, %(host)s::text, %(queue)s::text, %(lease_s)s::float8, %(obey)s::boolean,
           %(models)s::text[], %(lane)s::smallint, %(versions)s::text[]);

-- name: set_aside value
-- tables: ingest_jobs workflow_node_jobs
-- End a claimed job whose outcome cannot be stored. NULL: nothing about it can be written.
SELECT queue_workflows_ingest_set_aside(%(job)s::text, %(error)s::text, %(worker)s::text, %(claim)s::bigint) AS became;

-- name: claimed_node many
-- Return a node job as `claims.node_rows` does, without the context of its run. No row: the worker
-- does not hold the job.
SELECT r.id, r.claim_no, r.crash_count, r.timeout_s, r.node_module, r.run_id, r.node_id,
       r.required_model, r.run, row_to_json(r) AS body, NULL AS wait_s, NULL AS due_s,
       (SELECT j.lapse_count FROM workflow_node_jobs j WHERE j.id = r.id) AS lapse_count
  FROM (SELECT {claimed_columns(j)}, {run_of(j)} AS run
          FROM workflow_node_jobs j
         WHERE j.id = %(job)s AND j.worker_id = %(worker)s AND j.status = 'running') r;

-- name: claimed_ingest many
-- Return an ingest job as `claims.ingest_rows` does. No row: the worker does not hold the job.
SELECT r.id, r.claim_no, r.crash_count, r.timeout_s, r.task_name, NULL AS run_id, NULL AS node_id,
       NULL AS required_model, NULL AS run, row_to_json(r) AS body, NULL AS wait_s, NULL AS due_s,
       (SELECT j.lapse_count FROM ingest_jobs j WHERE j.id = r.id) AS lapse_count
  FROM (SELECT id, task_name, queue::text, reason, priority, seq, args, claim_no, worker_id, claimed_by,
               attempts, max_attempts, crash_count, timeout_s, headers, partition_key, lock_key
          FROM ingest_jobs WHERE id = %(job)s AND worker_id = %(worker)s AND status = 'running') r;
