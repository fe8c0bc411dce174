"""An app with a failure hook that journals its alerts: `--app tests.support.alert_app`.

ALERTS names the journal, MODE what the hook does besides: `exit` and `kill` end the process, `hang`
returns when the file `<journal>.go` is there, `raise` raises.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import queue_workflows

ALERTS = "QW_TEST_ALERTS"
MODE = "QW_TEST_ALERTS_MODE"


def lines(journal: Path) -> list[dict[str, Any]]:
    """Return the alerts that hooks were called with, each with the `pid` of its process."""
    return [json.loads(line) for line in journal.read_text().splitlines()]


def hook(alert: dict[str, Any]) -> None:
    journal = os.environ[ALERTS]
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, json.dumps({**alert, "pid": os.getpid()}).encode() + b"\n")
    os.close(fd)
    mode = os.environ.get(MODE, "")
    if mode == "exit":
        os._exit(7)
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "raise":
        raise RuntimeError("the hook's own")
    while mode == "hang" and not Path(f"{journal}.go").exists():
        time.sleep(0.01)


def note(reason: str) -> None:
    raise ValueError("the job's own")


def setup() -> None:
    queue_workflows.set_on_failed(hook)
    queue_workflows.register_ingest_task("note", note, queue="fetch")
