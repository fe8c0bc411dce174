"""Make ids of worker processes, unique across processes and boots, and find UUIDs."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9_.\-]+")
_MAX_LABEL = 80
"""The most characters of a label in a worker id; with the other parts it has 116 of 120."""
_EXECUTORS = "ex-"
"""The last part of the id of a worker with executors begins with this."""
_UUID = "00000000-0000-0000-0000-000000000000"
_UUID_FORM = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of the kernel, or a digest of the host name if there is none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:32]


@functools.cache
def machine() -> str:
    """Return eight hex digits of this boot and pid namespace.

    Containers of one machine share the boot id.
    """
    try:
        namespace = _PID_NAMESPACE.stat().st_ino
    except OSError:
        namespace = 0
    return hashlib.sha256(f"{boot_id()}:{namespace}".encode()).hexdigest()[:8]


def process_exists(pid: int) -> bool:
    """Return whether this machine has a process with this pid, of any user.

    The pid may have been reused. Processes of other pid namespaces are not seen.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def process_prefix(host_label: str, pid: int) -> str:
    """Return `label:pid:machine:`, the prefix of every worker id of that process and of no other.

    Characters of the label outside `A-Z a-z 0-9 _ . -` become `-`. It is cut at 80 characters; an
    empty label becomes `host`.
    """
    label = _NOT_IN_LABEL.sub("-", host_label)[:_MAX_LABEL] or "host"
    return f"{label}:{pid}:{machine()}:"


def new_worker_id(host_label: str, *, executors: bool = False) -> str:
    """Return `label:pid:machine:random`, at most 120 characters, different on every call.

    `executors` is whether its handlers run in other processes; `has_executors` reads that.
    """
    kind = _EXECUTORS if executors else ""
    return f"{process_prefix(host_label, os.getpid())}{kind}{secrets.token_hex(6)}"


def has_executors(worker_id: str) -> bool:
    """Return whether the handlers of this worker's jobs run in other processes than its own."""
    return worker_id.rpartition(":")[2].startswith(_EXECUTORS)


def uuid_range(prefix: str) -> tuple[str, str] | None:
    """Return the first and the last UUID that begin with the prefix; None if no UUID does.

    All UUIDs have the same form, so every collation sorts them alike, and an index finds them.
    """
    low, high = prefix + _UUID[len(prefix) :], prefix + _UUID.replace("0", "f")[len(prefix) :]
    return (low, high) if _UUID_FORM.fullmatch(low) else None
