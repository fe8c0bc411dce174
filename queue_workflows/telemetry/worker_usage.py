"""Measure one worker's use of GPU and RAM, by tools that may be missing, hang or print garbage."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from queue_workflows.runtime import external_tool
from queue_workflows.telemetry import pressure

TIMEOUT_S = 3.0
"""Seconds for all tools of one sample."""
MB = 1024 * 1024
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

_NUMBER = re.compile(r"\d{1,3}(?:\.\d{1,6})?", re.ASCII)
_ROCM_USE = re.compile(r"GPU use \(%\)\"?[ \t]*:[ \t]*\"?([^\s\",}]*)")
_MOST_ANCESTORS = 64


class Sample(NamedTuple):
    """GPU use in percent and RAM in MB; None means unknown, which is not idle."""

    gpu_pct: float | None
    ram_mb: float | None


class Process(NamedTuple):
    """A row of `nvidia-smi pmon`: a process on a GPU, with the use of each engine as printed."""

    gpu: str
    pid: int
    use: tuple[str, ...]


class _Unknown(Exception):
    """The GPU use is unknown; the text says why."""


class Sampler:
    """Sample a process and its descendants; reuse it, since it learns what pmon can show.

    It samples this process until `follow` names another one. `card`: the GPU that the process uses,
    or None for all. It counts if no tool shows the GPU's processes.
    """

    def __init__(self, *, card: int | None = None) -> None:
        self._pid: int | None = None
        self._card = card
        self._nvidia = external_tool.Tool("nvidia-smi")
        self._rocm = external_tool.Tool("rocm-smi")
        self.shown = False
        """Whether pmon has shown a number yet."""
        self.problem: str | None = None
        """Why the latest sample has no GPU use, or None."""

    def follow(self, pid: int | None) -> None:
        """Sample this process from now on."""
        self._pid = pid

    @property
    def is_stopped(self) -> bool:
        """Return whether that process is stopped by a signal or a debugger; False if unknown."""
        return self._pid is not None and _stat(PROC, self._pid)[:1] in (["T"], ["t"])

    def sample(self) -> Sample:
        """Return the use now. Blocks for about TIMEOUT_S at worst, raises nothing."""
        used = None
        try:
            used, self.problem = self._gpu_pct(), None
        except _Unknown as why:
            self.problem = str(why)
        return Sample(used, ram_mb(PROC, CGROUPS, self._pid))

    def _gpu_pct(self) -> float:
        deadline = time.monotonic() + TIMEOUT_S
        listed = self._ask(self._nvidia, deadline, "pmon", "-c", "1")
        rows = pmon_processes(listed.text or "")
        self.shown |= any(_percent(use) is not None for row in rows for use in row.use)
        own = [row for row in rows if is_descendant(row.pid, PROC, self._pid)]
        if own:
            used = _known(pmon_use(own, shown=self.shown), "pmon has shown no number yet")
            self._confirm({row.gpu for row in own if set(row.use) == {"-"}}, deadline)
            return used
        columns = "utilization.gpu" if self._card is None else "index,utilization.gpu"
        machine = self._ask(
            self._nvidia, deadline, f"--query-gpu={columns}", "--format=csv,noheader"
        )
        if machine.text is not None:
            used = nvidia_use(machine.text)
            if self._card is not None:
                used = nvidia_use_by_gpu(machine.text).get(str(self._card))
            return _known(used, "nvidia-smi reports no use of the GPU")
        chosen = () if self._card is None else ("-d", str(self._card))
        other = self._ask(self._rocm, deadline, *chosen, "--showuse", "--json")
        if other.text is not None:
            return _known(rocm_use(other.text), "rocm-smi reports no use of the GPU")
        raise _Unknown(f"{machine.problem}, {other.problem}")

    def _confirm(self, silent: set[str], deadline: float) -> None:
        """Raise `_Unknown` if a GPU for which pmon shows only `-` cannot report its use at all.

        A GPU in MIG mode prints for every process what others print for an idle one.
        """
        if not silent:
            return
        asked = self._ask(
            self._nvidia, deadline, "--query-gpu=index,utilization.gpu", "--format=csv,noheader"
        )
        use_by_gpu = nvidia_use_by_gpu(asked.text or "")
        if any(use_by_gpu.get(gpu) is None for gpu in silent):
            raise _Unknown("nvidia-smi reports no use of the GPU")

    def _ask(
        self, tool: external_tool.Tool, deadline: float, *arguments: str
    ) -> external_tool.Answer:
        """Run one tool; if it hangs, end the sample: others would wait for the same driver."""
        answer = tool.ask(*arguments, timeout_s=max(0.0, deadline - time.monotonic()))
        if answer.hung:
            raise _Unknown(answer.problem)
        return answer


def _known(used: float | None, problem: str) -> float:
    if used is None:
        raise _Unknown(problem)
    return used


def _percent(text: str) -> float | None:
    """Return a number from 0 to 100, or None."""
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if value <= 100 else None


def pmon_processes(text: str) -> list[Process]:
    """Return the rows of a process with their `%` columns; none without pmon's two header lines.

    Columns differ by driver; the headers have their names and units. A truncated row has "" for
    missing columns.
    """
    names: list[str] = []
    units: list[str] = []
    found: list[Process] = []
    for line in text.splitlines():
        words = line.split()
        if line.lstrip().startswith("#"):
            header = line.lstrip()[1:].split()
            if "pid" in header:
                names, units = header, []
            else:
                units = header
        elif "pid" in names and "%" in units and len(words) > names.index("pid"):
            pid = words[names.index("pid")]
            if re.fullmatch(r"\d{1,10}", pid, re.ASCII):
                at = [n for n, unit in enumerate(units) if unit == "%"]
                use = tuple(words[n] if n < len(words) else "" for n in at)
                found.append(Process(words[0], int(pid), use))
    return found


def pmon_use(rows: Sequence[Process], *, shown: bool) -> float | None:
    """Return the use of the busiest GPU by these processes together; None if any of it is unknown.

    `-` for an engine means idle, once the machine has `shown` that it reports numbers at all.
    """
    per_gpu: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        use = [0.0 if shown and text == "-" else _percent(text) for text in row.use]
        known = [value for value in use if value is not None]
        if not known or len(known) < len(use):
            return None
        per_gpu[row.gpu] += max(known)
    return min(100.0, max(per_gpu.values())) if per_gpu else None


def nvidia_use(text: str) -> float | None:
    """Return the use of the busiest GPU, from one line each.

    None if one has `[N/A]`, or without GPU.
    """
    lines = [line.strip().removesuffix("%").strip() for line in text.splitlines()]
    return _busiest([line for line in lines if line])


def nvidia_use_by_gpu(text: str) -> dict[str, float | None]:
    """Return the use of each GPU by its index, from lines `index, use`; None if unknown."""
    pairs = [line.partition(",")[::2] for line in text.splitlines() if "," in line]
    return {index.strip(): nvidia_use(use) for index, use in pairs}


def rocm_use(text: str) -> float | None:
    """Return the use of the busiest GPU of `rocm-smi --showuse`, JSON or not.

    None as in `nvidia_use`.
    """
    return _busiest(_ROCM_USE.findall(text))


def _busiest(texts: Sequence[str]) -> float | None:
    values = [_percent(text) for text in texts]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def is_descendant(pid: int, proc: Path, of: int | None = None) -> bool:
    """Return whether it is process `of` (None: this one) or its descendant; False if unknown."""
    first = of or os.getpid()
    for _ in range(_MOST_ANCESTORS):
        if pid == first:
            return True
        parent = next(iter(_stat(proc, pid)[1:2]), "")
        if not parent.isdigit() or parent == "0":
            return False
        pid = int(parent)
    return False


def _stat(proc: Path, pid: int) -> list[str]:
    """Return a process's state, parent and so on, as in `/proc/PID/stat`; [] if unknown."""
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def ram_mb(proc: Path, cgroups: Path, pid: int | None = None) -> float | None:
    """Return the RAM of a process's container, else its RSS, in MB of 2**20; None if unknown."""
    folder = proc / ("self" if pid is None else str(pid))
    found = container_mb(folder, cgroups)
    return found if found is not None else _rss_mb(folder)


def container_mb(folder: Path, cgroups: Path) -> float | None:
    """Return `memory.current` of a process's cgroup (v2).

    None if no namespace or limit contains it. Only a namespace shows a cgroup with this file as
    `/`: the machine's root has none.
    """
    try:
        groups = (folder / "cgroup").read_text(encoding="utf-8").splitlines()
        name = next(line[3:] for line in groups if line.startswith("0::/"))
        own = cgroups / name.lstrip("/")
        limits = [f / "memory.max" for f in (own, *own.parents) if cgroups in f.parents]
        is_limited = any(pressure.text(each).strip() not in (b"", b"max") for each in limits)
        if ".." in own.parts or not (name == "/" or is_limited):
            return None
        return int((own / "memory.current").read_text(encoding="ascii")) / MB
    except (OSError, ValueError, StopIteration):
        return None


def _rss_mb(folder: Path) -> float | None:
    (found,) = pressure.numbers(folder / "status", b"VmRSS")
    return None if found is None else found / 1024
