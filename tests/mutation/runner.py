"""Run the tests of a mutated module, one mutant at a time in each copy of the checkout."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutation import checkouts, mutants

TEST_S = 10
"""A test that takes longer does not end, since the mutant made a loop endless."""
RUN_S = 120.0
_PYTEST = (
    *("--hypothesis-profile=ci", f"--timeout={TEST_S}"),
    # Half of the time would go into loading other plugins.
    *("-p", "xdist", "-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin"),
)
# The profile gives the same examples, and the seed the same order of sets, in each run: else the
# survivors would change from run to run.
_ENV = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONHASHSEED": "0"}


class Outcome(NamedTuple):
    """The fate of one mutant."""

    change: mutants.Change
    fate: checkouts.Fate


def run(
    folder: Path, places: Sequence[mutants.Place], tests: Mapping[str, Sequence[str]]
) -> Iterator[Outcome]:
    """Yield the outcomes of the mutants at these places, as they are known.

    `tests`: the test files of each module; those that do not exist are left out. Raises
    `RuntimeError` if tests fail without a mutant.
    """
    copies = checkouts.Copies(folder)
    sources = {place.module: source(place.module) for place in places}

    def failed(copy: Path, mutant: tuple[mutants.Change, str]) -> str:
        change, text = mutant
        path = copy / "queue_workflows" / change.module
        found = [test for test in tests[change.module] if (copy / "tests" / test).exists()]
        path.write_text(text, encoding="utf-8")
        # Python compares the compiled file's size and second of change, which may be equal.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        try:
            if not found:
                return ""
            return checkouts.failure(copy, _PYTEST, found, most_s=RUN_S, **_ENV)
        finally:
            path.write_text(sources[change.module], encoding="utf-8")

    same = [(mutants.Change(module, "", ""), text) for module, text in sources.items()]
    for (change, _), fate in copies.fates(same, failed):
        if not fate.survived:
            text = fate.problem or fate.killed_by
            raise RuntimeError(f"{change.module}: its tests fail without a mutant: {text}")
    made = (mutants.mutated(place, sources[place.module]) for place in places)
    for (change, _), fate in copies.fates((one for one in made if one is not None), failed):
        yield Outcome(change, fate)


def source(module: str) -> str:
    """Return the text of a module of `queue_workflows`."""
    return (checkouts.ROOT / "queue_workflows" / module).read_text(encoding="utf-8")
