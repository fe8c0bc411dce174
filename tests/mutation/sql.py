"""Run `python -m tests.mutation.sql`: change the SQL in one place, see which test notices.

The mutants are made by hand and listed in `sql_mutants.toml`, each with the tests that have to
fail. Exits with 1 if a mutant survives that the list gives no reason for, if one is killed that the
list says survives, if one cannot be judged, or if more than 5 % survive.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation import checkouts
from tests.support import database, reaper

ROOT = Path(__file__).parents[2]
SQL = Path("queue_workflows/sql")
LISTED = Path(__file__).with_name("sql_mutants.toml")
MOST_SURVIVORS = 0.05
WORKERS = min(2, os.cpu_count() or 1)
TEST_S = 30
"""A test that takes longer does not end, since the mutant waits for a lock that nobody releases."""
RUN_S = 150.0
BASELINE_S = 900.0
"""How long the tests of the whole list may take without a mutant."""
_PYTEST = (
    *("-x", "-q", "--no-header", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly"),
    *("-m", "", "--color=no", f"--timeout={TEST_S}"),
)
_NEXT_PART = re.compile(r"^(?:CREATE |-- name: )", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", re.MULTILINE)
_NO_SQL = re.compile(
    r"syntax error at|(?:column|relation|variable) \S+ does not exist|(?:function|operator)[^\n]*"
    r"does not exist|missing FROM-clause|could not determine|MigrationFailed|UsageError"
)
_NOT_INHERITED = ("PYTEST_", "QW_TEST_", "COV_")


class Mutant(NamedTuple):
    """One entry of the list; the comment at its head describes the fields."""

    name: str
    file: str
    before: str
    after: str
    breaks: str
    tests: Sequence[str] = ()
    within: str = ""
    survives: str = ""

    def applied(self, text: str) -> str:
        """Return the text with the change; raise ValueError unless it has exactly one place."""
        start, end = self._part(text)
        if text[start:end].count(self.before) != 1:
            count = text[start:end].count(self.before)
            raise ValueError(f"{self.name}: `before` occurs {count} times, not once")
        place = text.index(self.before, start)
        return text[:place] + self.after + text[place + len(self.before) :]

    def _part(self, text: str) -> tuple[int, int]:
        if not self.within:
            return 0, len(text)
        if text.count(self.within) != 1:
            raise ValueError(f"{self.name}: `within` occurs {text.count(self.within)} times")
        start = text.index(self.within)
        found = _NEXT_PART.search(text, start + len(self.within))
        return start, found.start() if found else len(text)


class Verdict(NamedTuple):
    """What became of a mutant: the first test that failed, or why none could."""

    mutant: Mutant
    killed_by: str
    """A test, or `time-out`; empty if the mutant survived or could not be judged."""
    problem: str
    """Why the run says nothing about the mutant, such as SQL that PostgreSQL rejects."""
    seconds: float

    @property
    def survived(self) -> bool:
        """Return whether every test passed."""
        return not self.killed_by and not self.problem

    def __str__(self) -> str:
        outcome = "killed  " if self.killed_by else "SURVIVED" if self.survived else "BROKEN  "
        told = self.killed_by or self.problem or self.mutant.survives or self.mutant.breaks
        return f"{outcome} {self.seconds:5.1f} s  {self.mutant.name:34} {told}"


def listed(path: Path = LISTED) -> list[Mutant]:
    """Return the mutants of a list; raise ValueError for a name that occurs twice."""
    # Python 3.10 has no reader of TOML; pytest brings one there.
    reader: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    entries = reader.loads(path.read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(**entry) for entry in entries]
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path.name}: two mutants are named {', '.join(sorted(twice))}")
    return mutants


class Checkout:
    """A copy of the checkout, and its server."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self._folder, self._dsn = folder, dsn
        checkouts.copy(folder)

    def judge(self, mutant: Mutant) -> Verdict:
        """Return what the mutant's tests say about it; the copy is afterwards as before."""
        begun = time.monotonic()
        path = self._folder / SQL / mutant.file
        text = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(text), encoding="utf-8")
        try:
            killed_by, problem = self.failure(mutant.tests)
        finally:
            path.write_text(text, encoding="utf-8")
        return Verdict(mutant, killed_by, problem, time.monotonic() - begun)

    def failure(self, tests: Sequence[str], most_s: float = RUN_S) -> tuple[str, str]:
        """Return the first of these tests that fails, and why the run says nothing."""
        if not tests:
            return "", "the list names no tests"
        code, output = self._pytest([f"tests/{test}" for test in tests], most_s)
        if code is None:
            return f"time-out of {most_s:.0f} s", ""
        found = _FAILED.search(output)
        if code == 0:
            return "", ""
        if wrong := _NO_SQL.search(output):
            return "", f"not valid: {wrong.group()}"
        if code == 1 and found:
            return found.group(1).removeprefix("tests/"), ""
        return "", f"pytest exits with {code}: {' '.join(output.split())[-300:]}"

    def _pytest(self, paths: Sequence[str], most_s: float) -> tuple[int | None, str]:
        own = {key: text for key, text in os.environ.items() if not key.startswith(_NOT_INHERITED)}
        # A database of its own for each copy, which a killed run leaves for the next one to drop.
        dsn = database.forced(self._dsn, f"sql{self._folder.name}")
        process = subprocess.Popen(
            ["nice", "-n", "10", sys.executable, "-m", "pytest", *_PYTEST, *paths],
            cwd=self._folder,
            env={**own, "PYTHONPATH": str(self._folder), "QUEUE_WORKFLOWS_TEST_DB_URL": dsn},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=most_s)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, output


