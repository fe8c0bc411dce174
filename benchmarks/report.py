"""Write the table on the terminal, the JSON file and the page in docs/."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import results

HEAD = ("row", "ours", "bare", "ratio", "target", "")
RIGHT = {1, 2}
LINE = 100
"""Characters of a line of prose."""
_VERDICT = {True: "ok", False: "miss", None: ""}


class Section(NamedTuple):
    """One measurement: its name, how it is done, and what came of it."""

    name: str
    about: str
    rows: list[results.Row]
    peer_rows: list[results.PeerRow]
    error: str | None = None


class Report(NamedTuple):
    """A whole run."""

    machine: Mapping[str, str]
    quick: bool
    seconds: float
    sections: list[Section]

    @property
    def rows(self) -> list[results.Row]:
        """Return every row, in order."""
        return [row for section in self.sections for row in section.rows]

    @property
    def peer_rows(self) -> list[results.PeerRow]:
        """Return every peer's row, in order."""
        return [row for section in self.sections for row in section.peer_rows]

    def as_json(self) -> str:
        """Return the whole report as JSON values."""
        data: dict[str, Any] = {
            "machine": dict(self.machine),
            "quick": self.quick,
            "seconds": round(self.seconds, 1),
            "rows": [
                row.as_json() | {"section": section.name}
                for section in self.sections
                for row in section.rows
            ],
            "peers": [row.as_json() for row in self.peer_rows],
            "errors": {s.name: s.error for s in self.sections if s.error},
        }
        return json.dumps(data, indent=2) + "\n"


def cells(row: results.Row) -> tuple[str, ...]:
    """Return a row as the table shows it."""
    ratio = ""
    if row.ratio is not None:
        low, high = min(row.ratios), max(row.ratios)
        spread = f" ({low:.2f}-{high:.2f})" if len(row.ratios) > 1 else ""
        ratio = f"{row.ratio:.2f}{spread}"
    return (
        row.name,
        f"{results.number(row.ours)} {row.unit}",
        "" if row.bare is None else f"{results.number(row.bare)} {row.unit}",
        ratio,
        "" if row.target is None else str(row.target),
        _VERDICT[row.met],
    )


def peer_table(report: Report) -> list[tuple[str, ...]]:
    """Return head and lines: the work, ours, then a column per peer."""
    peers = sorted({row.peer for row in report.peer_rows})
    lines: list[tuple[str, ...]] = [("work", "ours", *peers)]
    for work in dict.fromkeys(row.work for row in report.peer_rows):
        found = {row.peer: row for row in report.peer_rows if row.work == work}
        any_row = next(iter(found.values()))
        values = [
            f"{results.number(found[p].value)} {found[p].unit}" if p in found else "" for p in peers
        ]
        lines.append((work, f"{results.number(any_row.ours)} {any_row.unit}", *values))
    return lines


def plain(lines: Sequence[Sequence[str]], right: Iterable[int]) -> str:
    """Return the columns padded with blanks."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    flush_right = set(right)
    text: list[str] = []
    for line in lines:
        padded = (
            cell.rjust(width) if i in flush_right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        text.append("  ".join(padded).rstrip())
    return "\n".join(text)


def terminal(report: Report) -> str:
    """Return the text that the command prints."""
    parts = ["\n".join(f"{name}: {value}" for name, value in report.machine.items())]
    if report.rows:
        parts.append(plain([HEAD, *(cells(row) for row in report.rows)], RIGHT))
    notes = [f"{row.name}: {row.note}" for row in report.rows if row.note]
    if notes:
        parts.append("\n".join(notes))
    if report.peer_rows:
        lines = peer_table(report)
        parts.append(plain(lines, range(1, len(lines[0]))))
    for section in report.sections:
        if section.error:
            parts.append(f"not measured to the end: {section.name}: {section.error}")
    return "\n\n".join(parts) + "\n"


def _markdown_table(lines: Sequence[Sequence[str]], right: Iterable[int]) -> str:
    flush_right = set(right)
    rule = ["--:" if i in flush_right else "---" for i in range(len(lines[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


_INTRO = """# Performance

Written by `python -m benchmarks --markdown docs/performance.md`; do not edit by hand.

After this page you know what the engine costs. Each figure is compared with that of a bare
psycopg loop, which does the same work on a plain table in the same run, on the same server, with
the same durability: every commit is flushed to disk. The fence, the triggers, the outbox and the
events are on in every row. The engine ("ours") and the bare loop run alternately. The ratio is the
median over the rounds, with the smallest and the largest in brackets. The targets are those
that the engine was designed for.
"""


def markdown(report: Report) -> str:
    """Return the page."""
    parts = [_INTRO.rstrip()]
    if report.quick:
        parts.append("This was a `--quick` run: fewer rounds, smaller tables.")
    lines = [("", ""), *((name, value) for name, value in report.machine.items())]
    parts.append(_markdown_table(lines, ()))
    parts.append(_markdown_table([HEAD, *(cells(row) for row in report.rows)], RIGHT))
    if report.peer_rows:
        peers = peer_table(report)
        parts.append("## Compared with other queues\n\n" + _PEERS)
        parts.append(_markdown_table(peers, range(1, len(peers[0]))))
    parts.append("## How each row is measured")
    for section in report.sections:
        parts.append(f"### {section.name}\n\n{section.about.strip()}")
        notes = [_item(f"{row.name}: {row.note}") for row in section.rows if row.note]
        if notes:
            parts.append("\n".join(notes))
        if section.error:
            parts.append(f"Not measured to the end: {section.error}")
    parts.append(_NEXT)
    return "\n\n".join(parts) + "\n"


def _item(text: str) -> str:
    """Return an entry of a list, in lines of prose."""
    return textwrap.fill(
        text, LINE, initial_indent="- ", subsequent_indent="  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


_NEXT = "Continue with [architecture](architecture.md), if you want to change the code."
_PEERS = """Each of these queues does the same work in the same run. Each is installed from the
package index into an environment of its own. It has its default settings, except for what the work
requires: one job at a time, four at once, or batches of 100. DBOS polls every 10 ms. With its
default of one second the benchmark would measure that poll. Prefect stores its data in SQLite, its
default; the others use the server of this run. They write less than we do: pgqueuer deletes a
finished job and appends one line to a log, procrastinate keeps the row and an event. Drain rates
are by the start times of handlers. For the other queues the pickup time begins when the enqueue
call returns, after the commit. For this engine it begins earlier: when COMMIT is sent."""
