"""Start processes that poll, behind a pooler, with a stepped clock or another encoding."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.soak import background, fleet
from tests.support import faketime, pgbouncer

GAP_S = 6.0
SESSIONS = 3
"""Of the pooler: fewer than its clients have connections."""
MOST_H = 30
"""So that a step crosses a day, too."""


class Steps(background.BackgroundThread):
    """Steps the wall clock of the processes that get its environment, again and again."""

    def __init__(self, base: Path, seed: int) -> None:
        super().__init__("steps")
        self._wall = faketime.Wall(base / "wall")
        self._rng = random.Random(seed * 3571 + 9)
        self.env: Mapping[str, str] = self._wall.env
        self._wall.put(0)

    def go(self, stop: threading.Event) -> None:
        while not stop.wait(GAP_S):
            self._wall.put(self._rng.randint(-MOST_H, MOST_H))


def archive(revision: str, base: Path) -> Path:
    """Export the package as of this revision of the checkout into a folder of its own.

    Raises `CalledProcessError` where there is no checkout, or no such revision.
    """
    folder = base / "older"
    folder.mkdir()
    command = ["git", "-C", str(fleet.ROOT), "archive", "--format=tar", revision, "queue_workflows"]
    tar = subprocess.run(command, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=tar, check=True)
    return folder


def environments(
    steps: Steps | None, older: Path | None, say: Callable[[str], None]
) -> dict[str, dict[str, str]]:
    """Return the environment variables of each odd seat."""
    polls = {"QUEUE_WORKFLOWS_POLL_ONLY": "1"}
    found = {
        fleet.POLLS: polls,
        fleet.POOLED: polls,
        fleet.LATIN1: {
            "PGCLIENTENCODING": "LATIN1",
            "PGDATESTYLE": "German",
            "PGTZ": "Asia/Kathmandu",
        },
    }
    if steps is not None:
        found[fleet.STEPS] = {**steps.env}
    else:
        say("no libfaketime here: no clock is stepped")
    if older is not None:
        path = (str(older), str(fleet.ROOT), os.environ.get("PYTHONPATH"))
        found[fleet.OLDER] = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        for name, value in fleet.OLDER_KNOBS.items():
            found[fleet.OLDER][f"QUEUE_WORKFLOWS_{name}"] = str(value)
    return found


@contextmanager
def pooled(dsn: str, say: Callable[[str], None]) -> Generator[str]:
    """Yield the DSN of the same database through PgBouncer; the DSN itself if that is missing."""
    if pgbouncer.PROGRAM is None:
        say("no pgbouncer here: every process has connections of its own")
        yield dsn
        return
    with pgbouncer.pooler(dsn, servers=SESSIONS) as made:
        yield made.dsn


def steps(base: Path, seed: int) -> Steps | None:
    """Return the stepped clock; None if libfaketime is not installed."""
    try:
        return Steps(base, seed)
    except AssertionError:
        return None
