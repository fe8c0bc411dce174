"""Install other queue libraries, each in its own environment, and call their drivers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import processes
from benchmarks.server import Server

INSTALL_S = 240.0
CALL_S = 90.0


class Kit(NamedTuple):
    """A queue as installed: its name, version, interpreter and driver."""

    name: str
    version: str
    python: Path
    driver: Path
    roles: frozenset[str]
    """What its driver can be asked for."""


_QUEUE = frozenset({"enqueue", "bulk", "drain", "pickup"})
_KNOWN = (
    ("procrastinate", ("procrastinate", "psycopg[binary,pool]"), _QUEUE | {"slots"}),
    ("pgqueuer", ("pgqueuer[asyncpg]",), _QUEUE | {"batch"}),
    ("dbos", ("dbos", "psycopg[binary]"), frozenset({"slots", "map"})),
    ("prefect", ("prefect",), frozenset({"map"})),
)


def prepare(scratch: Path) -> list[Kit]:
    """Install each into an environment under that folder, from the package index."""
    found: list[Kit] = []
    for name, requirements, roles in _KNOWN:
        sys.stderr.write(f"installing {name}\n")
        folder = scratch / f"venv-{name}"
        python = folder / "bin" / "python"
        _quietly([sys.executable, "-m", "venv", str(folder)])
        _quietly([str(python), "-m", "pip", "install", "--quiet", *requirements])
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        version = _quietly([str(python), "-c", code]).strip()
        driver = Path(__file__).with_name(f"drive_{name}.py")
        found.append(Kit(name, version, python, driver, roles))
    return found


def _quietly(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks: {' '.join(argv[1:5])} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


class Peer:
    """A kit on the server of this run; every call gets a database of its own."""

    def __init__(self, kit: Kit, server: Server, folder: Path) -> None:
        self._kit = kit
        self._server = server
        self._folder = folder
        self.title = f"{kit.name} {kit.version}"

    def call(self, role: str, count: int) -> float:
        """Return the rate of a role other than `pickup` per second."""
        return float(self._ask(role, count)["rate"])

    def pickup_ms(self, count: int) -> list[float]:
        """Return the times from the return of each enqueue call to the start of the handler."""
        return [float(value) for value in self._ask("pickup", count)["samples_ms"]]

    def can(self, role: str) -> bool:
        """Return whether its driver has that role."""
        return role in self._kit.roles

    def _ask(self, role: str, count: int) -> dict[str, Any]:
        answer = self._folder / f"{self._kit.name}-{role}.json"
        argv = [str(self._kit.python), str(self._kit.driver), role, str(count), str(answer)]
        with (
            self._server.database(self._kit.name, empty=True) as dsn,
            processes.running(dsn, self._folder, (self._kit.name, argv)) as (process,),
        ):
            process.wait(CALL_S)
        return json.loads(answer.read_text())
