"""Shift the wall clock of one process by libfaketime."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def faketime() -> str:
    """Return the library that shifts a process's clock: of the test extra, else the system's."""
    spec = importlib.util.find_spec("libfaketime")
    wheel = Path(spec.origin).parent if spec is not None and spec.origin else Path("/nowhere")
    found = [
        *wheel.glob("vendor/libfaketime/src/libfaketime.so.1"),
        *Path("/usr/lib").glob("*/faketime/libfaketime.so.1"),
    ]
    assert found, "no libfaketime: install the extra `test` (x86-64), or the package faketime"
    return str(found[0])


class Wall:
    """A wall clock that is so many hours off, for the processes that get its environment."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.env = {
            "LD_PRELOAD": faketime(),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def put(self, hours: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{hours * 3600:+d}\n")
        new.rename(self._file)
