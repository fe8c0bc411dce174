"""Define `queue-workflows audit`: report whether the database keeps the invariants."""

from __future__ import annotations

import time
from typing import Annotated, Any

from queue_workflows import db, errors
from queue_workflows.admin import audit as checks
from queue_workflows.admin import doctor as facts
from queue_workflows.cli import command, define, options, output
from queue_workflows.runtime import clock

SHOWN = 5
"""Offenders shown of each invariant: enough to start from."""
_MARKS = {"ok": "ok", "broken": "BROKEN", "unfinished": "UNFINISHED", "elsewhere": "-"}


@define.command("audit", reads=False)
def audit(
    since: Annotated[
        str, options.option("TIME", "How far to look back: 90m, 24h, 7d, or `all`.")
    ] = "24h",
    *,
    app: str | None,
) -> define.Shown:
    """Check the invariants; exit code 1 if one is broken.

    It only reads, and is safe on a live system.
    """
    since_s = window(since)
    with command.reading(app) as database, db.connect() as conn:
        found = collect(conn, since_s)
        bad = [*facts.stuck_rows(conn, SHOWN), *facts.rows_out_of_range(conn, SHOWN)]
    rows = [row._asdict() for row in bad]
    report = {"database": database, "since": since, "invariants": found, "bad_rows": rows}
    is_bad = any(each["state"] in ("broken", "unfinished") for each in found)
    return define.Shown(report, lambda: (show(found), show_bad(bad)), int(is_bad))


def window(text: str) -> float | None:
    """Return how many seconds to look back; None for `all`.

    Raises `InvalidConfig` for any other word.
    """
    if text == "all":
        return None
    if (span := clock.span(text)) is None:
        raise errors.InvalidConfig(f"--since {text} should look like 90m, 24h, 7d, or be `all`")
    return span.total_seconds()


def collect(conn: db.Connection, since_s: float | None) -> list[dict[str, Any]]:
    """Check every invariant; return one entry for each, with the keys that `--json` shows.

    invariant (its number), name, sentence, state (`ok`, `broken`, `unfinished`, `elsewhere`),
    note, offenders (id, text; at most SHOWN), more (whether there are others), seconds.
    """
    values = checks.parameters(conn, since_s=since_s, limit=SHOWN + 1)
    return [_check(conn, invariant, values) for invariant in checks.INVARIANTS]


def _check(
    conn: db.Connection, invariant: checks.Invariant, values: dict[str, Any]
) -> dict[str, Any]:
    began = time.monotonic()
    note, found = invariant.note, list[checks.Offender]()
    state = "elsewhere"
    if invariant.statement is not None:
        outcome = checks.check(conn, invariant, values)
        if isinstance(outcome, str):
            state, note = "unfinished", f"{outcome}: try a shorter --since"
        else:
            state, found = ("broken" if outcome else "ok"), outcome
    return {
        "invariant": invariant.number,
        "name": invariant.name,
        "sentence": invariant.sentence,
        "state": state,
        "note": note,
        "offenders": [offender._asdict() for offender in found[:SHOWN]],
        "more": len(found) > SHOWN,
        "seconds": round(time.monotonic() - began, 3),
    }


def show_bad(bad: list[facts.BadRow]) -> None:
    """Print the rows that the engine cannot work on; they break no invariant."""
    for row in bad:
        text = output.line(f"{row.kind} {row.id}: {row.text}; {row.command}", 1000)
        output.echo(f"bad row {text}")


def show(found: list[dict[str, Any]]) -> None:
    """Print a line for each invariant, and the offenders below a broken one."""
    for each in found:
        note = f" ({each['note']})" if each["note"] else ""
        mark = _MARKS[each["state"]]
        output.echo(f"invariant {each['invariant']:2}  {mark:10}  {each['sentence']}{note}")
        for offender in each["offenders"]:
            output.echo(f"          {output.line(offender['id'])}: {output.line(offender['text'])}")
        if each["more"]:
            output.echo("          ... and others")
