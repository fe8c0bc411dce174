"""Run the service with uvicorn, with limits on connections of slow and silent clients."""

from __future__ import annotations

import contextlib
import gc
import socket
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final

import fastapi
import h11
import uvicorn
from uvicorn.protocols.http import h11_impl

from queue_workflows import errors
from queue_workflows.runtime import signals
from queue_workflows.service import guard, problems, state
from queue_workflows.service import settings as service_settings

MAX_INCOMPLETE_BYTES: Final = 65_536
KEEP_ALIVE_S: Final = 5
DRAIN_S: Final = 3
"""Seconds that requests get to end after a stop signal."""


class Protocol(h11_impl.H11Protocol):
    """HTTP/1.1 that refuses with problem documents, and shows which step its client has to take."""

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP with a problem document, and close the connection."""
        self.refuse(400, "Bad Request", msg)

    def refuse(self, status: int, reason: str, detail: str) -> None:
        """Send a problem document unless a response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            found = problems.problem(status, detail, headers={"connection": "close"})
            head = [f"HTTP/1.1 {status} {reason}".encode()]
            head += [b": ".join(each) for each in (*found.raw_headers, *guard.SECURITY)]
            self.transport.write(b"\r\n".join([*head, b"", bytes(found.body)]))
        self.transport.close()

    def step(self) -> tuple[str, Any]:
        """Return the client's next step, and a mark that changes when it has taken it.

        `take`: a part of the sent bytes; the mark is the number of bytes not taken yet. `head`: the
        whole head of a request. `body`: the rest of a body whose request was answered without it.
        """
        if left := self.transport.get_write_buffer_size():
            return "take", left
        is_first = self.cycle is None  # pyright: ignore[reportUnnecessaryComparison]
        if self.conn.their_state is h11.IDLE and (is_first or self.conn.trailing_data[0]):
            return "head", self.cycle
        drops = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        return ("body", self.cycle) if drops else ("", None)


class SlowClients:
    """Closes the connections of clients that stay too long at one step (seconds).

    The server's own timer runs only between requests, and each byte stops it. A client that does
    not read its responses would otherwise keep the connection forever.
    """

    def __init__(self, *, head_s: float, write_s: float) -> None:
        self._limits = {"head": head_s, "body": head_s, "take": write_s}
        self._since: dict[Any, tuple[str, Any, float]] = {}

    def close(self, connections: Iterable[Any], now: float) -> None:
        """Close the connections that are too slow; `now` is of the monotonic clock."""
        before, self._since = self._since, {}
        for each in connections:
            kind, mark = each.step()
            if not kind:
                continue
            known = before.get(each, ("", None, now))
            stays = known[0] == kind and (mark >= known[1] if kind == "take" else mark is known[1])
            self._since[each] = known if stays else (kind, mark, now)
            if not stays or now - known[2] < self._limits[kind]:
                continue
            if kind == "take":
                each.transport.abort()
            elif not each.transport.is_closing():
                detail = f"no whole head came within {self._limits[kind]:g} s"
                each.refuse(408, "Request Timeout", f"{detail} (APP_HEADER_TIMEOUT_SEC)")


class _Server(uvicorn.Server):
    """A server that ends slow connections, reports that it listens, and handles no signal."""

    def __init__(
        self, chosen: uvicorn.Config, own: state.Service, listening: Callable[[], object]
    ) -> None:
        super().__init__(chosen)
        self._own = own
        self._listening = listening
        self._slow = SlowClients(
            head_s=own.settings.app_header_timeout_sec, write_s=own.settings.app_request_timeout_sec
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle no signal."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then report it."""
        await super().startup(sockets)
        if self.started:
            self._listening()

    async def on_tick(self, counter: int) -> bool:
        """Close slow connections; called ten times a second."""
        self._slow.close(self.server_state.connections, time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams and long polls, then stop."""
        self._own.changes.end_readers()
        await super().shutdown(sockets)


def bind(settings: service_settings.Settings) -> socket.socket:
    """Return the bound socket; raise `InvalidConfig` for an address that cannot be used."""
    host = settings.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY; else a reply waits 40 ms for an ACK.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, settings.app_port))
    except (OSError, UnicodeError) as error:
        found.close()
        raise errors.InvalidConfig(
            f"{host} port {settings.app_port} cannot be bound: {getattr(error, 'strerror', error)}"
        ) from None
    found.set_inheritable(False)
    return found


def run(app: fastapi.FastAPI, bound: socket.socket, listening: Callable[[], object]) -> int:
    """Serve until SIGTERM or SIGINT; return 0, or 1 if the application did not start.

    The first signal stops the listener and the workers at once, a second one hurries them.
    """
    own: state.Service = app.state.service
    chosen = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_INCOMPLETE_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
        backlog=2048,
    )
    server = _Server(chosen, own, listening)
    # `limit_concurrency` is not used, since it refuses /health too, and answers in plain text.
    own.open_connections = lambda: len(server.server_state.connections)

    def stop() -> None:
        server.should_exit = True
        own.stopping.request()

    def hurry() -> None:
        server.force_exit = True
        stop()

    # What is loaded stays: without this each full collection, as rows of pages cause, searches it.
    gc.freeze()
    with signals.StopRequest(on_first=stop, on_second=hurry):
        server.run(sockets=[bound])
    return 0 if server.started else 1
