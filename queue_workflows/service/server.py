"""Run the service with uvicorn, with limits on connections that send nothing or too slowly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from typing import Any, Final

import fastapi
import h11
import uvicorn
from uvicorn.protocols.http import h11_impl

from queue_workflows import errors
from queue_workflows.runtime import signals
from queue_workflows.service import guard, lifespan, problems, state
from queue_workflows.service import settings as service_settings

MAX_INCOMPLETE_BYTES: Final = 65_536
KEEP_ALIVE_S: Final = 5
DRAIN_S: Final = 3
"""Seconds that requests get to end after a stop signal."""


class _Protocol(h11_impl.H11Protocol):
    """HTTP/1.1 that closes a connection if a request's head takes longer than `head_s`.

    So does the rest of a body that nobody reads, since its request was answered without it. Each
    byte of it stops the server's own timer. A client that takes nothing of its responses for
    `write_s` is cut off: else it would keep the connection, also beyond its end.
    """

    head_s = 10.0
    write_s = 10.0
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time of the first head."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # `pause_writing` then reports any unsent data
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the times."""
        self._unwatch()
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the time in which the client has to take a part of what was sent."""
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        """Forget that time."""
        self._stop_write_timer()
        super().resume_writing()

    def _start_write_timer(self) -> None:
        self._stop_write_timer()
        left = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(self.write_s, self._check_taken, left)

    def _check_taken(self, before: int) -> None:
        """Cut off a client that has taken nothing since; a slow one goes on."""
        if self.transport.get_write_buffer_size() < before:
            self._start_write_timer()
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Stop the time once a head is complete, start it with the first byte of another."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and not self._drops_body():
            self._unwatch()
        elif self._late is None and not self.transport.is_closing():
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP with a problem document, and close the connection."""
        self._refuse(400, "Bad Request", msg)

    def _refuse(self, status: int, reason: str, detail: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else a response has begun
            found = problems.problem(status, detail, headers={"connection": "close"})
            head = [f"HTTP/1.1 {status} {reason}".encode()]
            head += [b": ".join(each) for each in (*found.raw_headers, *guard.SECURITY)]
            self.transport.write(b"\r\n".join([*head, b"", bytes(found.body)]))
        self.transport.close()

    def _drops_body(self) -> bool:
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _watch(self) -> None:
        self._late = self.loop.call_later(self.head_s, self._close)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _stop_write_timer(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _close(self) -> None:
        self._late = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(408, "Request Timeout", f"no whole head came within {self.head_s:g} s")
        elif self._drops_body():
            self.transport.close()


class _Server(uvicorn.Server):
    """A server whose signals somebody else handles, and which reports that it listens.

    `ending` is called before it waits for the requests that are served.
    """

    def __init__(
        self,
        chosen: uvicorn.Config,
        listening: Callable[[], object],
        ending: Callable[[], object],
    ) -> None:
        super().__init__(chosen)
        self._listening = listening
        self._ending = ending

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle no signal."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then report it."""
        await super().startup(sockets)
        if self.started:
            self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams and long polls, then stop."""
        self._ending()
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


def _uvicorn_config(app: fastapi.FastAPI, settings: service_settings.Settings) -> uvicorn.Config:
    limits = {
        "head_s": settings.app_header_timeout_sec,
        "write_s": settings.app_request_timeout_sec,
    }
    return uvicorn.Config(
        app,
        http=type("_Limited", (_Protocol,), limits),
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


def run(
    app: fastapi.FastAPI,
    settings: service_settings.Settings,
    bound: socket.socket,
    listening: Callable[[], object],
) -> int:
    """Serve until SIGTERM or SIGINT; return 0, or 1 if the application did not start.

    The first signal stops the listener and the workers at once, a second one hurries them.
    """
    server = _Server(_uvicorn_config(app, settings), listening, state.ending(app))
    # Not by `limit_concurrency`: its answer is plain text, and /health gets it too.
    state.count_connections(app, lambda: len(server.server_state.connections))

    def stop() -> None:
        server.should_exit = True
        background: Any = getattr(app.state, "background", None)
        if isinstance(background, lifespan.Background):
            background.request_stop()

    def hurry() -> None:
        server.force_exit = True
        stop()

    with signals.StopRequest(on_first=stop, on_second=hurry):
        server.run(sockets=[bound])
    return 0 if server.started else 1
