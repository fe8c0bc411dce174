"""Check the tables that are updated often: dead rows, and whether renewals are HOT updates."""

from __future__ import annotations

from queue_workflows import db
from queue_workflows.admin import doctor as facts
from queue_workflows.cli.findings import OK, WARNING, Finding, Findings
from queue_workflows.db import statements

DEAD_ROWS_WARN, DEAD_SHARE_WARN = 10_000, 0.5
"""Autovacuum starts at a fifth. At half of a large table it is too slow, or blocked."""
UPDATES_JUDGED = 1_000
"""With fewer updates a ratio is meaningless."""
HOT_SHARE_WARN = 0.5
"""Share of HOT updates of `workers`: all of them are renewals and should be HOT."""
COLD_UPDATES_WARN = 10.0
"""Updates per job that are not HOT: its claim and its end are two, each requeue adds two."""


def dead_rows(conn: db.Connection) -> Findings:
    """Report tables that autovacuum leaves bloated, and those for which it is off."""
    rows = statements.doctor.table_statistics(conn, tables=facts.HOT_TABLES)
    bloated = [
        f"{row['name']} ({row['dead']} dead, {row['live']} live)"
        for row in rows
        if row["dead"] > DEAD_ROWS_WARN
        and row["dead"] > DEAD_SHARE_WARN * (row["dead"] + row["live"])
    ]
    if off := [row["name"] for row in rows if row["vacuum_off"]]:
        text = f"autovacuum is off for {', '.join(off)}"
        yield Finding("dead rows", WARNING, text, "ALTER TABLE ... RESET (autovacuum_enabled)")
    elif bloated:
        remedy = "VACUUM them, and see what holds vacuum back (transactions above)"
        yield Finding("dead rows", WARNING, ", ".join(bloated), remedy)
    else:
        yield Finding("dead rows", OK, f"{sum(row['dead'] for row in rows)} in all")


def renewals(conn: db.Connection) -> Findings:
    """Report renewals that are no HOT updates, and the indexes that make them so."""
    rows = [
        row
        for row in statements.doctor.table_statistics(conn, tables=facts.HOT_TABLES)
        if row["name"] in facts.RENEWED
    ]
    shares = ", ".join(
        f"{row['name']} {row['hot'] / row['updates']:.0%}" for row in rows if row["updates"]
    )
    text = f"HOT updates: {shares or 'no updates yet'}"
    cold = [row["name"] for row in rows if _are_cold(row)]
    if named := facts.indexes_on_renewed(conn):
        text = f"renewals write what is indexed by {', '.join(named)}"
        yield Finding("renewals", WARNING, text, "drop these indexes")
    elif cold:
        remedy = "look for long transactions and full pages: VACUUM, keep the fillfactor"
        yield Finding("renewals", WARNING, f"{text}; too few for {', '.join(cold)}", remedy)
    else:
        yield Finding("renewals", OK, text)


def _are_cold(row: dict[str, int]) -> bool:
    if row["updates"] < UPDATES_JUDGED:
        return False
    if str(row["name"]) == "workers":
        return row["hot"] < HOT_SHARE_WARN * row["updates"]
    return row["updates"] - row["hot"] > COLD_UPDATES_WARN * max(1, row["inserts"])
