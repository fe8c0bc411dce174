-- Read the columns of a claimed job separately, when its row as a whole cannot be loaded.

-- name: node_rows many
-- Return a node job as `claims.node_rows` does, without the context of its run. No row: the worker
-- does not hold the job.
SELECT r.id, r.claim_no, r.crash_count, r.timeout_s, r.node_module, r.run_id, r.node_id,
       r.required_model, r.run, row_to_json(r) AS body, NULL AS wait_s, NULL AS due_s,
       (SELECT j.lapse_count FROM workflow_node_jobs j WHERE j.id = r.id) AS lapse_count
  FROM (SELECT j.id, j.run_id, j.node_id, j.node_module, j.queue, j.required_model, j.status,
       j.pipeline_name, j.priority, j.seq, j.claim_no, j.worker_id, j.claimed_by, j.generation,
       j.attempts, j.max_attempts, j.crash_count, j.watchdog_retries, j.timeout_s, j.inputs,
       j.input_template, j.ref_heads,
       (SELECT json_build_object(
                   'id', r.id, 'out_dir', r.out_dir, 'workflow_name', r.workflow_name,
                   'generation', r.generation, 'revision', r.revision,
                   'born', least(9223372036854775807, greatest(-9223372036854775808,
                               extract(epoch FROM r.created_at) * 1000000))::bigint,
                   'traceparent', r.headers ->> 'traceparent')
          FROM workflow_runs r WHERE r.id = j.run_id) AS run
  FROM workflow_node_jobs j
 WHERE j.id = %(job)s AND j.worker_id = %(worker)s AND j.status = 'running') r;

-- name: ingest_rows many
-- Return an ingest job as `claims.ingest_rows` does. No row: the worker does not hold the job.
SELECT r.id, r.claim_no, r.crash_count, r.timeout_s, r.task_name, NULL AS run_id, NULL AS node_id,
       NULL AS required_model, NULL AS run, row_to_json(r) AS body, NULL AS wait_s, NULL AS due_s,
       (SELECT j.lapse_count FROM ingest_jobs j WHERE j.id = r.id) AS lapse_count
  FROM (SELECT id, task_name, queue::text, reason, priority, seq, args, claim_no, worker_id, claimed_by,
       attempts, max_attempts, crash_count, timeout_s, headers, partition_key, lock_key
  FROM ingest_jobs
 WHERE id = %(job)s AND worker_id = %(worker)s AND status = 'running') r;
