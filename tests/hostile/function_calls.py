"""Call the engine's SQL functions with hostile arguments, as roles without rights."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from queue_workflows import db
from tests.hostile import extreme_values

_FUNCTIONS = sql.SQL("""
SELECT p.oid::regprocedure::text AS signature, p.proname AS name,
       ARRAY(SELECT (CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END)::regtype::text
               FROM unnest(p.proargtypes) WITH ORDINALITY AS a (type, place)
               JOIN pg_type t ON t.oid = a.type ORDER BY a.place) AS types,
       ARRAY(SELECT format_type(a.type, NULL)
               FROM unnest(p.proargtypes) WITH ORDINALITY AS a (type, place)
              ORDER BY a.place) AS casts,
       p.prosecdef OR p.provolatile = 'v' AS acts
  FROM pg_proc p
 WHERE p.pronamespace = current_schema()::regnamespace AND p.prokind = 'f'
   AND p.prorettype <> 'trigger'::regtype AND p.proname ~ '^(queue_workflows_|notify_)'
 ORDER BY 1
""")
DATA = ("21", "22", "23", "P0")
"""SQLSTATE classes of a function that has begun; one that is refused is not entered."""
UNBOUNDED = "57014"
LONGEST_S = 5.0


class Function(NamedTuple):
    """One of our functions; `acts`: it may write, or runs with its owner's rights."""

    signature: str
    name: str
    types: list[str]
    casts: list[str]
    acts: bool


def read(conn: psycopg.Connection[Any]) -> list[Function]:
    """Return our functions that can be called by name; a trigger's function cannot."""
    return [Function(*row) for row in conn.execute(_FUNCTIONS).fetchall()]


def arguments(function: Function, rng: random.Random) -> list[str | None]:
    """Return an extreme value for each argument."""
    return [rng.choice(extreme_values.of_type(kind)).text for kind in function.types]


def call(
    conn: psycopg.Connection[Any], function: Function, given: list[str | None], *, nobody: bool
) -> str | None:
    """Call it; what is wrong with how that ended. `nobody`: the role has no right at all."""
    parts = [sql.SQL("%s::{}").format(sql.SQL(cast)) for cast in function.casts]  # type: ignore[arg-type]
    statement = sql.SQL("SELECT * FROM {}({})").format(
        sql.Identifier(function.name), sql.SQL(", ").join(parts)
    )
    shown = f"{function.signature} with {[str(text)[:40] for text in given]}"
    for last in (False, True):
        try:
            conn.execute(statement, given)
        except db.Error as error:
            # A machine that stands still takes long once, an unbounded function takes long again.
            if error.sqlstate != UNBOUNDED:
                return _judged(shown, error, acted=nobody and function.acts)
            if last:
                return f"{shown} takes over {LONGEST_S:g} s"
        else:
            acted = nobody and function.acts
            return f"{shown} is carried out for a role without any right" if acted else None
    return None


def _judged(shown: str, error: db.Error, *, acted: bool) -> str | None:
    """Return the fault of a call that the server refused, if any."""
    state = error.sqlstate or ""
    if state.startswith("XX"):
        return f"{shown}: the server's own error: {error}"
    if acted and state[:2] in DATA:
        return f"{shown} is carried out for a role without any right: {error}"
    return None
