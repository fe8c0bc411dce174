-- Store people's answers, claim them, and complete the input nodes with them.

-- name: submit one
-- Store an answer to a node and return its row. Returns no row if another answer to the node is in flight.
INSERT INTO workflow_input_submissions (run_id, node_id, value)
VALUES (%(run_id)s, %(node_id)s, %(value)s::jsonb)
    ON CONFLICT (run_id, node_id) WHERE status IN ('pending', 'processing') DO NOTHING
RETURNING *;

-- name: hold_node none
-- Keep other transactions from ending the wait of an input node by its time-out until this one
-- ends. The function locks the row, so that a role that submits answers needs no right to nodes.
SELECT queue_workflows_hold_node(%(run_id)s::text, %(node_id)s::text);

-- name: next_due value
-- Return the id of the oldest answer that is due and not locked, without those of `set_aside`. An
-- answer that is `processing` for longer than `after_s` seconds is due again. So is an answer whose
-- `claimed_at` is in the future, which no claim wrote and which would never become due. Each half
-- walks its index, since sorting all waiting answers for each of them takes hours for 20,000.
WITH pending AS (
    SELECT id, created_at FROM workflow_input_submissions
     WHERE status = 'pending'
       AND (available_at IS NULL OR available_at <= now()) AND id <> ALL (%(set_aside)s::text[])
     ORDER BY created_at LIMIT 1 FOR UPDATE SKIP LOCKED),
processing AS (
    SELECT id, created_at FROM workflow_input_submissions
     WHERE status = 'processing'
       AND coalesce(claimed_at, created_at)
           NOT BETWEEN now() - %(after_s)s * interval '1 second' AND now() + interval '1 day'
       AND (available_at IS NULL OR available_at <= now()) AND id <> ALL (%(set_aside)s::text[])
     ORDER BY created_at LIMIT 1 FOR UPDATE SKIP LOCKED)
SELECT id FROM (SELECT * FROM pending UNION ALL SELECT * FROM processing) due
 ORDER BY created_at LIMIT 1;

-- name: claim one
-- Claim an answer that is still due, as in `next_due`, count the attempt and return the row, which
-- is locked. Returns no row if another transaction has it, or it is not due any more.
WITH next AS MATERIALIZED (
    SELECT id FROM workflow_input_submissions
     WHERE id = %(id)s
       AND (status = 'pending'
            OR (status = 'processing' AND coalesce(claimed_at, created_at)
                NOT BETWEEN now() - %(after_s)s * interval '1 second' AND now() + interval '1 day'))
       AND (available_at IS NULL OR available_at <= now())
       FOR UPDATE SKIP LOCKED)
UPDATE workflow_input_submissions s
   SET status = 'processing', claimed_at = now(),
       attempts = least(greatest(s.attempts, 0), 999999) + 1
 WHERE s.id = (SELECT id FROM next)
RETURNING s.*;

-- name: finish none
-- Record that the node of an answer was completed with it.
UPDATE workflow_input_submissions SET status = 'processed', processed_at = now(), error = NULL
 WHERE id = %(id)s;

-- name: refuse none
-- Record why an answer cannot be taken.
UPDATE workflow_input_submissions
   SET status = 'failed', processed_at = now(), error = %(error)s
 WHERE id = %(id)s;

-- name: postpone none
-- Make a claimed answer due again later, without counting its claim as an attempt.
UPDATE workflow_input_submissions
   SET status = 'pending', error = %(error)s, attempts = greatest(attempts, 1) - 1,
       available_at = now() + %(after_s)s * interval '1 second'
 WHERE id = %(id)s;

-- name: count_failure value
-- Count a failed attempt, make the answer due again later, and return how many attempts failed.
-- Returns no row if the answer is over.
UPDATE workflow_input_submissions
   SET status = 'pending', error = %(error)s,
       attempts = least(greatest(attempts, 0), 999999) + 1,
       available_at = now() + %(after_s)s * interval '1 second'
 WHERE id = %(id)s AND status IN ('pending', 'processing')
RETURNING attempts;

-- name: complete_node one
-- Complete a node that waits for an answer, with the answer or the default. Returns no row if it
-- does not wait. `by` is the origin of the value in the event: `input` for an answer, `timeout` for
-- the default.
WITH done AS (
    UPDATE workflow_node_jobs j
       SET status = 'completed', context_delta = %(result)s::jsonb, error = NULL,
           finished_at = now(), progress = {progress_at_end(j)}
     WHERE j.id = %(job)s AND (j.status = 'awaiting_input') IS TRUE
 {node:recorded(j, 'completed', detail => jsonb_build_object('by', %(by)s::text))};
