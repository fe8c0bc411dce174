"""Run `python -m tests.mutation.sql`: change the SQL in one place, see which test notices.

The mutants are made by hand and listed in `sql_mutants.toml`, each with the tests that have to
fail. Exits with 1 if a mutant survives that the list gives no reason for, if one is killed that the
list says survives, if one cannot be judged, or if more than 5 % survive.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation import checkouts
from tests.support import database, reaper

SQL = Path("queue_workflows/sql")
LISTED = Path(__file__).with_name("sql_mutants.toml")
TEST_S = 30
"""A test that takes longer does not end, since the mutant waits for a lock that nobody releases."""
RUN_S = 150.0
BASELINE_S = 900.0
"""How long the tests of the whole list may take without a mutant."""
_PYTEST = ("-p", "no:randomly", "-m", "", f"--timeout={TEST_S}")
_NEXT_PART = re.compile(r"^(?:CREATE |-- name: |-- fragment: )", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", re.MULTILINE)
_NO_SQL = re.compile(
    r"syntax error at|(?:column|relation|variable) \S+ does not exist|(?:function|operator)[^\n]*"
    r"does not exist|missing FROM-clause|could not determine|MigrationFailed|UsageError"
)


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
    """A mutant, and the first test that failed."""

    mutant: Mutant
    fate: checkouts.Fate

    def __str__(self) -> str:
        mutant, fate = self
        outcome = "killed  " if fate.killed_by else "SURVIVED" if fate.survived else "BROKEN  "
        told = fate.killed_by or fate.problem or mutant.survives or mutant.breaks
        return f"{outcome} {fate.seconds:5.1f} s  {mutant.name:34} {told}"


def listed(path: Path = LISTED) -> list[Mutant]:
    """Return the mutants of a list; raise ValueError for a name that occurs twice."""
    entries: list[Any] = checkouts.read_toml(path, "mutant")
    mutants = [Mutant(**entry) for entry in entries]
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path.name}: two mutants are named {', '.join(sorted(twice))}")
    return mutants


def run(mutants: Sequence[Mutant], dsn: str) -> Iterator[Verdict]:
    """Yield the verdict of each mutant as it is known; `dsn`: the server, of any database of it.

    Raises RuntimeError if a test of the list fails without a mutant.
    """

    def failed(copy: Path, tests: Sequence[str], most_s: float = RUN_S) -> str:
        if not tests:
            raise RuntimeError("the list names no tests")
        # A database of its own for each copy, which a killed run leaves for the next one to drop.
        own = database.forced(dsn, f"sql{copy.name}")
        env = {"QUEUE_WORKFLOWS_TEST_DB_URL": own}
        output = checkouts.failure(copy, _PYTEST, tests, most_s=most_s, **env)
        if wrong := _NO_SQL.search(output):
            raise RuntimeError(f"not valid: {wrong.group()}")
        found = _FAILED.search(output)
        return found.group(1).removeprefix("tests/") if found else output[-300:]

    def failed_with(copy: Path, mutant: Mutant) -> str:
        path = copy / SQL / mutant.file
        text = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(text), encoding="utf-8")
        try:
            return failed(copy, mutant.tests)
        finally:
            path.write_text(text, encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="qw-sql-mutants-") as folder:
        copies = checkouts.Copies(Path(folder))
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        for _, fate in copies.fates([tests], lambda copy, each: failed(copy, each, BASELINE_S)):
            if not fate.survived:
                raise RuntimeError(f"without a mutant: {fate.killed_by or fate.problem}")
        yield from (Verdict(*judged) for judged in copies.fates(mutants, failed_with))


def wrong(verdicts: Sequence[Verdict], *, partly: bool = False) -> list[str]:
    """Return what has to be changed, one line each; `partly`: of a part of the list."""
    found: list[str] = []
    for mutant, fate in verdicts:
        if fate.problem:
            found.append(f"{mutant.name}: cannot be judged: {fate.problem}")
        elif fate.survived and not mutant.survives.strip():
            found.append(
                f"{mutant.name}: no test fails. Write one, delete the code, or give `survives`"
            )
        elif fate.killed_by and mutant.survives:
            found.append(f"{mutant.name}: delete `survives`: {fate.killed_by} kills it")
    survivors = sum(fate.survived for _, fate in verdicts)
    if not partly and survivors > checkouts.MOST_SURVIVORS * len(verdicts):
        found.append(
            f"{survivors} of {len(verdicts)} survive, more than {checkouts.MOST_SURVIVORS:.0%}"
        )
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
    survivors = sum(fate.survived for _, fate in verdicts)
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
