"""Start PgBouncer in transaction mode before the test database, as Debian packages it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo

from tests.support import proxy, reaper, tcp_server
from tests.support.wait import until

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
SETTINGS = """\
[databases]
* = {server}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
auth_file =
pool_mode = transaction
default_pool_size = {servers}
max_client_conn = 200
query_wait_timeout = 60
server_login_retry = 1
logfile = {folder}/log
pidfile =
"""


class Pooler:
    """A running pooler; `dsn` leads through it to the database of the DSN that it was given."""

    def __init__(self, folder: Path, dsn: str, servers: int) -> None:
        assert PROGRAM is not None
        parts: dict[str, Any] = dict(conninfo.conninfo_to_dict(dsn))
        self.port = tcp_server.free_port()
        self._folder = folder
        user = parts.get("user") or pwd.getpwuid(os.geteuid()).pw_name
        wanted = {"host": parts["host"], "port": parts["port"], "user": user}
        if password := parts.get("password"):
            wanted["password"] = f"'{password}'"
        server = " ".join(f"{name}={value}" for name, value in wanted.items())
        text = SETTINGS.format(server=server, port=self.port, servers=servers, folder=folder)
        (folder / "pgbouncer.ini").write_text(text)
        more: dict[str, Any] = {}
        if os.geteuid() == 0:  # it refuses to run as root
            nobody = pwd.getpwnam("nobody")
            more = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            for path in (folder, folder / "pgbouncer.ini"):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        self._process = subprocess.Popen(
            [PROGRAM, "-q", str(folder / "pgbouncer.ini")],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=tcp_server.end_with_parent,
            **more,
        )
        self.dsn = f"postgresql://{user}@127.0.0.1:{self.port}/{parts['dbname']}"
        try:
            until(self._is_up, timeout_s=30)
        except BaseException:
            self.close()
            raise

    def _is_up(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            psycopg.connect(self.dsn).close()
        except psycopg.OperationalError:
            return False
        return True

    def close(self) -> None:
        """Stop it, and disconnect every client."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


@contextmanager
def pooler(dsn: str, *, servers: int = 2) -> Generator[Pooler]:
    """Yield a pooler with so many connections to the server of a DSN."""
    folder = Path(tempfile.mkdtemp(prefix="qw-pooler-"))
    reaper.own(folder)
    try:
        # The server may know a client of its socket by the account, which the pooler does not have.
        with proxy.Proxy(dsn) as wire:
            made = Pooler(folder, wire.dsn, servers)
            try:
                yield made
            finally:
                made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
