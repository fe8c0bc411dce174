"""Wake the loop of a worker with slots: from other threads, and on database notifications."""

from __future__ import annotations

import os
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


class ClaimSocket:
    """Lets a selector wait for what comes on the connection that claims while no statement runs.

    Notifications of new jobs come there, so that the loop reads them without a second thread. For
    the loop's thread.
    """

    def __init__(self, selector: selectors.BaseSelector, read: Callable[[], object]) -> None:
        """`read` is called when something can be read."""
        self._selector = selector
        self._read = read
        self._fd: int | None = None

    def open(self, conn: db.Connection) -> None:
        """Wait for this connection until `close`."""
        # A number of our own: libpq closes its own as soon as it finds the connection broken.
        self._fd = os.dup(conn.fileno())
        self._selector.register(self._fd, selectors.EVENT_READ, self._read)

    def close(self) -> None:
        """Wait no longer; to be called when the connection is closed."""
        if self._fd is not None:
            self._selector.unregister(self._fd)
            os.close(self._fd)
            self._fd = None


class Notifications:
    """Tell the lease keeper which jobs and controls the database notifies.

    `ready` is called if a job may be claimable although it is not new. For the listener's thread.
    """

    def __init__(
        self,
        whos: Collection[claims.Claimant],
        keeper: slot_keeper.SlotKeeper,
        ready: Callable[[], object],
    ) -> None:
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
            self._ready()
            return
        for channel, text in wake.notified:
            if channel == "job_cancel":
                self._keeper.cancelled(text)
            elif text in self._controls:
                self._keeper.wake("control", "models", "beat")
                self._ready()
