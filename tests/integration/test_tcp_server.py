"""Servers that a test run starts end with the run, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.wait import until

RUN = """
import subprocess, sys
from tests.support import tcp_server
started = subprocess.Popen(
    ["sleep", "60"], start_new_session=True, preexec_fn=tcp_server.end_with_parent
)
print(started.pid, flush=True)
started.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")
def test_a_server_that_is_reached_ends_with_a_run_that_is_killed() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    with run:
        assert run.stdout is not None
        started = int(run.stdout.readline())
        run.kill()
    until(lambda: not _lives(started), timeout_s=30)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except FileNotFoundError:
        return False
    return not state.startswith("Z")
