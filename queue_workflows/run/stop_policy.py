"""Run a stop policy of the app in a process of its own, forked from the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

from queue_workflows.run import kernel, streams

WITHIN_S: Final = 10.0
"""Seconds that a policy may take; then the worker stops by `hard`."""


class StoppedWorker:
    """The worker as a stop policy sees it; each call waits until the worker has done it."""

    model_cache = None

    def __init__(self, end: socket.socket, about: dict[str, Any]) -> None:
        self._end = end
        self.host: str = about["host"]
        self.queue: str = about["queue"]
        self.host_priority: int = about["host_priority"]
        self.lease_s: float = about["lease_s"]
        self.heartbeat = self

    def requeue_inflight_for_control(self, reason: str = "turned off") -> None:
        """Return the running jobs to the front of the queue, uncounted."""
        self._call(call="requeue", reason=str(reason))

    def clear_model(self) -> None:
        """Let the worker say that its model is unloaded and that its heartbeat has ended."""
        self._call(call="clear_model")

    def send(self) -> None:
        """Let the worker report."""
        self._call(call="beat")

    def exit(self, code: int) -> None:
        """Let the worker leave with this exit code."""
        self._call(call="exit", code=int(code))

    def _call(self, **packet: Any) -> None:
        self._end.send(json.dumps(packet).encode())
        self._end.recv(64)


def main(
    end: socket.socket, about: dict[str, Any], policy: Callable[..., object], parent: int
) -> NoReturn:
    """Call the policy in this forked process, and never return."""
    try:
        os.setpgid(0, 0)
        kernel.die_with(parent)
        call(end, about, policy)
    finally:
        streams.flush()
        os._exit(0)


def call(
    end: socket.socket,
    about: dict[str, Any],
    policy: Callable[..., object],
    on_exit: Callable[[int], object] | None = None,
) -> None:
    """Call the policy, and tell the worker how it has ended. `on_exit` None: the worker leaves."""
    worker = StoppedWorker(end, about)
    try:
        policy(worker, on_exit=on_exit or worker.exit)
        end.send(json.dumps({"call": "done"}).encode())
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"[:1000]
            end.send(json.dumps({"call": "failed", "error": text}).encode())
