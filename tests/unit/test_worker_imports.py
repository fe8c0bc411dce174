"""What a worker imports: its start-up costs as much as its modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 186
"""Modules of this package that `import queue_workflows.claim_worker` loads, which are 186."""
MOST_WITH_EXECUTORS = 219
"""Those that a worker with executors loads, which are 219."""
HEAVY = ("email", "http", "multiprocessing", "unittest", "urllib.request")
UNUSED = (
    "queue_workflows.admin",
    "queue_workflows.declare",
    "queue_workflows.executor",
    "queue_workflows.history",
    "queue_workflows.runtime.supervisor",
    "queue_workflows.service",
    "queue_workflows.worker.crash_recovery",
    "queue_workflows.worker.executors",
    "queue_workflows.worker.parent",
    "queue_workflows.worker.pool_config",
    "queue_workflows.worker.slot_start",
    "queue_workflows.worker.slot_worker",
    "queue_workflows.worker.slots",
)
"""A worker needs them for executors, under a parent, or for what apps call."""
_CODE = """
import sys
import psycopg
known = set(sys.modules)
from queue_workflows import claim_worker
from queue_workflows.worker import command_line
options = command_line.parser().parse_args(sys.argv[1:])
if not command_line.is_inline(options):
    from queue_workflows.worker import slot_start
print(*(set(sys.modules) - known))
"""


def loaded_by(*options: str) -> set[str]:
    command = [sys.executable, "-c", _CODE, "--queue", "load", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    return loaded_by("--batch", "5")


@pytest.fixture(scope="module")
def with_executors() -> set[str]:
    return loaded_by()


@pytest.mark.parametrize("module", UNUSED)
def test_an_inline_worker_does_not_import(module: str, loaded: set[str]) -> None:
    assert module not in loaded


@pytest.mark.parametrize("module", HEAVY)
def test_a_worker_imports_no_heavy_library(
    module: str, loaded: set[str], with_executors: set[str]
) -> None:
    assert module not in loaded | with_executors


def test_a_worker_imports_few_modules(loaded: set[str], with_executors: set[str]) -> None:
    for found, most in ((loaded, MOST), (with_executors, MOST_WITH_EXECUTORS)):
        own = [name for name in found if name.split(".")[0] == "queue_workflows"]
        assert len(own) <= most, sorted(own)
