"""The pool of connections while its server is away."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from queue_workflows import db

ATTEMPTS = 6


def test_a_pool_tries_again_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts whose distance doubles would take 31 s."""
    with socket.create_server(("127.0.0.1", 0)) as away:
        away.settimeout(30)
        port = away.getsockname()[1]
        url = f"postgresql://nobody@127.0.0.1:{port}/x?sslmode=disable&gssencmode=disable"
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", url)

        def work() -> None:
            with contextlib.suppress(db.OperationalError), db.statement() as conn:
                conn.execute("SELECT 1")

        caller = threading.Thread(target=work)
        caller.start()
        try:
            times: list[float] = []
            while len(times) < ATTEMPTS:
                conn, _ = away.accept()
                conn.close()
                times.append(time.monotonic())
            assert times[-1] - times[0] < 20
        finally:
            db.close_pool()
            caller.join()
