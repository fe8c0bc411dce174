"""Wake the loop of a worker with slots: from other threads, and on database notifications."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Collection

from queue_workflows import db
from queue_workflows.engine import claims, controls
from queue_workflows.worker import slot_keeper


class Wakes:
    """A socket pair by which any thread wakes the thread that waits in a selector."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._woken = False

    def wake(self) -> None:
        """Make the loop look at what has changed."""
        if not self._woken:
            self._woken = True
            try:
                self._writer.send(b"w")
            except OSError:
                return  # full: it wakes anyway; closed: nothing waits

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let this selector wait for `wake`."""
        selector.register(self._reader, selectors.EVENT_READ, self._clear)

    def _clear(self) -> None:
        self._woken = False
        try:
            self._reader.recv(64)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the sockets."""
        self._reader.close()
        self._writer.close()


class Notifications:
    """Tell the lease keeper and the loop what the database notifies; for the listener's thread.

    `ready` is called when there may be jobs to claim in this queue; None: in any.
    """

    def __init__(
        self,
        whos: Collection[claims.Claimant],
        keeper: slot_keeper.SlotKeeper,
        ready: Callable[[str | None], object],
    ) -> None:
        self._queues = {who.queue for who in whos}
        self._controls = {
            f"{who.host}:{queue}" for who in whos for queue in (who.queue, controls.ALL)
        }
        self._keeper = keeper
        self._ready = ready

    def on_wake(self, wake: db.Wake) -> None:
        """Act on what the listener has received, or on its new connection."""
        if wake.reason == "connected":
            self._keeper.heartbeat.locked = True
            self._keeper.wake("beat")
        if wake.reason != "notify":
            # Notifications that were sent while the connection was lost are lost too.
            self._keeper.wake("renew", "control", "models")
            self._ready(None)
            return
        for channel, text in wake.notified:
            if channel == "job_cancel":
                self._keeper.cancelled(text)
            elif channel == "worker_control":
                if text in self._controls:
                    self._keeper.wake("control", "models", "beat")
                    self._ready(None)
            elif text in self._queues:
                self._ready(text)
