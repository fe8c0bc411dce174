"""Start a throw-away PostgreSQL that listens on TCP and requires a password (scram)."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from queue_workflows import embedded
from tests.support import database, embedded_servers, reaper
from tests.support.wait import until

RULES = """\
local all all trust
host {databases} all 0.0.0.0/0 scram-sha-256
"""
"""No other database may be reached from another address than the socket's."""


class Server:
    """A running server; `admin` is its superuser's DSN, over the unix socket."""

    def __init__(self, folder: Path, program: Path, databases: str) -> None:
        self._folder = folder
        self.port = free_port()
        (folder / "net_hba.conf").write_text(RULES.format(databases=databases))
        (folder / "net_hba.conf").chmod(0o644)
        owner = (folder / "data").stat()
        settings = {
            "listen_addresses": "0.0.0.0", "port": self.port, "fsync": "off",
            "hba_file": folder / "net_hba.conf", "unix_socket_directories": folder / "data",
            "password_encryption": "scram-sha-256", "max_connections": 60,
        }  # fmt: skip
        more: dict[str, Any] = {}
        if owner.st_uid != os.geteuid():
            more = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        with (folder / "net.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(program),
                    *("-D", str(folder / "data")),
                    *(f"--{name}={value}" for name, value in settings.items()),
                ],
                cwd="/",
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
                **more,
            )
        self.admin = f"postgresql://postgres@/postgres?host={folder}/data&port={self.port}"
        try:
            until(self._is_up, timeout_s=60)
        except BaseException:
            self.close()
            raise

    def _is_up(self) -> bool:
        assert self._process.poll() is None, (self._folder / "net.log").read_text()
        try:
            psycopg.connect(self.admin).close()
        except psycopg.OperationalError:
            return False
        return True

    def dsn(self, user: str, password: str, name: str, host: str = "127.0.0.1") -> str:
        """Return a DSN as an app writes it."""
        return f"postgresql://{user}:{password}@{host}:{self.port}/{name}"

    def sql(self, *statements: str, name: str = "postgres") -> None:
        """Execute SQL as its superuser."""
        parts: Mapping[str, Any] = psycopg.conninfo.conninfo_to_dict(self.admin)
        with psycopg.connect(**{**parts, "dbname": name}, autocommit=True) as conn:
            for statement in statements:
                conn.execute(statement.encode())

    def close(self) -> None:
        """Stop it, and disconnect every client."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)


def end_with_parent() -> None:
    """Make the kernel end this process with its parent (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextmanager
def server(databases: str) -> Generator[Server]:
    """Yield a server in a folder of its own; `databases`: those that its rules allow."""
    base = Path(tempfile.mkdtemp(prefix="qw-net-"))
    reaper.own(base)
    base.chmod(0o711)  # as root the server runs under another account, which has to pass
    folder = base / "pg18"
    try:
        quick = {"fsync": "off", "full_page_writes": "off"}
        with (
            database.environment(QUEUE_WORKFLOWS_EMBEDDED_DIR=str(folder)),
            embedded.ensure(settings=quick),
        ):
            program = Path(f"/proc/{embedded_servers.running(folder).pid}/exe").readlink()
        made = Server(folder, program, databases)
        try:
            yield made
        finally:
            made.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)
