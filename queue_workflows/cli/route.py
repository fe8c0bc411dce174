"""The way to a server, by plain sockets: its name, its port, and whether it speaks TLS."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import NamedTuple

from queue_workflows.db import reach

_ASK_TLS = struct.pack("!ii", 8, 80877103)
"""PostgreSQL's SSLRequest, which every server answers with one byte."""


class Reply(NamedTuple):
    """`text` says what was found; `remedy` is "" where all is well."""

    text: str
    remedy: str = ""


class Silent(Exception):
    """Nothing came back in time."""


def resolve(target: reach.Target) -> Reply:
    """Whether the name has an address here; a folder, whether it is there."""
    if target.local:
        if target.host.startswith("@") or os.path.isdir(target.host):  # noqa: PTH112
            return Reply(f"{target.host} is a folder of sockets")
        return Reply(
            f"{target.host} is no folder", "is the server on this machine, and its socket there?"
        )
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = f"`getent hosts {target.host}` must answer: mend the name, DNS or /etc/hosts"
        return Reply(f"{target.host} has no address here ({why})", remedy)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if addresses == [target.host]:
        return Reply(f"{target.host} is an address")
    return Reply(f"{target.host} is {', '.join(addresses)}")


def answers(target: reach.Target, timeout_s: float) -> Reply:
    """Whether something takes a connection there."""
    try:
        _connected(target, timeout_s).close()
    except OSError as error:
        return Reply(*_why(target, error, timeout_s))
    return Reply(f"{target} answers")


def _connected(target: reach.Target, timeout_s: float) -> socket.socket:
    if not target.local:
        return socket.create_connection((target.host, target.port), timeout_s)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(f"{target.host}/.s.PGSQL.{target.port}".replace("@", "\0", 1))
    except BaseException:
        sock.close()
        raise
    return sock


def _why(target: reach.Target, error: OSError, timeout_s: float) -> tuple[str, str]:
    if target.local:
        remedy = "start the server, or name the folder of its socket and its port"
        if error.errno == errno.EACCES:
            remedy = "let this user into the folder, or connect by TCP"
        return f"{target} does not answer ({error.strerror})", remedy
    if isinstance(error, TimeoutError):
        text = f"{target} does not answer within {timeout_s:g} s"
        return text, "a firewall drops it, or the machine is down: open the port from here to there"
    if error.errno == errno.ECONNREFUSED:
        remedy = (
            "start the server; set listen_addresses in its postgresql.conf and restart it; is the "
            "port right?"
        )
        return f"{target} refuses: nothing listens there", remedy
    if error.errno in {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}:
        remedy = "put both machines in one network, or route between theirs"
        return f"there is no way to {target} ({error.strerror})", remedy
    return f"{target} does not answer ({error.strerror})", "see the network between here and there"


def offers_tls(target: reach.Target, timeout_s: float) -> bool | None:
    """Whether the server offers TLS; None where no PostgreSQL answered. Raises `Silent`."""
    try:
        with _connected(target, timeout_s) as sock:
            sock.settimeout(timeout_s)
            sock.sendall(_ASK_TLS)
            said = sock.recv(1)
    except TimeoutError:
        raise Silent from None
    except OSError:
        return None
    return {b"S": True, b"N": False}.get(said)
