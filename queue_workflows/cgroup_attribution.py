"""Measure the CPU and RAM of the app's containers, by cgroup v2 and the docker socket."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

from queue_workflows import config
from queue_workflows.telemetry import pressure
from queue_workflows.types import NowFn

CGROUPS = Path("/host/sys/fs/cgroup")
"""The machine's own cgroup tree, mounted read-only into this container."""
DOCKER = Path("/var/run/docker.sock")
LIST_EVERY_S = 10.0
"""Seconds for which a list of containers is used."""
TIMEOUT_S = 1.0
ANSWER_LIMIT = 4 << 20
MB = 1024 * 1024
_ID = re.compile(r"[0-9a-f]{12,64}")
_PLACES = ("system.slice/docker-{}.scope", "docker/{}")
"""The paths of a container's cgroup in docker, with systemd and without."""


class Usage(NamedTuple):
    """The use of all the app's containers; `cpu_percent` of all cores is None at first."""

    cpu_percent: float | None
    ram_mb: int


class Attribution:
    """Reads the use of containers whose name starts with `container_prefix`; for one thread."""

    def __init__(
        self, *, cgroups: Path = CGROUPS, docker: Path = DOCKER, now_fn: NowFn = time.monotonic
    ) -> None:
        self._cgroups = cgroups
        self._docker = docker
        self._now = now_fn
        self._folders: list[Path] | None = None
        self._listed = -LIST_EVERY_S
        self._before: dict[Path, int] = {}
        self._at: float | None = None

    def read(self) -> Usage | None:
        """Return the containers' use; None without cgroup v2, the socket or any container.

        It never raises.
        """
        now = self._now()
        if now - self._listed >= LIST_EVERY_S:
            self._listed = now
            self._folders = self._list()
        if self._folders is None:
            return None
        spent, ram = self._spent(), sum(map(_ram, self._folders))
        cpu = None
        if self._at is not None and now > self._at:
            # A new container counts from its next sample on, an ended one not any more.
            used_us = sum(max(0, spent[f] - self._before[f]) for f in spent if f in self._before)
            cpu = min(100.0, used_us / 1e4 / (now - self._at) / (os.cpu_count() or 1))
        self._before, self._at = spent, now
        return Usage(None if cpu is None else round(cpu, 1), ram // MB)

    def _list(self) -> list[Path] | None:
        if not self._cgroups.is_dir():
            return None
        try:
            listed = _containers(self._docker)
        except (OSError, ValueError):
            return None
        prefix = config.get_config().container_prefix
        ours = [
            each["Id"]
            for each in listed
            if _ID.fullmatch(each["Id"])
            and any(name.lstrip("/").startswith(prefix) for name in each["Names"] or ())
        ]
        places = [self._cgroups / place.format(each) for each in ours for place in _PLACES]
        found = [place for place in places if place.is_dir()]
        # The use of cgroups of v1, or below another parent, is unknown.
        return found if found or not ours else None

    def _spent(self) -> dict[Path, int]:
        found: dict[Path, int] = {}
        for folder in self._folders or ():
            (value,) = pressure.numbers(folder / "cpu.stat", b"usage_usec")
            if value is not None:
                found[folder] = value
        return found


def _ram(folder: Path) -> int:
    """Return the bytes in use as docker counts them, without file pages that can be dropped."""
    used = pressure.number(folder / "memory.current") or 0
    (droppable,) = pressure.numbers(folder / "memory.stat", b"inactive_file")
    return max(0, used - (droppable or 0))


def _containers(docker: Path) -> list[dict[str, Any]]:
    """Return Id and Names of the running containers; raise OSError or ValueError from docker."""
    deadline = time.monotonic() + TIMEOUT_S
    received = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(TIMEOUT_S)
        peer.connect(str(docker))
        # With HTTP/1.0 the response is not chunked, and ends with the connection.
        peer.sendall(b"GET /containers/json HTTP/1.0\r\nHost: docker\r\n\r\n")
        while chunk := peer.recv(65536):
            received += chunk
            if len(received) > ANSWER_LIMIT or time.monotonic() > deadline:
                raise ValueError("docker's answer is too long, or takes too long")
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    listed: Any = json.loads(body)
    if head.split(b" ", 2)[1:2] != [b"200"] or not isinstance(listed, list):
        raise ValueError("docker refuses")
    found: list[dict[str, Any]] = [
        cast("dict[str, Any]", each) for each in cast("list[Any]", listed) if isinstance(each, dict)
    ]
    return [each for each in found if isinstance(each.get("Id"), str) and "Names" in each]
