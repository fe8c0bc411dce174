"""Run a console script and record which functions of the package run in its processes.

`python -m tests.support.call_recorder queue-claim-worker --queue ...` runs the script with a hook
of `sys.setprofile` in all of its threads; the processes that it forks inherit the hook. The mark is
one byte of a mapped file that all of them share, 0 while nothing is recorded. A function is written
down when it is first called under a mark. A signal would serve neither end: an executor that OFF
kills could not answer it, and it wakes loops that would sleep.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import runpy
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

FOLDER = "QW_TEST_CALLS"
"""The variable that names the folder of the mark and the calls."""
MARK, CALLS = "mark", "calls"
_SPEC = importlib.util.find_spec("queue_workflows")  # does not import it
assert _SPEC is not None and _SPEC.origin is not None
_PACKAGE = f"{Path(_SPEC.origin).parent}{os.sep}"
_PARTS = frozenset({"<module>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"})
"""Code that counts as a part of what is around it. Python 3.12 calls no comprehension."""


class Call(NamedTuple):
    """The first call of a function in a process under a mark."""

    mark: int
    at_ns: int
    pid: int
    file: str
    line: int
    name: str


class Recorder:
    """The profile hook of a process and of those that it forks."""

    def __init__(self, folder: Path) -> None:
        with (folder / MARK).open("r+b") as marked:
            self._mark = mmap.mmap(marked.fileno(), 1)
        self._calls = os.open(folder / CALLS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._seen: dict[int, tuple[int, CodeType]] = {}
        """The last mark of each code by its id. It keeps the code, so that no other has its id."""

    def install(self) -> None:
        """Watch this thread and every thread that starts from now on."""
        threading.setprofile(self.watch)
        sys.setprofile(self.watch)

    def watch(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Write down the function of a call that is the first one under the present mark."""
        if event != "call" or not (mark := self._mark[0]):
            return
        code = frame.f_code
        known = self._seen.get(id(code))
        if known is not None and known[0] == mark:
            return
        self._seen[id(code)] = mark, code
        if is_counted(code):
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified names
            file = code.co_filename.removeprefix(_PACKAGE)
            call = Call(mark, time.monotonic_ns(), os.getpid(), file, code.co_firstlineno, name)
            os.write(self._calls, ("\t".join(map(str, call)) + "\n").encode())


def is_counted(code: CodeType) -> bool:
    """Return whether it is a function of the package, a lambda too, or the body of a class.

    Modules, comprehensions and generator expressions do not count. Class bodies run at imports.
    """
    return code.co_filename.startswith(_PACKAGE) and code.co_name not in _PARTS


def calls(folder: Path, mark: int) -> list[Call]:
    """Return what was recorded under a mark, in the order of the calls."""
    found: list[Call] = []
    for text in (folder / CALLS).read_text().splitlines():
        number, at_ns, pid, file, line, name = text.split("\t")
        if int(number) == mark:
            found.append(Call(mark, int(at_ns), int(pid), file, int(line), name))
    return sorted(found, key=lambda call: call.at_ns)


if __name__ == "__main__":
    Recorder(Path(os.environ[FOLDER])).install()
    path = str(Path(sysconfig.get_path("scripts"), sys.argv[1]))
    sys.argv[:] = [path, *sys.argv[2:]]
    runpy.run_path(path, run_name="__main__")
