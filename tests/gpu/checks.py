"""Check models and guards on a GPU, by nvidia-smi and by the database."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from queue_workflows import models, workers
from tests.gpu import app
from tests.gpu.gpu_worker import HOST, Bench

LEFT_MB = 150
"""MB that may stay allocated after an unload, and that other programs on the GPU may change."""
GRAIN = 1.25
"""A framework allocates memory in larger pieces than a model requests."""


class Check(NamedTuple):
    """A line of the report."""

    name: str
    seen: str


class Failed(AssertionError):
    """A check that does not hold."""


def _must(holds: bool, seen: str) -> str:
    if not holds:
        raise Failed(seen)
    return seen


class Checks:
    """One after the other, as each starts from the GPU memory that the one before left."""

    def __init__(self, bench: Bench, *, slow_s: float) -> None:
        self._bench = bench
        self._slow_s = slow_s
        self._free = self._empty = 0

    def all(self) -> list[tuple[str, Callable[[], str]]]:
        """Name and check, in order; a check returns what it saw or raises AssertionError."""
        return [
            ("a load takes the memory of its model", self.load),
            ("a warm model is not loaded again", self.warm),
            ("a swap leaves one model on the GPU", self.swap),
            ("an idle model is unloaded", self.idle),
            ("loaded and unloaded on request", self.on_request),
            ("OFF frees the GPU memory", self.off),
            ("a load of minutes fails no guard", self.slow),
            ("a handler that stops using the GPU is ended", self.stall),
        ]

    def _held(self) -> int:
        """Return the MB on the GPU beyond those of the worker's process without a model."""
        return self._bench.used_mb() - self._empty

    def _holds(self, mb: int) -> bool:
        return mb - LEFT_MB <= self._held() <= mb * GRAIN + LEFT_MB

    def load(self) -> str:
        self._free = self._bench.used_mb()
        self._bench.start()
        self._bench.finished(self._bench.submit("touch"))
        self._empty = self._bench.used_mb()
        job = self._bench.finished(self._bench.submit("think", "small"))
        seen = (
            f"{self._held()} MB more of {app.SMALL_MB}, in {job['context_delta']['load_s']:.1f} s"
        )
        return _must(self._holds(app.SMALL_MB) and self._bench.loads() == 1, seen)

    def warm(self) -> str:
        before = self._held()
        job = self._bench.finished(self._bench.submit("think", "small"))
        seen = f"{self._bench.loads()} loads, {self._held() - before:+} MB"
        still = abs(self._held() - before) <= LEFT_MB
        return _must(
            self._bench.loads() == 1 and still and job["context_delta"]["load_s"] == 0, seen
        )

    def swap(self) -> str:
        self._bench.finished(self._bench.submit("think", "large"))
        seen = f"{self._held()} MB, of {app.SMALL_MB} and {app.LARGE_MB}"
        return _must(self._holds(app.LARGE_MB) and self._bench.loads() == 2, seen)

    def idle(self) -> str:
        self._bench.until(lambda: self._held() <= LEFT_MB, "the idle model's memory")
        return f"{self._held()} MB left"

    def on_request(self) -> str:
        self._asked(models.load(HOST, "small")["request_no"])
        seen = f"{self._held()} MB, then "
        _must(self._holds(app.SMALL_MB), seen)
        self._asked(models.unload(HOST, "small")["request_no"])
        return _must(self._held() <= LEFT_MB, f"{seen}{self._held()} MB")

    def _asked(self, number: int) -> None:
        def answered() -> bool:
            said = [row["request"] or {} for row in models.list(HOST)]
            return any(each.get("no") == number and each["state"] == "done" for each in said)

        self._bench.until(answered, "an answer to the request")

    def off(self) -> str:
        self._bench.finished(self._bench.submit("think", "small"))
        workers.disable(HOST, "gpu")
        code = self._bench.exit_code()
        workers.enable(HOST, "gpu")
        return self._gone(code, 79)

    def _gone(self, code: int, wanted: int) -> str:
        """Check that the process exited with this code and freed its memory."""
        self._bench.until(lambda: self._bench.used_mb() - self._free <= LEFT_MB, "free GPU memory")
        left = self._bench.used_mb() - self._free
        return _must(code == wanted, f"exit code {code}, {left} MB left")

    def slow(self) -> str:
        self._bench.start()
        job_id = self._bench.submit("think", "slow")
        patience_s = self._slow_s + self._bench.patience_s
        job = self._bench.finished(job_id, timeout_s=patience_s)
        events = self._bench.events(job_id)
        seen = f"loaded in {job['context_delta']['load_s']:.0f} s, {len(events)} events"
        return _must(not [kind for kind in events if "trip" in kind or "stall" in kind], seen)

    def stall(self) -> str:
        job_id = self._bench.submit("stall")
        code = self._bench.exit_code()
        events = self._bench.events(job_id)
        _must("stall_trip" in events, ", ".join(events))
        return self._gone(code, 76)


def run(checks: Checks, say: Callable[[str], object]) -> bool:
    """Do them all, or up to the first that does not hold; whether all did."""
    for name, check in checks.all():
        try:
            say(f"ok      {name}: {check()}")
        except AssertionError as error:
            say(f"FAILED  {name}: {error}")
            return False
    return True