def run(mutants: Sequence[Mutant], dsn: str) -> Iterator[Verdict]:
    """Yield the verdict of each mutant as it is known; `dsn`: the server, of any database of it.

    Raises RuntimeError if a test of the list fails without a mutant.
    """
    with tempfile.TemporaryDirectory(prefix="qw-sql-mutants-") as folder:
        free: queue.SimpleQueue[Checkout] = queue.SimpleQueue()
        for number in range(WORKERS):
            free.put(Checkout(Path(folder) / str(number), dsn))

        def with_one(call: Callable[[Checkout], Any]) -> Any:
            checkout = free.get()
            try:
                return call(checkout)
            finally:
                free.put(checkout)

        tests = sorted({test for mutant in mutants for test in mutant.tests})
        killed_by, problem = with_one(lambda checkout: checkout.failure(tests, BASELINE_S))
        if killed_by or problem:
            raise RuntimeError(f"without a mutant: {killed_by or problem}")
        with futures.ThreadPoolExecutor(WORKERS) as pool:
            started = [
                pool.submit(with_one, lambda checkout, each=mutant: checkout.judge(each))
                for mutant in mutants
            ]
            try:
                yield from (done.result() for done in futures.as_completed(started))
            finally:
                pool.shutdown(cancel_futures=True)


def wrong(verdicts: Sequence[Verdict], *, partly: bool = False) -> list[str]:
    """Return what has to be changed, one line each; `partly`: of a part of the list."""
    found: list[str] = []
    for verdict in verdicts:
        mutant = verdict.mutant
        if verdict.problem:
            found.append(f"{mutant.name}: cannot be judged: {verdict.problem}")
        elif verdict.survived and not mutant.survives.strip():
            found.append(
                f"{mutant.name}: no test fails. Write one, delete the code, or give `survives`"
            )
        elif verdict.killed_by and mutant.survives:
            found.append(f"{mutant.name}: delete `survives`: {verdict.killed_by} kills it")
    survivors = sum(verdict.survived for verdict in verdicts)
    if not partly and survivors > MOST_SURVIVORS * len(verdicts):
        found.append(f"{survivors} of {len(verdicts)} survive, more than {MOST_SURVIVORS:.0%}")
    return found


def main(argv: Sequence[str] | None = None, *, dsn: str = "") -> int:
    """Run the mutants, print a line of each and what has to be changed, and return the exit code.

    `dsn`: a server to use instead of one of its own; the databases are named `*_test`.
    """
    options = _parser().parse_args(argv)
    every = listed(options.list)
    chosen = [each for each in every if re.search(options.only, each.name)]
    if not chosen:
        print(f"no mutant's name matches {options.only!r}", file=sys.stderr)
        return 2
    verdicts: list[Verdict] = []
    with contextlib.ExitStack() as stack:
        server = dsn or stack.enter_context(database.throw_away_server())
        for verdict in run(chosen, server):
            print(verdict, flush=True)
            verdicts.append(verdict)
    found = wrong(verdicts, partly=len(chosen) < len(every))
    survivors = sum(verdict.survived for verdict in verdicts)
    print(f"{len(verdicts)} mutants, {survivors} survive")
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.sql", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="part of the names, a regex")
    parser.add_argument("--list", type=Path, default=LISTED, metavar="FILE", help="another list")
    return parser


if __name__ == "__main__":
    reaper.start()
    sys.exit(main())
