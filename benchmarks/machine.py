"""Describe the machine of the measurement, without its host name and paths."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import psycopg


def cpu_model() -> str:
    """Return the processor's name, or its architecture if the kernel has no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def load() -> str:
    """Return how many processes were runnable during the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def describe(conn: psycopg.Connection[Any], server: str) -> dict[str, str]:
    """Return machine, server and client as text."""
    settings = dict(
        conn.execute(
            "SELECT name, current_setting(name) FROM pg_settings WHERE name IN"
            " ('server_version', 'fsync', 'synchronous_commit', 'full_page_writes',"
            " 'shared_buffers', 'wal_level')"
        ).fetchall()
    )
    names = sorted(settings.keys() - {"server_version"})
    durable = ", ".join(f"{name} {settings[name]}" for name in names)
    return {
        "CPU": f"{cpu_model()}, {os.cpu_count()} cores",
        "kernel": f"{platform.system()} {platform.release()}",
        "PostgreSQL": f"{settings['server_version']} ({server}; {durable})",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
