-- Record acts on request, name their actor, list and delete them.

-- name: named_actor value
-- Return the actor that this transaction or session names, '' or NULL without one.
SELECT current_setting('queue_workflows.actor', true) AS actor;

-- name: name_actor none
-- Name who makes the changes in the rest of this transaction, for the history of jobs.
SELECT set_config('queue_workflows.actor', %(actor)s, true);

-- name: add none
-- Record an act, a row for each of its subjects, by the actor that the transaction names, else by its login.
INSERT INTO operator_acts (actor, via, action, kind, subject, reason, detail)
SELECT queue_workflows_actor(), %(via)s::text, %(action)s::text, s.kind, s.subject, %(reason)s::text, %(detail)s::jsonb
  FROM unnest(%(kinds)s::text[], %(subjects)s::text[]) AS s (kind, subject);

-- name: find many unprepared
-- List acts, the newest first. A filter that is NULL matches every act. `before`: only acts with a smaller `id`, for the
-- next page. No plan is kept, so that a subject is found by its index.
SELECT id, at, actor, login, via, action, kind, subject, reason, detail
  FROM operator_acts
 WHERE (%(at)s::timestamptz IS NULL OR at >= %(at)s)
   AND (%(ago)s::interval IS NULL OR at >= now() - %(ago)s::interval)
   AND (%(actor)s::text IS NULL OR actor = %(actor)s)
   AND (%(action)s::text IS NULL OR action = %(action)s)
   AND (%(kind)s::text IS NULL OR kind = %(kind)s)
   AND (%(subject)s::text IS NULL OR subject = %(subject)s)
   AND (%(before)s::bigint IS NULL OR id < %(before)s)
 ORDER BY id DESC LIMIT %(limit)s;

-- name: prune count
-- Delete up to `batch` acts that are over `days` days old.
DELETE FROM operator_acts WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM operator_acts
     WHERE at < now() - %(days)s * interval '1 day'
     ORDER BY id LIMIT %(batch)s));
