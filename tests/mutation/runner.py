"""Run the tests of a mutated module in copies of the checkout, one mutant a copy at a time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

from tests.mutation import checkouts, mutants

ROOT = Path(__file__).parents[2]
WORKERS = min(2, os.cpu_count() or 1)
TEST_S = 10
"""A test that takes longer does not end, since the mutant made a loop endless."""
RUN_S = 120.0
MEMORY_KB = 4_000_000
"""An endless loop may also fill a list."""
_PYTEST = (
    *("-x", "-q", "--no-header", "-n", "0", "-p", "no:cacheprovider"),
    # The same examples in each run, else the survivors would change from run to run.
    *("--hypothesis-profile=ci", f"--timeout={TEST_S}"),
    # Half of the time would go into loading other plugins.
    *("-p", "xdist", "-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin"),
)


_OUTER = ("PYTEST_", "QW_TEST_")
"""Variables of a pytest that runs this one, which reads them as its own."""


class Outcome(NamedTuple):
    """The fate of one mutant."""

    change: mutants.Change
    survived: bool


class Checkout:
    """Copies of the checkout below a folder."""

    def __init__(self, folder: Path) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(WORKERS):
            checkouts.copy(folder / str(number))
            self._free.put(folder / str(number))

    def survives(self, module: str, text: str, tests: Sequence[str]) -> bool:
        """Return whether these tests pass with this text of a module; True without tests."""
        with self._one() as copy:
            path = copy / "queue_workflows" / module
            source = path.read_text(encoding="utf-8")
            found = [f"tests/{test}" for test in tests if (copy / "tests" / test).exists()]
            path.write_text(text, encoding="utf-8")
            # Python compares the compiled file's size and second of change, which may be equal.
            Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
            try:
                return not found or _passes(copy, found)
            finally:
                path.write_text(source, encoding="utf-8")

    @contextlib.contextmanager
    def _one(self) -> Iterator[Path]:
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)


def _passes(copy: Path, tests: Sequence[str]) -> bool:
    limited = f'ulimit -v {MEMORY_KB} 2>/dev/null; exec nice -n 10 "$@"'
    process = subprocess.Popen(
        ["sh", "-c", limited, "sh", sys.executable, "-m", "pytest", *_PYTEST, *tests],
        cwd=copy,
        env={name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(RUN_S) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(
    folder: Path, places: Sequence[mutants.Place], tests: Mapping[str, Sequence[str]]
) -> list[Outcome]:
    """Return the outcomes of the mutants at these places.

    `tests`: the test files of each module. Raises `RuntimeError` if tests fail without a mutant.
    """
    checkout = Checkout(folder)
    sources = {place.module: source(place.module) for place in places}
    for module, text in sources.items():
        if not checkout.survives(module, text, tests[module]):
            raise RuntimeError(f"{module}: its tests fail without a mutant")

    def tried(place: mutants.Place) -> Outcome | None:
        mutant = mutants.mutated(place, sources[place.module])
        if mutant is None:
            return None
        return Outcome(mutant[0], checkout.survives(place.module, mutant[1], tests[place.module]))

    with futures.ThreadPoolExecutor(WORKERS) as pool:
        return [outcome for outcome in pool.map(tried, places) if outcome is not None]


def source(module: str) -> str:
    """Return the text of a module of `queue_workflows`."""
    return (ROOT / "queue_workflows" / module).read_text(encoding="utf-8")
