"""Judge mutants in copies of the checkout, so that nothing is ever mutated in place."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.support import reaper

ROOT = Path(__file__).parents[2]
WORKERS = min(2, os.cpu_count() or 1)
MOST_SURVIVORS = 0.05
MEMORY_KB = 4_000_000
"""An endless loop may also fill a list."""
TIMED_OUT = "Timeout (>"
"""What pytest-timeout prints of a test."""
_PYTEST = ("-x", "-q", "--no-header", "--color=no", "-n", "0", "-p", "no:cacheprovider")
_FAILURES = (1, 2)
"""The exit codes of pytest for a test that fails, and for a test file that cannot be imported."""
_OUTER = ("PYTEST_", "QW_TEST_", "COV_")
"""Variables of a pytest that runs this one, which reads them as its own."""
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "site"
)
T = TypeVar("T")


class Fate(NamedTuple):
    """What the tests of a mutant say about it."""

    killed_by: str
    """What failed; empty if the mutant survived or could not be judged."""
    problem: str = ""
    """Why the tests say nothing about the mutant."""
    timed_out: bool = False
    """Whether the mutant is killed only because the tests took too long, twice."""
    seconds: float = 0.0

    @property
    def survived(self) -> bool:
        """Return whether every test passed."""
        return not self.killed_by and not self.problem


class Copies:
    """Copies of the checkout below a folder, in which `WORKERS` mutants are judged at once."""

    def __init__(self, folder: Path) -> None:
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(WORKERS):
            shutil.copytree(ROOT, folder / str(number), ignore=_LEFT_OUT, symlinks=True)
            self._free.put(folder / str(number))

    def fates(
        self, items: Iterable[T], judge: Callable[[Path, T], str]
    ) -> Iterator[tuple[T, Fate]]:
        """Yield each item with its fate, as it is known.

        `judge` gets a copy and an item and returns what failed, or an empty text. It may raise what
        `failure` raises. After a TimeoutError the item is judged again when all others are done,
        since the machine may have been busy.
        """
        late: list[T] = []
        with futures.ThreadPoolExecutor(WORKERS) as pool:
            started = {pool.submit(self._fate, item, judge): item for item in items}
            try:
                for done in futures.as_completed(started):
                    if done.result().timed_out:
                        late.append(started[done])
                    else:
                        yield started[done], done.result()
            finally:
                pool.shutdown(cancel_futures=True)
        yield from ((item, self._fate(item, judge)) for item in late)

    def _fate(self, item: T, judge: Callable[[Path, T], str]) -> Fate:
        begun, copy = time.monotonic(), self._free.get()
        try:
            fate = Fate(judge(copy, item))
        except TimeoutError as error:
            fate = Fate(str(error), timed_out=True)
        except RuntimeError as error:
            fate = Fate("", str(error))
        finally:
            self._free.put(copy)
        return fate._replace(seconds=time.monotonic() - begun)


def failure(
    copy: Path, options: Sequence[str], tests: Sequence[str], *, most_s: float, **env: str
) -> str:
    """Run these files of `tests/` in a copy; return pytest's output if one fails, else "".

    Raises TimeoutError if a test takes too long, or all together longer than `most_s` seconds, and
    RuntimeError with the output if pytest ends with a code that is neither success nor failure.
    """
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(_OUTER)}
    if reaper.MARK in os.environ:
        inherited[reaper.MARK] = os.environ[reaper.MARK]
    limited = f'ulimit -v {MEMORY_KB} 2>/dev/null; exec nice -n 10 "$@"'
    paths = [f"tests/{test}" for test in tests]
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            ["sh", "-c", limited, "sh", sys.executable, "-m", "pytest", *_PYTEST, *options, *paths],
            cwd=copy,
            env={**inherited, "PYTHONPATH": str(copy), **env},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(most_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"time-out of {most_s:.0f} s, twice") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    if code in _FAILURES:
        if TIMED_OUT in output:
            raise TimeoutError("time-out of a test, twice")
        return output
    if code:
        raise RuntimeError(f"pytest exits with {code}: {' '.join(output.split())[-600:]}")
    return ""


def read_toml(path: Path, table: str) -> list[dict[str, str]]:
    """Return the entries of an array of tables."""
    # Python 3.10 has no reader of TOML; pytest brings one there.
    reader: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return reader.loads(path.read_text(encoding="utf-8"))[table]
