"""Find a run or job by its id as stored, as printed with escapes, or by a unique prefix of it."""

from __future__ import annotations

from queue_workflows import db, errors
from queue_workflows.cli import command
from queue_workflows.dag import payload
from queue_workflows.db import statements
from queue_workflows.runtime import display, identity
from queue_workflows.types import Row

HELP = "Put -- before an id that begins with a dash. Escapes such as \\x1b are understood."
PREFIX_HELP = f"A unique prefix of a generated id is accepted. {HELP}"
RUN_OR_JOB = f"RUN|JOB  The ids of runs or jobs. {PREFIX_HELP}"
CANDIDATES = 5
"""The most ids that are listed for an ambiguous prefix."""


def resolve(
    conn: db.Connection, text: str, *, kind: str | None = None, jobs_first: bool = False
) -> tuple[str, Row | None]:
    """Return the stored id and its run or job, as `overview.find` does; None if there is none.

    The exact id comes first, then an id with escapes (`a\x1b`, as commands print it), then the only
    generated id that begins with `text`. `kind`: only ids of a `run`, `node job` or `ingest job`
    are candidates for that. `jobs_first`: if a run and a job share an id, return the job. Raises
    `InvalidConfig`, which lists them, when there are several candidates.
    """
    # The database takes neither NUL nor the surrogates that a shell makes of other bytes.
    for one in filter(payload.is_storable, dict.fromkeys((text, display.restored(text)))):
        if row := statements.overview.find(conn, id=one, jobs_first=jobs_first):
            return one, row
    if not text or not payload.is_storable(text):
        return text, None
    found = starting_with(conn, text, limit=CANDIDATES + 1)
    fitting = [each for each in found if kind in (None, each["kind"])]
    if not fitting:
        return text, None
    if len(fitting) > 1:
        some = ", ".join(f"{each['kind']} {each['id']}" for each in fitting[:CANDIDATES])
        more = ", ..." if len(fitting) > CANDIDATES else ""
        text = f"{text!r} is the start of several ids: {some}{more}"
        raise errors.InvalidConfig(display.line(text, 500))
    any_id = fitting[0]["id"]
    return any_id, statements.overview.find(conn, id=any_id, jobs_first=jobs_first)


def starting_with(conn: db.Connection, prefix: str, *, limit: int) -> list[Row]:
    """Return runs and jobs whose id is a UUID with this prefix; at most `limit` of each kind.

    Each row has `kind` and `id`. The ids are ranges of the primary keys. Ids of another form than
    UUIDs, which apps give, are not found.
    """
    among = identity.uuid_range(prefix)
    if among is None:
        return []
    low, high = among
    return statements.history_rows.ids_in_range(
        conn, prefix=prefix, low=low, high=high, limit=limit
    )


def found(start: str, *, jobs_first: bool = False) -> tuple[str, str]:
    """Return kind and id of the run or job with this id or unique prefix.

    Raises `command.Refused` if there is none, and what `resolve` raises, which has `jobs_first`.
    """
    with db.transaction() as conn:
        any_id, row = resolve(conn, start, jobs_first=jobs_first)
    if row is None:
        raise command.Refused(f"there is no run or job {start!r}")
    return row["kind"], any_id
