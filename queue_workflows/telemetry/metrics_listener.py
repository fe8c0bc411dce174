"""Serve the metrics page over HTTP, in one thread and with limits for every client."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from queue_workflows import db, errors, history
from queue_workflows.telemetry import metrics_page

_log = logging.getLogger(__name__)
MOST_CLIENTS: Final = 32
"""Connections at once; further ones are closed without a reply."""
MOST_HEAD: Final = 16 * 1024
"""Bytes of a request's line and headers."""
CLIENT_S: Final = 5.0
"""Seconds in which a client must send its request, and take the reply."""
COUNT_FOR_S: Final = 1.0
STOP_EVERY_S: Final = 0.1
_PLAIN: Final = "text/plain; charset=utf-8"


class Address(NamedTuple):
    """The address to listen on; port 0 means any free port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can connect."""
        return _is_loopback(self.host)


class _Reply(NamedTuple):
    status: str
    text: str
    media_type: str = _PLAIN


def address(text: str) -> Address:
    """Return the address of `HOST:PORT` or `[IPV6]:PORT`; raise `InvalidConfig` for other text."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    is_port = re.fullmatch(r"\d{1,5}", port, re.ASCII) and int(port) < 65536
    if not (colon and host and is_port):
        raise errors.InvalidConfig(
            f"--listen {text!r:.100} should be HOST:PORT, such as 127.0.0.1:9187, or [::1]:9187"
        )
    return Address(host, int(port))


async def serve(
    where: Address, *, is_stopped: Callable[[], bool], on_ready: Callable[[str], object]
) -> None:
    """Serve GET /metrics until `is_stopped`; `on_ready` gets the page's address once it is bound.

    Counts new events meanwhile, every `history.COUNT_EVERY_S`. Raises `InvalidConfig` if the
    address cannot be bound.
    """
    source = _Source()
    clients = _Clients(where, source)
    try:
        server = await asyncio.start_server(clients.accept, where.host, where.port, limit=MOST_HEAD)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise errors.InvalidConfig(
            f"cannot listen on {where.host}:{where.port}: {reason}"
        ) from error
    async with server:
        bound = server.sockets[0].getsockname()
        name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        on_ready(f"http://{name}:{bound[1]}/metrics")
        count_at = 0.0
        try:
            while not is_stopped():
                if (now := time.monotonic()) >= count_at:
                    count_at = now + history.COUNT_EVERY_S
                    source.count()
                await asyncio.sleep(STOP_EVERY_S)
        finally:
            server.close()
            await clients.close()
            source.close()


class _Source:
    """The database of a listener, by a connection of its own, which fails soon in an outage."""

    def __init__(self) -> None:
        self._dedicated = db.DedicatedConnection()
        self.close = self._dedicated.close

    def count(self) -> None:
        """Count new events; log why that fails."""
        try:
            with self._dedicated.using() as conn:
                metrics_page.count(conn, within_s=COUNT_FOR_S)
        except db.Error as error:
            _log.warning("events cannot be counted for the metrics: %s", error)

    def page(self) -> _Reply:
        """Return the reply with the page, or 503 if the database does not answer."""
        try:
            with self._dedicated.using() as conn:
                return _Reply("200 OK", metrics_page.scrape(conn), metrics_page.CONTENT_TYPE)
        except (db.Error, errors.QueueWorkflowsError) as error:
            _log.warning("the metrics cannot be read: %s", error)
        return _Reply("503 Service Unavailable", "the metrics cannot be read now; see the log\n")


class _Clients:
    """The connections of a listener, each of which makes one request."""

    def __init__(self, where: Address, source: _Source) -> None:
        self._where = where
        self._source = source
        self._open: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reply to one request, or close the connection if there are too many."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MOST_CLIENTS:
            writer.close()
            return
        self._open.add(task)
        try:
            await asyncio.wait_for(self._talk(reader, writer), CLIENT_S)
        except (asyncio.TimeoutError, asyncio.CancelledError, OSError):
            writer.transport.abort()
        finally:
            self._open.discard(task)
            writer.close()

    async def close(self) -> None:
        """End every connection."""
        open_now = [*self._open]
        for task in open_now:
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            head = None
        method, reply = "GET", _Reply("431 Request Header Fields Too Large", "shorten the head\n")
        if head is not None:
            method, reply = self._reply(head.decode("latin-1"))
        body = reply.text.encode()
        writer.write(
            f"HTTP/1.1 {reply.status}\r\nContent-Type: {reply.media_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n"
            "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n\r\n".encode("latin-1")
        )
        writer.write(b"" if method == "HEAD" else body)
        await writer.drain()

    def _reply(self, head: str) -> tuple[str, _Reply]:
        """Return the method of a request and the reply to it."""
        first, *rest = head.split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "GET", _Reply("400 Bad Request", "this is not an HTTP request\n")
        method, path = words[0], words[1].partition("?")[0]
        hosts = [line.partition(":")[2] for line in rest if line.lower().startswith("host:")]
        if self._where.is_loopback and not all(map(_is_local, hosts)):
            # A page of another site whose name leads here (DNS rebinding) must not read this one.
            return method, _Reply("403 Forbidden", "the Host header does not name this machine\n")
        if path != "/metrics":
            return method, _Reply("404 Not Found", "the metrics are at /metrics\n")
        if method not in {"GET", "HEAD"}:
            return method, _Reply("405 Method Not Allowed", "GET /metrics\n")
        return method, self._source.page()


def _is_local(host: str) -> bool:
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return _is_loopback(name)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
