"""Who a worker process is: an identity that no other process, and no later boot, has."""

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
"""With pid (10), machine (8), random (12) and three colons: 113 of the 120 characters allowed."""


@functools.cache
def boot_id() -> str:
    """This boot of the machine's kernel; where it tells none, a digest of the host's name."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:32]


@functools.cache
def machine() -> str:
    """Eight hex digits of this boot and pid namespace: containers of one host share the boot id."""
    try:
        namespace = _PID_NAMESPACE.stat().st_ino
    except OSError:
        namespace = 0
    return hashlib.sha256(f"{boot_id()}:{namespace}".encode()).hexdigest()[:8]


def process_prefix(host_label: str, pid: int) -> str:
    """`label:pid:machine:`, with which every worker id of that process starts, and no other's.

    Characters of the label outside `A-Z a-z 0-9 _ . -` become `-`; it is cut at 80, or `host`.
    """
    label = _NOT_IN_LABEL.sub("-", host_label)[:_MAX_LABEL] or "host"
    return f"{label}:{pid}:{machine()}:"


def new_worker_id(host_label: str) -> str:
    """`label:pid:machine:random`, at most 120 characters, new on every call."""
    return process_prefix(host_label, os.getpid()) + secrets.token_hex(6)
