"""`examples/local_models` shares one model between its threads."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from queue_workflows import model_registry

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "local_models"


@pytest.fixture
def digits() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("local_models_digits", FOLDER / "digits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    model_registry.clear_for_tests()


class StandIn:
    """A classifier that reads every image right but the multiples of 100."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.meeting = threading.Barrier(10)

    def predict(self, images: list[int]) -> list[int]:
        name = threading.current_thread().name
        if name not in self.threads:
            self.threads.add(name)
            self.meeting.wait(30)  # all ten threads are in it at once
        return [-1 if image % 100 == 0 else image for image in images]


def test_ten_threads_share_one_model(digits: ModuleType) -> None:
    classifier, numbers = StandIn(), list(range(1797))
    found = digits.run(lambda: digits.Digits(classifier, numbers, numbers))
    assert found == {"jobs": 20, "failed": [], "right": 789, "read": 797, "loads": 1}
    assert len(classifier.threads) == digits.THREADS


def test_a_model_that_cannot_be_loaded_fails_the_jobs(digits: ModuleType) -> None:
    def fails() -> Any:
        raise OSError("no such file")

    found = digits.run(fails, images=1100)
    assert (found["read"], found["jobs"], len(found["failed"])) == (0, 3, 3)
    assert all("OSError: no such file" in error for error in found["failed"])


def test_it_reads_digits() -> None:
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        **{k: v for k, v in os.environ.items() if k.startswith(("COVERAGE_", "PYTHONPATH"))},
    }
    done = subprocess.run(
        [sys.executable, str(FOLDER)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(
        r"(\d+) of 797 images read right, 20 jobs, 10 threads, 1 load\n", done.stdout
    )
    assert found, done.stdout
    assert int(found[1]) > 700
