"""`python -m tests.gpu`: each check fails when what it checks is broken; without a GPU it skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import __main__ as gpu
from tests.gpu import app, checks

MB = {"small": app.SMALL_MB, "large": app.LARGE_MB, "slow": app.SMALL_MB}
OTHERS_MB, PROCESS_MB = 700, 400


class Fake:
    """A worker and its GPU as the checks see them, with one thing broken."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.held: list[str] = []
        self.runs = False
        self.count = 0
        self.code = 0
        self.patience_s = 1.0
        self.jobs: dict[str, dict[str, Any]] = {}

    def start(self) -> None:
        self.runs = True

    def used_mb(self) -> int:
        held = sum(MB[name] for name in self.held)
        return OTHERS_MB + held + (PROCESS_MB if self.runs else 0)

    def submit(self, node: str, model: str | None = None) -> str:
        load_s, events = 0.0, ["claimed"]
        if model is not None and (model not in self.held or self.broken == "reload"):
            if self.broken != "swap":
                self.held.clear()
            self.held += [model] * (2 if self.broken == "load" else 1)
            self.count += 1
            load_s = 1.5
        if model == "slow" and self.broken == "slow":
            events += ["stall_suspected"]
        if node == "stall":
            self.end(78 if self.broken == "stall code" else 76)
            events += ["requeued"] if self.broken == "no trip" else ["stall_trip", "requeued"]
        self.jobs["job"] = {"context_delta": {"load_s": load_s}, "events": events}
        return "job"

    def end(self, code: int) -> None:
        self.code = code
        self.runs = False
        if self.broken != "stuck":
            self.held.clear()

    def finished(self, job_id: str, timeout_s: float | None = None) -> dict[str, Any]:
        return self.jobs[job_id]

    def events(self, job_id: str) -> list[str]:
        return self.jobs[job_id]["events"]

    def loads(self) -> int:
        return self.count

    def exit_code(self) -> int:
        return self.code

    def until(self, true: Callable[[], Any], what: str, timeout_s: float | None = None) -> Any:
        if self.broken != "idle" and "idle" in what:
            self.held.clear()
        if not true():
            raise AssertionError(what)

    # What is requested from it through the engine.

    def load(self, host: str, model: str) -> dict[str, Any]:
        self.held = [] if self.broken == "request" else [model]
        return {"request_no": 1}

    def unload(self, host: str, model: str) -> dict[str, Any]:
        if self.broken != "unload":
            self.held.clear()
        return {"request_no": 1}

    def list(self, host: str) -> Sequence[dict[str, Any]]:
        state = "failed" if self.broken == "answer" else "done"
        return [{"request": {"no": 1, "state": state}}]

    def disable(self, host: str, queue: str) -> None:
        self.end(0 if self.broken == "off code" else 79)

    def enable(self, host: str, queue: str) -> None:
        return


def report(fake: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[str]]:
    for name in ("models", "workers"):
        monkeypatch.setattr(checks, name, fake)
    said: list[str] = []
    return checks.run(checks.Checks(fake, slow_s=1.0), said.append), said


def test_all_checks_hold_where_nothing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    holds, said = report(Fake(), monkeypatch)
    assert holds
    assert len(said) == 8
    assert all(line.startswith("ok ") for line in said)
    assert said[0].endswith("2048 MB more of 2048, in 1.5 s")


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ("load", "a load takes the memory of its model"),
        ("reload", "a warm model is not loaded again"),
        ("swap", "a swap leaves one model on the GPU"),
        ("idle", "an idle model is unloaded"),
        ("request", "loaded and unloaded on request"),
        ("unload", "loaded and unloaded on request"),
        ("answer", "loaded and unloaded on request"),
        ("off code", "OFF frees the GPU memory"),
        ("stuck", "OFF frees the GPU memory"),
        ("slow", "a load of minutes fails no guard"),
        ("no trip", "a handler that stops using the GPU is ended"),
        ("stall code", "a handler that stops using the GPU is ended"),
    ],
)
def test_a_check_sees_what_is_broken_and_ends_the_report(
    monkeypatch: pytest.MonkeyPatch, broken: str, name: str
) -> None:
    holds, said = report(Fake(broken), monkeypatch)
    assert not holds
    assert said[-1].startswith(f"FAILED  {name}: ")
    assert all(line.startswith("ok ") for line in said[:-1])


def test_without_a_gpu_there_is_a_reason_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu.main([]) == 0
    assert capsys.readouterr().out == "skipped: no nvidia-smi on PATH\n"


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (None, "no torch for this Python"),
        (SimpleNamespace(is_available=lambda: False), "torch 2 sees no CUDA device"),
        (
            SimpleNamespace(
                is_available=lambda: True,
                mem_get_info=lambda: (100 << 20, 0),
                get_device_name=lambda: "X",
            ),
            f"100 MB free on X, {gpu.NEEDED_MB} needed",
        ),
    ],
)
def test_a_gpu_that_cannot_be_used_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, torch: Any, reason: str
) -> None:
    answer = SimpleNamespace(text="X\n", problem="")
    tool = SimpleNamespace(ask=lambda *_, **__: answer)
    monkeypatch.setattr(gpu.external_tool, "Tool", lambda _: tool)
    fake = torch and SimpleNamespace(cuda=torch, __version__="2")
    monkeypatch.setitem(gpu.sys.modules, "torch", fake)
    assert gpu.missing() == reason
