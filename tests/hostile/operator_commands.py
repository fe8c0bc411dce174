"""Run the operator's commands in this process, on whatever rows the tables have."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import traceback
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import typer.main

from queue_workflows import __main__ as command
from queue_workflows import db
from tests.hostile import fleet, row_changes

LISTS: tuple[tuple[str, ...], ...] = (
    ("status",), ("runs",), ("workers",), ("queues",), ("models",), ("inputs",), ("jobs", "list"),
    ("schedules",), ("events", "list"), ("acts",),
)  # fmt: skip
"""Commands that read and take no id: they end with 0."""
CHECKS = (("audit", "--since", "all"), ("doctor",))
"""They end with 1 when they found something."""
_WHY = ("why",)
"""Ends with 1 where nobody can run the job."""
LONGEST_ID = 100_000
"""The kernel takes no longer argument."""


_built = functools.cache(typer.main.get_command)
"""Typer builds its commands at each call, which takes longer than most of them."""


class Done(NamedTuple):
    """How a command ended; `code` None: by an exception that would have been a traceback."""

    argv: tuple[str, ...]
    code: int | None
    out: str
    err: str

    def problems(self, allowed: Sequence[int]) -> list[str]:
        """Return the faults of its exit code and output."""
        said = ascii(" ".join(self.argv))[:200]
        found: list[str] = []
        if self.code is None or "Traceback" in self.err:
            found.append(f"`{said}` ends in a traceback: {self.err[-600:]!a}")
        elif self.code not in allowed:
            found.append(f"`{said}` ends with {self.code}: {(self.err or self.out)[-300:]!a}")
        return found + [f"`{said}` prints {each}" for each in fleet.unsafe(self.out + self.err)]


def run(*argv: str) -> Done:
    """Run `queue-workflows` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    code: int | None = None
    root = logging.getLogger()
    # A handler that is there already would keep what the command logs from its own stderr.
    level, kept, root.handlers = root.level, root.handlers, []
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("typer.main.get_command", _built),
    ):
        try:
            code = command.main([*argv])
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            db.close_pool()
            root.handlers = kept
            root.setLevel(level)
    return Done(argv, code, out.getvalue(), err.getvalue())


def read_everything() -> tuple[list[str], str]:
    """Return the faults of commands without an id, and what audit and doctor printed."""
    found: list[str] = []
    printed = ""
    for argv in LISTS:
        for form in ((), ("--json",)):
            done = run(*argv, *form)
            found += done.problems((0,)) + _json_of(done, form)
    found += run("metrics").problems((0,))
    for argv in CHECKS:
        for form in ((), ("--json",)):
            done = run(*argv, *form)
            found += done.problems((0, 1)) + _json_of(done, form)
            printed += done.out
    return found, printed


def _json_of(done: Done, form: tuple[str, ...]) -> list[str]:
    if not form or done.code is None:
        return []
    try:
        json.loads(done.out, parse_constant=_refuse)
    except ValueError as error:
        return [f"`{' '.join(done.argv)}` prints no strict JSON: {error}"]
    return []


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def read_one(change: row_changes.Change, key: str) -> list[str]:
    """Return the faults of the commands that show this row."""
    wanted = {
        "workflow_runs": (("show",), ("inputs",)),
        "ingest_jobs": (("show",), ("jobs", "show"), _WHY),
        "workflow_node_jobs": (("show",), _WHY),
    }.get(change.table, ())
    found: list[str] = []
    if 0 < len(key) < LONGEST_ID:
        for argv in wanted:
            for form in ((), ("--json",)):
                found += [
                    f"{change}: {problem}"
                    for problem in run(*argv, *form, "--", key).problems(
                        (0, 1) if argv is _WHY else (0,)
                    )
                ]
    return found


def remove(written: row_changes.Written, live_runs: set[str], live_jobs: set[str]) -> list[str]:
    """Cancel the live runs and jobs, then delete the jobs; what is wrong with that."""
    found: list[str] = []
    for change, key in written.keys("workflow_runs"):
        if key in live_runs and 0 < len(key) < LONGEST_ID:
            found += [f"{change}: {each}" for each in run("cancel", "--", key).problems((0,))]
    jobs = [each for each in written.keys("ingest_jobs") if 0 < len(each[1]) < LONGEST_ID]
    found += _each("cancel", [each for each in jobs if each[1] in live_jobs])
    return found + _each("delete", jobs)


def _each(what: str, jobs: list[tuple[row_changes.Change, str]]) -> list[str]:
    """Run `jobs cancel` or `jobs delete` for all at once, and one by one if that fails."""
    if not jobs or not run("jobs", what, "--", *[key for _, key in jobs]).problems((0, 1)):
        return []
    return [
        f"{change}: {problem}"
        for change, key in jobs
        for problem in run("jobs", what, "--", key).problems((0, 1))
    ]
