"""Sample a machine's hardware in one process per host, for a worker to store; read samples."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from queue_workflows import cgroup_attribution, db, errors, types
from queue_workflows.db import statements
from queue_workflows.runtime import service, stored_json
from queue_workflows.telemetry import gpu_overview
from queue_workflows.types import JsonDict, NowFn


class SamplerLock:
    """The lock file of a host label and database in a folder; it is free when its holder ends."""

    def __init__(self, host: str, folder: Path) -> None:
        self._host = host
        self._folder = folder
        self._fd: int | None = None

    @property
    def is_held(self) -> bool:
        """Return whether this process holds the lock."""
        return self._fd is not None

    def take(self) -> bool:
        """Take the lock if it is free; return whether this process holds it."""
        path = self._folder / lock_name(self._host)
        if self._fd is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._fd), path.stat()):
                    return True
            os.close(self._fd)
        self._fd = _try_lock(path)
        return self._fd is not None

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def lock_name(host: str) -> str:
    """Return the name of the lock file for this host label and this database."""
    digest = hashlib.sha256(f"{host}\n{db.describe()}".encode(errors="replace")).hexdigest()
    return f"queue_workflows-hw-{digest[:16]}.lock"


def _try_lock(path: Path) -> int | None:
    """Take the lock and return its descriptor; None if another process has it or it fails."""
    # O_NONBLOCK, since any user can create a FIFO of this name, and opening it would block.
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = None
    try:
        try:
            fd = os.open(path, os.O_RDONLY | flags)  # a file of another account suffices
        except FileNotFoundError:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        _log.debug("no samples: %s", error)
        if fd is not None:
            os.close(fd)
        return None
    return fd


_log = logging.getLogger(__name__)
CHANNEL = "hw_metrics"
FINE_S, COARSE_S = 2, 60
"""Seconds between samples, which are kept every 2 s for an hour, and every 60 s for a day."""
SAMPLE_EVERY_S, FOLD_EVERY_S = float(FINE_S), float(COARSE_S)
NOTIFY_EVERY_S = 5.0
TOOL_EVERY_S = 5.0
"""Seconds between readings of the GPUs by a tool; in between the last reading is used."""
PAYLOAD_LIMIT = 5500
"""The most bytes of a sample. A notification has less than 8,000 bytes, also with the time and the
host label, whose up to 400 bytes may take six bytes each in JSON."""
MB = 1024 * 1024
WAITING = 8
"""Samples to keep while the database is unreachable; older ones are dropped."""


class Probe:
    """Take samples on one thread. CPU and RAM need psutil (extra: metrics), or are None."""

    def __init__(
        self,
        *,
        reader: gpu_overview.Reader | None = None,
        ours: cgroup_attribution.Attribution | None = None,
        now_fn: NowFn = time.monotonic,
    ) -> None:
        self._reader = reader or gpu_overview.Reader()
        self._ours = ours or cgroup_attribution.Attribution()
        self._now = now_fn
        self._psutil = _psutil()
        self._cards: list[gpu_overview.Gpu] = []
        self._read_at: float | None = None
        if self._psutil is not None:
            # A value covers the time since the previous call.
            self._psutil.cpu_percent(None)

    @property
    def source(self) -> str:
        """Return how the GPUs are read: `nvml`, `nvidia-smi`, `rocm-smi` or `none`."""
        return self._reader.source

    def sample(self) -> JsonDict:
        """Return the machine's present use, as a notification has it, without host and time."""
        found: JsonDict = {
            "cpu_percent": None, "cpu_ours_percent": None, "ram_percent": None,
            "ram_used_mb": None, "ram_total_mb": None, "ram_ours_used_mb": None,
            "ram_ours_percent": None, "swap_used_mb": None,
        }  # fmt: skip
        total_mb = None
        if self._psutil is not None:
            memory = self._psutil.virtual_memory()
            total_mb = memory.total // MB
            found |= {
                "cpu_percent": self._psutil.cpu_percent(None),
                "ram_percent": memory.percent,
                "ram_used_mb": (memory.total - memory.available) // MB,
                "ram_total_mb": total_mb,
                "swap_used_mb": self._psutil.swap_memory().used // MB,
            }
        if (ours := self._ours.read()) is not None:
            share = round(100 * ours.ram_mb / total_mb, 1) if total_mb else None
            found |= {
                "cpu_ours_percent": ours.cpu_percent,
                "ram_ours_used_mb": ours.ram_mb,
                "ram_ours_percent": share,
            }
        return fit(found | {"gpus": [card._asdict() for card in self._read()]})

    def _read(self) -> list[gpu_overview.Gpu]:
        now = self._now()
        by_tool = self.source != "nvml"
        if self._read_at is None or not by_tool or now - self._read_at >= TOOL_EVERY_S:
            self._read_at, self._cards = now, self._reader.read()
        return self._cards

    def reread(self) -> None:
        """Let the next sample read the GPUs, even if they were read a moment ago."""
        self._read_at = None

    def close(self) -> None:
        """Close the driver."""
        self._reader.close()


def _psutil() -> Any:
    try:
        return importlib.import_module("psutil")
    except ImportError:
        return None


def fit(sample: JsonDict) -> JsonDict:
    """Return the sample with as many GPUs as PAYLOAD_LIMIT allows; `gpus_cut` counts the rest."""
    left = len(json.dumps(sample)) - PAYLOAD_LIMIT
    gpus = list(sample["gpus"])
    while left > 0 and gpus:
        left -= len(json.dumps(gpus.pop())) + 2
    cut = len(sample["gpus"]) - len(gpus)
    return sample | ({"gpus": gpus, "gpus_cut": cut} if cut else {})


