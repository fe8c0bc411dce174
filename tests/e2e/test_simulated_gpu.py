"""The GPU check passes with real workers on a simulated GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from queue_workflows.telemetry import gpu_overview
from tests.gpu import __main__ as gpu
from tests.gpu import app


def test_every_check_holds_on_a_simulated_gpu(
    db: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = gpu.pretended(tmp_path)
    monkeypatch.setenv("PATH", env["PATH"])
    holds = gpu.check(env, patience_s=60.0)
    out = capsys.readouterr().out
    assert holds, out
    assert out.count("ok ") == 8


def test_the_simulated_gpu_adds_up_the_memory_of_live_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", gpu.pretended(tmp_path)["PATH"])
    (tmp_path / "999999999.1.vram").write_text("5000")
    card = app.Pretended(tmp_path)
    reader = gpu_overview.Reader(None)
    assert reader.read() == [gpu_overview.Gpu(0, 0, 0, 24576)]
    weights = card.weights(2048)
    assert reader.read() == [gpu_overview.Gpu(0, 0, 2048, 24576)]
    weights.__dict__.clear()
    del weights
    assert reader.read() == [gpu_overview.Gpu(0, 0, 0, 24576)]
