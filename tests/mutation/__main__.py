"""Run `python -m tests.mutation`; exit with 0 if every mutant is killed or in `survivors.toml`.

1 is the code for a survivor that is not listed, a listed one that is killed, too many of them, or
a mutant that cannot be judged.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tests.mutation import checkouts, mutants, runner, targets
from tests.support import reaper

LISTED = Path(__file__).with_name("survivors.toml")


def main(
    argv: Sequence[str] | None = None, tests: Mapping[str, Sequence[str]] = targets.TARGETS
) -> int:
    """Run the mutants, print the table and what has to be changed, and return the exit code."""
    options = _parser(tests).parse_args(argv)
    chosen = {module: tests[module] for module in options.module or tests}
    places = [place for module in chosen for place in mutants.places(module, runner.source(module))]
    if sampled := options.sample < len(places):
        places = random.Random(options.seed).sample(places, options.sample)
    with tempfile.TemporaryDirectory(prefix="qw-mutation-") as folder:
        outcomes = [*runner.run(Path(folder), places, chosen)]
    print(_table(outcomes))
    for change, fate in outcomes:
        if fate.timed_out:
            print(f"{change.module}: killed by a {fate.killed_by}\n{_diff(change)}")
    found = wrong(
        outcomes,
        {one for one in listed() if one.module in chosen},
        sampled=sampled,
        whole=not options.module,
    )
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


def listed() -> set[mutants.Change]:
    """Return the survivors of the list, each of which has to have a reason."""
    entries = checkouts.read_toml(LISTED, "survivor")
    for entry in entries:
        if not entry["reason"].strip():
            raise ValueError(f"survivors.toml: no reason for {entry['before']!r}")
    return {mutants.Change(entry["module"], entry["before"], entry["after"]) for entry in entries}


def wrong(
    outcomes: Sequence[runner.Outcome], known: set[mutants.Change], *, sampled: bool, whole: bool
) -> list[str]:
    survivors = [change for change, fate in outcomes if fate.survived]
    unknown = {change for change, fate in outcomes if fate.problem}
    found = [
        f"{change.module}: cannot be judged: {fate.problem}\n{_diff(change)}"
        for change, fate in outcomes
        if fate.problem
    ]
    found += [
        f"{change.module}: no test fails: write one, delete the code, or list it\n{_diff(change)}"
        for change in survivors
        if change not in known
    ]
    if sampled:
        return found
    found += [
        f"{change.module}: listed, but killed: delete it from the list\n{_diff(change)}"
        for change in sorted(known.difference(survivors, unknown))
    ]
    if whole and len(survivors) > checkouts.MOST_SURVIVORS * len(outcomes):
        found.append(f"more than {checkouts.MOST_SURVIVORS:.0%} of the mutants survive")
    return found


def _diff(change: mutants.Change) -> str:
    return f"  - {change.before}\n  + {change.after}"


def _table(outcomes: Collection[runner.Outcome]) -> str:
    made = collections.Counter(change.module for change, _ in outcomes)
    survived = collections.Counter(change.module for change, fate in outcomes if fate.survived)
    rows = [
        (module, count, count - survived[module], survived[module])
        for module, count in made.items()
    ]
    rows.append(("all", made.total(), made.total() - survived.total(), survived.total()))
    lines = [f"{'module':32} {'mutants':>7} {'killed':>7} {'survivors':>9}"]
    lines += [f"{module:32} {count:7} {killed:7} {left:9}" for module, count, killed, left in rows]
    return "\n".join(lines)


def _parser(modules: Collection[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "--module", action="append", choices=[*modules], metavar="M", help="such as dag/plan.py"
    )
    parser.add_argument("--sample", type=int, default=sys.maxsize, metavar="N", help="default: all")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the sample")
    return parser


if __name__ == "__main__":
    reaper.start()
    sys.exit(main())
