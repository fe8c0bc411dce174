"""Run a TCP proxy before PostgreSQL that a test can freeze, mute or cut."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
from typing import Any, NamedTuple

from psycopg import conninfo

from tests.support import database, wait

BLOCK = 65536
BOTH = frozenset({True, False})


class _Flow(NamedTuple):
    """One direction of one connection."""

    target: socket.socket
    towards_server: bool


class _Order(NamedTuple):
    """What the proxy's thread is to do: `block`, `cut` or `close`.

    `part`: to block once a client sends bytes that contain this; empty: at once.
    """

    what: str
    blocked: frozenset[bool]
    part: bytes
    done: threading.Event


class Proxy:
    """Listens on 127.0.0.1 and forwards to the server of a DSN, its unix socket too.

    `freeze`: nothing is forwarded, connections stay open, new ones are taken and get no word.
    `freeze_at`: the same from a statement on.
    `mute`: data of the client arrives, data of the server does not. `thaw` undoes both, with
    nothing lost. `cut` closes every connection.
    """

    def __init__(self, dsn: str) -> None:
        self._parts: dict[str, Any] = dict(conninfo.conninfo_to_dict(dsn))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._bell, self._rope = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._flows: dict[socket.socket, _Flow] = {}
        self._held: set[socket.socket] = set()
        self._blocked: frozenset[bool] = frozenset()
        self._awaits: _Order | None = None
        """What is done once a client sends its part."""
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="test-proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._order("close")
        self._thread.join()
        self._rope.close()

    @property
    def dsn(self) -> str:
        """Return the DSN of the same database through the proxy."""
        host, port = self._listener.getsockname()[:2]
        return database.url({**self._parts, "host": host, "port": port})

    @property
    def connections(self) -> int:
        """Return how many clients are connected."""
        return len(self._flows) // 2

    def holds_back(self, part: bytes) -> bool:
        """Return whether a freeze holds back bytes of a client that contain this part."""
        for sock, flow in list(self._flows.items()):
            if flow.towards_server and sock in self._held:
                try:
                    sent = sock.recv(BLOCK, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                except OSError:
                    continue
                if part in sent:
                    return True
        return False

    def freeze(self) -> None:
        """Forward nothing from now on."""
        self._order("block", BOTH)

    def freeze_at(self, part: bytes) -> None:
        """Forward nothing from the moment that a client sends these bytes, which are held back.

        Return once that has happened.
        """
        self._order("block", BOTH, part)

    def mute(self) -> None:
        """Forward no data of the server from now on."""
        self._order("block", frozenset({False}))

    def thaw(self) -> None:
        """Forward everything again, what was held back first."""
        self._order("block", frozenset())

    def cut(self) -> None:
        """Close every connection; new ones are taken."""
        self._order("cut")

    def _order(self, what: str, blocked: frozenset[bool] = frozenset(), part: bytes = b"") -> None:
        """Let the thread do it, and wait until it is done."""
        order = _Order(what, blocked, part, threading.Event())
        self._orders.put(order)
        self._rope.send(b"!")
        try:
            wait.until(lambda: order.done.wait(0.1))
        except AssertionError:
            at = f" at {part!r}, which no client sends" if part else ""
            raise AssertionError(f"the proxy does not {what}{at}") from None

    def _run(self) -> None:
        what = ""
        while what != "close":
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._bell:
                    what = self._obey()
                elif sock is self._listener:
                    self._connect()
                elif sock in self._flows and sock not in self._held:
                    self._forward(sock)
        for sock in list(self._flows):
            self._end(sock)
        for end in (self._listener, self._bell, self._selector):
            end.close()

    def _obey(self) -> str:
        self._bell.recv(1)
        order = self._orders.get()
        self._awaits = None
        if order.part:
            self._awaits = order
            return order.what
        if order.what == "cut":
            for sock in list(self._flows):
                self._end(sock)
        elif order.what == "block":
            self._block(order)
        order.done.set()
        return order.what

    def _block(self, order: _Order) -> None:
        self._blocked = order.blocked
        for sock, flow in self._flows.items():
            self._hold(sock, flow.towards_server in self._blocked)

    def _hold(self, sock: socket.socket, hold: bool) -> None:
        if hold and sock not in self._held:
            self._selector.unregister(sock)
            self._held.add(sock)
        elif not hold and sock in self._held:
            self._held.discard(sock)
            self._selector.register(sock, selectors.EVENT_READ)

    def _connect(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = self._dial()
        except OSError:  # the server is away
            client.close()
            return
        self._flows[client] = _Flow(server, towards_server=True)
        self._flows[server] = _Flow(client, towards_server=False)
        for sock in (client, server):
            if self._flows[sock].towards_server in self._blocked:
                self._held.add(sock)
            else:
                self._selector.register(sock, selectors.EVENT_READ)

    def _dial(self) -> socket.socket:
        host, port = str(self._parts.get("host")), int(self._parts.get("port") or 5432)
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server

    def _forward(self, source: socket.socket) -> None:
        order = self._awaits
        if order is not None and self._flows[source].towards_server:
            with contextlib.suppress(OSError):
                if order.part in source.recv(BLOCK, socket.MSG_PEEK):
                    self._awaits = None
                    self._block(order)
                    order.done.set()
                    return
        try:
            data = source.recv(BLOCK)
            if data:
                self._flows[source].target.sendall(data)
                return
        except OSError:
            pass
        self._end(source)

    def _end(self, sock: socket.socket) -> None:
        flow = self._flows.pop(sock, None)
        if flow is None:
            return
        if sock in self._held:
            self._held.discard(sock)
        else:
            self._selector.unregister(sock)
        sock.close()
        self._end(flow.target)
