-- Rows of 0.3.0 in every state, for tests of the takeover.
INSERT INTO workflow_runs (id, workflow_name, status, mode, queued_at, created_at)
SELECT 'r' || i, 'w', (ARRAY['queued', 'running', 'completed', 'failed', 'cancelled'])[1 + i % 5],
       (ARRAY['node', 'step'])[1 + i % 2], '2024-01-01', '2024-01-01'
  FROM generate_series(1, 20) i;
INSERT INTO workflow_node_jobs (id, run_id, node_id, node_module, queue, required_model, status, priority, inputs,
                                claimed_by, host_label, lease_expires_at, created_at, watchdog_retries)
SELECT 'j' || i, 'r' || (1 + i % 20), 'n' || i, 'm', CASE WHEN i % 3 = 0 THEN 'gpu' ELSE 'cpu' END,
       CASE WHEN i % 3 = 0 THEN (ARRAY['', 'a', 'b', NULL])[1 + i % 4] END,
       (ARRAY['queued', 'running', 'completed', 'failed', 'cancelled', 'awaiting_input', 'skipped'])[1 + i % 7],
       i % 5, '{}', (ARRAY['box', NULL])[1 + i % 2], (ARRAY['h', NULL, NULL])[1 + i % 3],
       CASE WHEN i % 4 = 0 THEN '2999-01-01'::timestamptz WHEN i % 4 = 1 THEN '2024-01-02' END,
       '2024-01-01'::timestamptz + ((i * 7919) % 100) * interval '1 min', i % 3
  FROM generate_series(1, 140) i;
INSERT INTO ingest_jobs (id, task_name, queue, status, priority, claimed_by, lease_expires_at, created_at, args)
SELECT 'i' || i, 't', (ARRAY['fetch', 'load', 'x'])[1 + i % 3],
       (ARRAY['queued', 'running', 'completed', 'failed', 'cancelled'])[1 + i % 5], i % 4,
       (ARRAY['box', NULL])[1 + i % 2],
       CASE WHEN i % 4 = 0 THEN '2999-01-01'::timestamptz WHEN i % 4 = 1 THEN '2024-01-02' END,
       '2024-01-01'::timestamptz + ((i * 7919) % 100) * interval '1 min', '{"a": 1}'
  FROM generate_series(1, 140) i;
