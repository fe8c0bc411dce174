"""The HTTP service while its database is frozen, restarted or away."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from queue_workflows import jobs
from tests.soak import server as soak_server
from tests.support import http_service, proxy
from tests.support.commands import Commands, commands
from tests.support.wait import patience, until

TRIGGER = "/api/v1/jobs/trigger"
TIMEOUT_S = 2.0


def test_health_is_quick_and_others_fail_clean_while_the_database_is_frozen(
    cli: Commands, dsn: str
) -> None:
    with proxy.Proxy(dsn) as front:
        env = {"QUEUE_WORKFLOWS_DB_URL": front.dsn, "APP_REQUEST_TIMEOUT_SEC": str(TIMEOUT_S)}
        with http_service.served(cli, workers="", **env) as service:
            body = {"queue": "load.a", "task": "load.chunks", "lock_key": "k"}
            until(lambda: service.post(TRIGGER, body).status_code == 200)
            front.freeze()
            replies: list[int] = []

            def ask() -> None:
                replies.append(service.post(TRIGGER, body).status_code)

            askers = [threading.Thread(target=ask) for _ in range(20)]
            began = time.monotonic()
            for asker in askers:
                asker.start()
            http_service.assert_health_is_quick(service)
            assert service.get("/status").status_code == 200
            assert service.get("/ready").status_code == 503
            for asker in askers:
                asker.join(30)
            assert replies == [503] * 20
            assert time.monotonic() - began < patience(15)
            front.thaw()
            until(lambda: service.get("/ready").status_code == 200)
            until(lambda: service.post(TRIGGER, body).status_code == 200)


class Load:
    """Clients that trigger jobs as fast as they can, and remember what was acknowledged."""

    def __init__(self, service: http_service.Service) -> None:
        self._service = service
        self._over = threading.Event()
        self.acknowledged: dict[str, str] = {}
        self.statuses = Counter[int]()
        self.longest_s = 0.0
        self.threads = [threading.Thread(target=self._run, args=(n,)) for n in range(3)]

    def _run(self, client: int) -> None:
        headers = {"authorization": f"Bearer {http_service.TOKEN}"}
        with httpx.Client(base_url=self._service.url, headers=headers, timeout=30) as own:
            number = 0
            while not self._over.is_set():
                number += 1
                key = f"{client}-{number}"
                body = {
                    "queue": "load.a", "task": "load.chunks", "args": {"n": 1},
                    "lock_key": key, "idempotency_key": key,
                }  # fmt: skip
                while not self._over.is_set() and not self._send(own, key, body):
                    self._over.wait(0.1)

    def _send(self, own: httpx.Client, key: str, body: dict[str, Any]) -> bool:
        began = time.monotonic()
        reply = own.post(TRIGGER, json=body)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.statuses[reply.status_code] += 1
        if reply.status_code == 200:
            self.acknowledged[key] = reply.json()["job_id"]
        return reply.status_code == 200

    def stop(self) -> None:
        self._over.set()
        for thread in self.threads:
            thread.join(40)


@pytest.mark.timeout(240)
def test_a_restart_of_the_database_under_load_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with soak_server.throw_away() as server, commands(QUEUE_WORKFLOWS_DB_URL=server.dsn) as cli:
        monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", server.dsn)
        from queue_workflows import db

        with http_service.served(cli, APP_REQUEST_TIMEOUT_SEC="5") as service:
            load = Load(service)
            for thread in load.threads:
                thread.start()
            for _ in range(2):
                before = len(load.acknowledged)
                until(lambda: len(load.acknowledged) > before + 20, timeout_s=60)  # noqa: B023
                server.restart()
            before = len(load.acknowledged)
            until(lambda: len(load.acknowledged) > before + 20, timeout_s=60)
            load.stop()
            assert set(load.statuses) <= {200, 503}, load.statuses
            assert load.longest_s < patience(8)
            until(lambda: service.get("/ready").status_code == 200)
            rows = {row["id"]: row for row in jobs.list(limit=None)}
            by_key = {row["idempotency_key"]: job_id for job_id, row in rows.items()}
            assert {key: by_key.get(key) for key in load.acknowledged} == load.acknowledged

            def all_succeeded() -> bool:
                left = [row for row in jobs.list(limit=None) if row["status"] != "completed"]
                assert not [row for row in left if row["status"] == "failed"]
                return not left

            until(all_succeeded, timeout_s=90)
        db.close_pool()
