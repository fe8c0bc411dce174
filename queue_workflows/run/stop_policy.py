"""Run a stop policy of the app, in a process forked from the launcher or in a thread."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

from queue_workflows.runtime import clock, forking, kernel

WITHIN_S: Final = 10.0
"""Seconds that a policy may take before the worker stops by `hard` instead."""


class _Left(BaseException):
    """The policy has asked the worker to exit."""


class StoppedWorker:
    """The worker as a stop policy sees it.

    Each call waits until the worker has done it, and raises if the worker waits no longer.
    """

    model_cache = None

    def __init__(self, end: socket.socket, about: dict[str, Any]) -> None:
        self._end = end
        self.host: str = about["host"]
        self.queue: str = about["queue"]
        self.host_priority: int = about["host_priority"]
        self.lease_s: float = about["lease_s"]
        self.heartbeat = self

    def requeue_inflight_for_control(self, reason: str = "turned off") -> None:
        """Return the running jobs to the front of the queue; this uses up no attempt."""
        self._call(call="requeue", reason=str(reason))

    def clear_model(self) -> None:
        """Let the worker report that its model is unloaded and its heartbeat has ended."""
        self._call(call="clear_model")

    def send(self) -> None:
        """Let the worker send a heartbeat."""
        self._call(call="beat")

    def exit(self, code: int) -> NoReturn:
        """Let the worker exit with this code; like `os._exit`, this does not return."""
        self._call(call="exit", code=int(code))
        raise _Left

    def _call(self, **packet: Any) -> None:
        self._end.send(json.dumps(packet).encode())
        if not self._end.recv(64):
            raise ConnectionError("the worker waits for this stop policy no longer")


def main(
    end: socket.socket, about: dict[str, Any], policy: Callable[..., object], parent: int
) -> NoReturn:
    """Call the policy in this forked process, and never return."""
    try:
        os.setpgid(0, 0)
        kernel.die_with(parent)
        timer = kernel.DeathTimer()
        timer.set(clock.boot_s() + WITHIN_S)
        call(end, about, policy)
    finally:
        forking.flush()
        os._exit(0)


def call(
    end: socket.socket,
    about: dict[str, Any],
    policy: Callable[..., object],
    on_exit: Callable[[int], object] | None = None,
) -> None:
    """Call the policy and report its end; on its `exit` call `on_exit`, else the worker exits."""
    worker = StoppedWorker(end, about)
    try:
        with contextlib.suppress(_Left):
            policy(worker, on_exit=on_exit or worker.exit)
        end.send(json.dumps({"call": "done"}).encode())
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"[:1000]
            end.send(json.dumps({"call": "failed", "error": text}).encode())