def fold(many: Iterable[JsonDict]) -> JsonDict:
    """Merge samples into one, with the mean of percentages and the maximum of used amounts."""
    taken = list(many)
    by_card: dict[str, list[JsonDict]] = {}
    for sample in taken:
        for card in map(stored_json.mapping, stored_json.sequence(sample.get("gpus"))):
            by_card.setdefault(str(card.get("id")), []).append(card)
    return _folded([{**sample, "gpus": None} for sample in taken]) | {
        "gpus": [_folded(rows) for rows in by_card.values()]
    }


def _folded(rows: list[JsonDict]) -> JsonDict:
    found: JsonDict = {}
    for key in rows[0] if rows else ():
        values = [row[key] for row in rows if row.get(key) is not None]
        if not all(stored_json.number(value) is not None for value in values):
            # The value is a time, or comes from another version of this code.
            found[key] = values[-1]
        elif not values:
            found[key] = None
        elif key.endswith(("_percent", "_pct")):
            found[key] = round(sum(values) / len(values), 1)
        else:
            found[key] = max(values)
    return found


class PendingSample(NamedTuple):
    """A sample as JSON text that waits to be stored (by `every_s`) or to be notified."""

    every_s: int | None
    text: str
    tell: bool


class Sampler:
    """Take samples on a thread of its own inside the `with` block, if no other process does.

    `ready` is called when there are samples to `take`; the owner stores them on its own connection.
    One process per host label and database takes samples, while it holds a lock file. When it ends,
    another process takes the lock.
    """

    def __init__(
        self,
        host: str,
        *,
        ready: Callable[[], object] = lambda: None,
        probe: Callable[[], Probe] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._ready = ready
        self._make_probe = probe or Probe
        self._lock = SamplerLock(host, folder or Path(tempfile.gettempdir()))
        self._probe: Probe | None = None
        self._minute: list[JsonDict] = []
        self._latest: JsonDict | None = None
        self._waiting: deque[PendingSample] = deque(maxlen=WAITING)
        self._loop: service.Loop | None = None

    def __enter__(self) -> Sampler:
        tasks = [
            service.Task("sample", self._sample_pause_s, self._sample),
            service.Task("tell", NOTIFY_EVERY_S, self._notify),
            service.Task("fold", FOLD_EVERY_S, self._fold),
        ]
        self._loop = service.Loop("hw-metrics", tasks)
        self._loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.stop()
            self._loop = None
        self._forget()
        self._lock.release()

    @property
    def holds(self) -> bool:
        """Return whether this process takes the samples of the machine."""
        return self._lock.is_held

    def take(self) -> list[PendingSample]:
        """Return the samples to store, the oldest first; [] most of the time."""
        found: list[PendingSample] = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._waiting.popleft())
        return found

    def _sample_pause_s(self) -> float:
        """Return the seconds to the next sample, without a GPU the interval of sending."""
        blind = self._latest is not None and not self._latest["gpus"]
        return NOTIFY_EVERY_S if blind else SAMPLE_EVERY_S

    def _sample(self) -> None:
        if not self._lock.take():
            self._forget()
            return
        if self._probe is None:
            self._probe = self._make_probe()
            return
        self._latest = sample = self._probe.sample()
        self._minute.append(sample)
        if sample["gpus"]:
            # Without a GPU, samples by the minute are enough, so an idle worker writes less.
            self._put(FINE_S, sample, tell=False)

    def _forget(self) -> None:
        """Forget the samples, since this process does not hold the lock any more."""
        if self._probe is not None:
            self._probe.close()
        self._probe = self._latest = None
        self._minute = []

    def _notify(self) -> None:
        if self._latest is not None:
            self._put(None, self._latest, tell=True)

    def _fold(self) -> None:
        taken, self._minute = self._minute, []
        if taken:
            self._put(COARSE_S, fold(taken), tell=False)

    def _put(self, every_s: int | None, sample: JsonDict, *, tell: bool) -> None:
        self._waiting.append(PendingSample(every_s, json.dumps(sample), tell))
        self._ready()


def look_back(
    host: str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    past_s: float = 600.0,
    conn: db.Connection | None = None,
) -> list[JsonDict]:
    """Return a host's samples, the oldest first: `sampled_at`, `every_s`, and a sample's keys.

    The range is from `since`, by default `past_s` ago, to `until`, by default now. `every_s` is 2
    for the last hour of samples, and 60 for older ones, which summarize a minute. Raises
    `InvalidConfig` for a host label that is not a valid name.
    """
    if not types.is_name(host):
        raise errors.InvalidConfig(f"host {host!r:.40}: a name has 1 to 400 bytes of UTF-8")
    with db.transaction(conn) as own:
        rows = statements.samples.between(own, host=host, since=since, until=until, past_s=past_s)
    found: list[JsonDict] = []
    fine = None
    for row in rows:
        if row["every_s"] == FINE_S:
            fine = row["sampled_at"]
        elif fine is not None and row["sampled_at"] - fine < timedelta(seconds=COARSE_S):
            continue
        times = {"sampled_at": row["sampled_at"], "every_s": row["every_s"]}
        found.append(stored_json.mapping(row["sample"]) | times)
    return found
