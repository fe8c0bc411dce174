"""What a token of each scope may do, on every route, and what one of `look` sees."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any

import pytest

from queue_workflows import db
from tests.support import commands, factories, http_service, tabled
from tests.support.http_service import bearer

SCOPES = ("look", "read", "submit", "operate")
TOKENS = {scope: scope[0] * 20 for scope in SCOPES} | {"operate": http_service.TOKEN}
SECRET = "secret-5f2c"
"""A value that no token of `look` may see."""
NEEDED = {
    "look": """
        GET /metrics
        GET /api/v1/events
        GET /api/v1/jobs
        GET /api/v1/jobs/{job_id}
        GET /api/v1/jobs/{job_id}/events
        GET /api/v1/jobs/{job_id}/status
        GET /api/v1/queues
        GET /api/v1/queues/{queue}
        GET /api/v1/runs
        GET /api/v1/runs/{run_id}
        GET /api/v1/runs/{run_id}/nodes
        GET /api/v1/schedules
        GET /api/v1/schedules/{name}/preview
        GET /api/v1/workers
    """,
    "read": """
        GET /api/v1/acts
        GET /api/v1/jobs/{job_id}/parts
        GET /api/v1/jobs/{job_id}/stream
        GET /api/v1/jobs/{job_id}/why
        GET /api/v1/runs/{run_id}/nodes/{node_id}/parts
        GET /api/v1/runs/{run_id}/nodes/{node_id}/stream
        GET /api/v1/runs/{run_id}/why
    """,
    "submit": """
        POST /api/v1/jobs/cancel
        POST /api/v1/jobs/retry
        POST /api/v1/jobs/trigger
        POST /api/v1/jobs/{job_id}/cancel
        POST /api/v1/jobs/{job_id}/retry
        POST /api/v1/runs
        POST /api/v1/runs/cancel
        POST /api/v1/runs/retry
        POST /api/v1/runs/{run_id}/cancel
        POST /api/v1/runs/{run_id}/nodes/{node_id}/answer
        POST /api/v1/runs/{run_id}/retry
    """,
    "operate": """
        POST /api/v1/queues/{queue}/limits
        POST /api/v1/queues/{queue}/pause
        POST /api/v1/queues/{queue}/resume
        POST /api/v1/schedules/{name}/pause
        POST /api/v1/schedules/{name}/resume
        POST /api/v1/schedules/{name}/run
        POST /api/v1/workers/{host}/{queue}/drain
        POST /api/v1/workers/{host}/{queue}/off
        POST /api/v1/workers/{host}/{queue}/on
    """,
}
PUBLIC = {"GET /health", "GET /ready", "GET /status"}
"""The routes that need no token, and the least scope of the others."""


@pytest.fixture(scope="module")
def service(modules_database: str) -> Generator[http_service.Service]:
    """A service without workers, with a token of each scope."""
    env: Any = {f"QUEUE_WORKFLOWS_TOKEN_{scope.upper()}": TOKENS[scope] for scope in SCOPES[:-1]}
    with (
        commands.commands(QUEUE_WORKFLOWS_DB_URL=modules_database) as cli,
        http_service.served(cli, workers="", **env) as made,
    ):
        yield made


def status(service: http_service.Service, scope: str, method: str, path: str) -> int:
    """The status of a response, which may stay open; without a scope there is no token."""
    headers = bearer(TOKENS[scope]) if scope else {"authorization": ""}
    with service.client.stream(method, path, headers=headers) as reply:
        return reply.status_code


def test_every_route_needs_its_scope(service: http_service.Service) -> None:
    paths = service.get("/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path, each in paths.items() for method in each}
    named = {
        route: scope for scope, text in NEEDED.items() for route in re.findall(r"\S+ \S+", text)
    }
    assert routes == {*named, *PUBLIC}
    for route, least in named.items():
        method, path = re.sub(r"\{\w+\}", "nothing", route).split()
        assert status(service, "", method, path) == 401, route
        for scope in SCOPES:
            with tabled.case(route, scope):
                is_allowed = SCOPES.index(scope) >= SCOPES.index(least)
                found = status(service, scope, method, path)
                assert (found != 403, found != 401) == (is_allowed, True)
    every = ("", *SCOPES)
    assert {status(service, one, *route.split()) for one in every for route in PUBLIC} == {200}
    found = [status(service, one, "GET", "/openapi.json") for one in every]
    assert found == [401, 403, 200, 200, 200]


@pytest.mark.parametrize("query", ["q=x", "key=x", "%71=x", "limit=1&q=x", "unknown=x"])
def test_a_search_would_show_values_by_guesses(service: http_service.Service, query: str) -> None:
    path = f"/api/v1/jobs?{query}"
    assert [status(service, scope, "GET", path) for scope in SCOPES[:2]] == [403, 200]
    assert status(service, "look", "GET", "/api/v1/jobs?queue=fetch&status=failed&limit=1") == 200


def planted(dsn: str) -> tuple[str, str]:
    """Store a job and a run whose every value is the secret; return their ids."""
    value: dict[str, Any] = {"id": SECRET, "status": SECRET, "x_at": [SECRET], SECRET: 1}
    with db.connect(url=dsn) as conn:
        job = factories.ingest(
            conn, args=value, result=value, error=SECRET, reason=SECRET, lock_key=SECRET,
            partition_key=SECRET, idempotency_key=SECRET, headers={"a": SECRET}, progress=value,
        )["id"]  # fmt: skip
        run = factories.run(conn, error=SECRET, context=value, out_dir=f"/{SECRET}")
        node = factories.node(
            conn, run, inputs=value, resolved_inputs=value, context_delta=value, error=SECRET,
            input_spec=value, progress=value,
        )["id"]  # fmt: skip
        ended = {"claim_no": 1, "worker_id": "w:1:x", "error": SECRET, "detail": value}
        ended["detail"] = {"traceback": SECRET, "used": {"ram_mb": 7, "secret": SECRET}}
        for kind in ("claimed", "failed"):
            factories.insert(
                conn, "ingest_job_events", job_id=job, event_type=kind, actor=SECRET, **ended
            )
            factories.insert(
                conn, "workflow_node_events", run_id=run, node_id="n", job_id=node,
                event_type=kind, **ended,
            )  # fmt: skip
        for table, job_id in (("ingest_jobs", job), ("workflow_node_jobs", node)):
            factories.insert(
                conn, "job_attempt_logs", job_table=table, job_id=job_id, claim_no=1, head=SECRET
            )
        factories.insert(
            conn, "schedules", name="planted", expression="0 0 * * *", task_name="t", queue="fetch",
            args=value, error=SECRET, paused=True,
        )  # fmt: skip
        factories.insert(
            conn, "worker_controls", host_label="box", queue="cpu", desired_state="off",
            requested_by=SECRET, reason=SECRET,
        )  # fmt: skip
    return job, run


def first_events(service: http_service.Service, scope: str) -> str:
    """The events of jobs and runs of the last hour, up to the run of `planted`."""
    headers = bearer(TOKENS[scope]) | {"last-event-id": "1700000000000000-i1"}
    found: list[str] = []
    with service.client.stream("GET", "/api/v1/events", headers=headers) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        for line in lines:
            found.append(line)
            if line == "event: run":
                found.append(next(lines))
                break
    return "\n".join(found)


def test_states_and_times_without_values(
    service: http_service.Service, modules_database: str
) -> None:
    job, run = planted(modules_database)
    hides = {
        "/api/v1/jobs": True, f"/api/v1/jobs/{job}": True, f"/api/v1/jobs/{job}/events": True,
        f"/api/v1/jobs/{job}/status": True, "/api/v1/runs": True, f"/api/v1/runs/{run}": True,
        f"/api/v1/runs/{run}/nodes": True, "/api/v1/schedules": True, "/api/v1/workers": True,
        "/api/v1/queues": False, "/api/v1/queues/fetch": False, "/metrics": False,
        "/api/v1/schedules/planted/preview": False,
    }  # fmt: skip
    for path, has_values in hides.items():
        with tabled.case(path):
            seen, read = (service.get(path, headers=bearer(TOKENS[s])) for s in SCOPES[:2])
            assert (seen.status_code, SECRET in seen.text) == (200, False), seen.text
            assert (read.status_code, SECRET in read.text) == (200, has_values), read.text
            if path != "/metrics":
                assert seen.json().keys() == read.json().keys()
    tags = [
        service.get(f"/api/v1/jobs/{job}/status", headers=bearer(TOKENS[s])).headers["etag"]
        for s in SCOPES[:2]
    ]
    assert tags[0] != tags[1], "a tag of the values would tell them to who can guess"
    attempt = service.get(f"/api/v1/jobs/{job}", headers=bearer(TOKENS["look"])).json()["attempts"][
        0
    ]
    assert (attempt["outcome"], attempt["used"]) == ("failed", {"ram_mb": 7, "secret": None})
    assert attempt["claimed_at"] and (attempt["error"], attempt["log"]) == (None, None)
    listed = service.get("/api/v1/runs", headers=bearer(TOKENS["look"])).json()["items"]
    (mine,) = [each for each in listed if each["id"] == run]
    assert (mine["status"], mine["nodes"]) == ("running", {"queued": 1}) and mine["created_at"]
    texts = [first_events(service, scope) for scope in SCOPES[:2]]
    assert [SECRET in text for text in texts] == [False, True]
    data = [json.loads(line[6:]) for line in texts[0].splitlines() if line.startswith("data: ")]
    assert {"claimed", "failed"} <= {each.get("event_type") for each in data}
