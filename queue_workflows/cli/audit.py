"""`queue-workflows audit`: whether the database keeps the laws."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

import typer

from queue_workflows import db, errors
from queue_workflows.cli import command, options, output
from queue_workflows.store import audit as laws
from queue_workflows.store import bad_rows

SHOWN = 5
"""Offenders shown of each law: enough to start from, and a broken law rarely has a single one."""
_SINCE = re.compile(r"(\d{1,6})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MARKS = {"ok": "ok", "broken": "BROKEN", "unfinished": "UNFINISHED", "elsewhere": "-"}


def audit(
    since: Annotated[
        str,
        typer.Option(metavar="TIME", help="How far to look back: 90m, 24h, 7d, or `all`."),
    ] = "24h",
    app: options.App = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Check the laws; exit code 1 when one is broken. Reads only, and is safe on a live system."""

    def body() -> int:
        since_s = window(since)
        with command.reading(app) as words, db.connect() as conn:
            found = collect(conn, since_s)
            bad = [*bad_rows.stuck(conn, SHOWN), *bad_rows.out_of_range(conn, SHOWN)]
        if as_json:
            rows = [row._asdict() for row in bad]
            output.dump({"database": words, "since": since, "laws": found, "bad_rows": rows})
        else:
            show(found)
            show_bad(bad)
        return int(any(law["state"] in ("broken", "unfinished") for law in found))

    command.execute("audit", body, debug=debug)


def window(text: str) -> float | None:
    """Seconds to look back; None for `all`. Raises `InvalidConfig` for any other word."""
    if text == "all":
        return None
    match = _SINCE.fullmatch(text)
    if match is None:
        raise errors.InvalidConfig(f"--since {text}: it should look like 90m, 24h, 7d, or be `all`")
    return float(match[1]) * _UNITS_S[match[2]]


def collect(conn: db.Connection, since_s: float | None) -> list[dict[str, Any]]:
    """One entry per law, with the keys that `--json` shows.

    law, name, sentence, state (`ok`, `broken`, `unfinished`, `elsewhere`), note, offenders (id,
    text; at most SHOWN), more (whether there are others), seconds.
    """
    values = laws.parameters(conn, since_s=since_s, limit=SHOWN + 1)
    return [_judged(conn, law, values) for law in laws.LAWS]


def _judged(conn: db.Connection, law: laws.Law, values: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    note, found = law.elsewhere, list[laws.Offender]()
    state = "elsewhere"
    if law.statement is not None:
        outcome = laws.check(conn, law, values)
        if isinstance(outcome, str):
            state, note = "unfinished", f"{outcome}: try a shorter --since"
        else:
            state, found = ("broken" if outcome else "ok"), outcome
    return {
        "law": law.number,
        "name": law.name,
        "sentence": law.sentence,
        "state": state,
        "note": note,
        "offenders": [offender._asdict() for offender in found[:SHOWN]],
        "more": len(found) > SHOWN,
        "seconds": round(time.monotonic() - began, 3),
    }


def show_bad(bad: list[bad_rows.BadRow]) -> None:
    """Print the rows that the engine cannot work on; they break no invariant."""
    for row in bad:
        text = output.line(f"{row.kind} {row.id}: {row.text}; {row.command}", 1000)
        output.echo(f"bad row {text}")


def show(found: list[dict[str, Any]]) -> None:
    """Print a line per law, and below a broken one what breaks it."""
    for law in found:
        note = f" ({law['note']})" if law["note"] else ""
        output.echo(f"law {law['law']:2}  {_MARKS[law['state']]:10}  {law['sentence']}{note}")
        for offender in law["offenders"]:
            output.echo(f"          {output.line(offender['id'])}: {output.line(offender['text'])}")
        if law["more"]:
            output.echo("          ... and others")
