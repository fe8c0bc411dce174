-- Claim jobs one by one when a batch fails, and block the row that makes a claim fail.

-- name: claim_apart row
-- Claim one job of `table`, trying the rows one by one, each in a savepoint. `aside`: of each
-- row that raised its id, its run, the error, and its state now.
SELECT *
  FROM queue_workflows_claim_apart(
           %(table)s::text, %(worker)s::text, %(host)s::text, %(queue)s::text, %(lease_s)s::float8,
           %(obey)s::boolean, %(promote)s::boolean, %(models)s::text[], %(lane)s::smallint,
           %(versions)s::text[]);

-- name: set_aside value
-- End a claimed job of `table` whose outcome cannot be stored. NULL: nothing about it can be
-- written.
SELECT queue_workflows_set_aside(
           %(table)s::text, %(job)s::text, %(error)s::text, %(worker)s::text, %(claim)s::bigint)
           AS became;
