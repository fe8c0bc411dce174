"""Start `queue-workflows serve` as a process, and speak HTTP to it."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx

from tests.support.commands import ROOT, Command, Commands
from tests.support.wait import until

APP = "tests.support.etl_app:setup"
TOKEN = "a-token-of-the-tests-0123456789"
POOL = '[{"queue": "load.a", "concurrency": 2}, {"queue": "load.b", "concurrency": 1}]'
_ADDRESS = re.compile(r"(?:serving .*|running) on (http://[^\s\"]+)")
_MOUNTED = """\
import fastapi

from queue_workflows import service

queue_api = service.app(token={token!r}, workers_json={workers!r})
app = fastapi.FastAPI(lifespan=queue_api.router.lifespan_context)
app.mount("/queue", queue_api)
"""


def bearer(token: str) -> dict[str, str]:
    """Return the header of a request that has this token."""
    return {"authorization": f"Bearer {token}"}


def assert_health_is_quick(service: Service) -> None:
    """Four of five answers take hardly longer than refusals at the same time, which ask nothing."""
    took: dict[str, list[float]] = {"/health": [], "/api/v1/jobs": []}
    with httpx.Client(base_url=service.url, timeout=10) as client:
        client.get("/health")
        for _ in range(50):
            for path, times in took.items():
                began = time.perf_counter()
                reply = client.get(path)
                times.append(time.perf_counter() - began)
                assert reply.status_code == (200 if path == "/health" else 401)
    health_s, refusal_s = (statistics.quantiles(times, n=5)[3] for times in took.values())
    assert health_s < 3 * refusal_s + 0.02


class Service:
    """A running service, and a client that has its token."""

    def __init__(self, command: Command, url: str) -> None:
        self.command = command
        self.url = url
        self.client = httpx.Client(
            base_url=url,
            headers=bearer(TOKEN),
            timeout=30,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.client.get(path, **more)

    def post(self, path: str, content: Any = None, **more: Any) -> httpx.Response:
        return self.client.post(path, **({} if content is None else {"json": content}), **more)

    def trigger(self, task: str = "load.chunks", **more: Any) -> dict[str, Any]:
        body = {"queue": "load.a", "task": task, "lock_key": "k", **more}
        reply = self.post("/api/v1/jobs/trigger", body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def status(self, job_id: str, **more: Any) -> dict[str, Any]:
        reply = self.get(f"/api/v1/jobs/{job_id}/status", **more)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def ended(self, job_id: str) -> dict[str, Any]:
        """Wait by long polls until a job is over; return its status."""

        def over() -> dict[str, Any] | None:
            found = self.status(job_id, params={"wait": 5})
            return found if found["status"] in ("succeeded", "failed", "canceled") else None

        return until(over, timeout_s=60)

    def events(self, job_id: str) -> list[str]:
        return [each["event_type"] for each in self.history(job_id)]

    def history(self, job_id: str) -> list[dict[str, Any]]:
        return self.get(f"/api/v1/jobs/{job_id}/events").json()["events"]


@contextlib.contextmanager
def served(
    cli: Commands,
    *options: str,
    app: str = APP,
    workers: str = POOL,
    ready: bool = True,
    cwd: Path = ROOT,
    **env: str,
) -> Generator[Service]:
    """Yield a service on a free port, which is ready; stop it at the end."""
    chosen = {"QUEUE_WORKFLOWS_TOKEN": TOKEN, "WORKERS_JSON": workers, **env}
    argv = ("queue-workflows", "serve", "--port", "0", "--app", app, *options)
    with _served(cli.start(*argv, cwd=cwd, **chosen), "", ready) as own:
        yield own


@contextlib.contextmanager
def mounted(cli: Commands, folder: Path, *, workers: str = POOL, **env: str) -> Generator[Service]:
    """Yield the service below /queue of an application that uvicorn serves (docs/http-mount.md).

    `folder` gets the module of the application.
    """
    (folder / "asgi.py").write_text(_MOUNTED.format(token=TOKEN, workers=workers))
    argv = ("uvicorn", "asgi:app", "--port", "0", "--app-dir", str(folder))
    with _served(cli.start(*argv, QUEUE_WORKFLOWS_APP=APP, **env), "/queue", True) as own:
        yield own


@contextlib.contextmanager
def _served(command: Command, mount: str, ready: bool) -> Generator[Service]:
    def address() -> re.Match[str] | None:
        assert command.process.poll() is None, command.err
        return _ADDRESS.search(command.err)

    own = Service(command, until(address, timeout_s=90)[1] + mount)
    try:
        if ready:
            until(lambda: own.get("/ready").status_code == 200, timeout_s=90)
        yield own
    finally:
        own.client.close()
