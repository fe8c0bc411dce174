"""The ETL job service: the endpoints of its guide, by a running service that works alone."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import config, db, jobs
from tests.support import commands, http_service, invariants, tabled
from tests.support.commands import Commands
from tests.support.wait import patience, until

TRIGGER = "/api/v1/jobs/trigger"


# --- the table of endpoints, in the words of the guide -------------------------------------------


def test_the_endpoint_table(service: http_service.Service, tmp_path: Path) -> None:
    body = {
        "queue": "load.a",
        "task": "load.chunks",
        "args": {"folder": str(tmp_path)},
        "idempotency_key": "one",
        "lock_key": "rates",
        "partition_key": "eur",
        "priority": 50,
        "available_at": "2026-01-01T00:00:00+00:00",
    }
    reply = service.post(TRIGGER, body)
    assert reply.status_code == 200
    assert sorted(reply.json()) == ["job_id", "status"]
    assert reply.json()["status"] == "queued"
    job_id = reply.json()["job_id"]
    until(lambda: (tmp_path / f"started-{job_id}").exists())
    shown = service.status(job_id)
    assert sorted(shown) == [
        "attempt", "error", "finished_at", "heartbeat_at", "job_id", "progress", "started_at",
        "status",
    ]  # fmt: skip
    assert (shown["job_id"], shown["status"], shown["attempt"]) == (job_id, "running", 1)
    assert shown["started_at"] and shown["heartbeat_at"] and shown["finished_at"] is None
    again = service.post(TRIGGER, body)
    assert again.json() == {"job_id": job_id, "status": "running"}
    canceled = service.post(f"/api/v1/jobs/{job_id}/cancel")
    assert canceled.status_code == 200 and sorted(canceled.json()) == sorted(shown)
    over = service.ended(job_id)
    assert (over["status"], bool(over["finished_at"])) == ("canceled", True)
    health = service.get("/health", headers={"authorization": ""})
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    status = service.get("/status", headers={"authorization": ""}).json()
    assert status["version"] == queue_workflows.__version__ and status["uptime_s"] > 0
    row = jobs.get(job_id, kind="ingest")
    assert row is not None
    assert (row["priority"], row["partition_key"], row["lock_key"]) == (50, "eur", "rates")
    assert row["max_attempts"] == 5


def test_a_pipeline_reports_progress_and_succeeds(service: http_service.Service) -> None:
    job_id = service.trigger(args={"n": 4})["job_id"]
    over = service.ended(job_id)
    assert (over["status"], over["attempt"], over["error"]) == ("succeeded", 1, None)
    assert service.events(job_id) == ["queued", "claimed", "completed"]


def test_pipelines_of_the_guide_run_unchanged_with_a_registry_that_imports_ours(
    cli: Commands, tmp_path: Path
) -> None:
    """The registry module of the app has one line; its pipelines and `load_all` are the guide's."""
    folder = tmp_path / "dataloader" / "workers" / "pipelines"
    folder.mkdir(parents=True)
    (folder / "registry.py").write_text(
        "from queue_workflows import register_ingest_task as register\n"
    )
    (folder / "__init__.py").write_text("def load_all() -> None:\n    from . import my_task\n")
    (folder / "my_task.py").write_text(
        "from dataloader.workers.pipelines.registry import register\n"
        '@register("my.task")\n'
        "async def my_pipeline(args: dict):\n"
        "    # Process chunk 1\n"
        "    yield # Allow heartbeat & cancellation check\n"
        "    # Process chunk 2\n"
        "    yield\n"
        "    # Process chunk 3\n"
    )
    with http_service.served(
        cli,
        app="dataloader.workers.pipelines:load_all",
        workers='[{"queue":"myqueue","concurrency":1}]',
        cwd=tmp_path,
    ) as service:
        job_id = service.trigger("my.task", queue="myqueue")["job_id"]
        assert service.ended(job_id)["status"] == "succeeded"


def test_an_error_is_tried_again_up_to_max_attempts(service: http_service.Service) -> None:
    good = service.trigger("load.flaky", args={"good": 3}, lock_key="a")["job_id"]
    bad = service.trigger("load.flaky", args={"good": 9}, lock_key="b", max_attempts=2)["job_id"]
    assert service.ended(good)["status"] == "succeeded"
    assert service.status(good)["attempt"] == 3
    assert service.events(good).count("retried") == 2
    over = service.ended(bad)
    assert (over["status"], over["attempt"]) == ("failed", 2)
    assert "attempt 2: the source is away" in over["error"]


def test_a_failure_that_is_logged_ends_succeeded_with_the_error_in_its_events(
    service: http_service.Service,
) -> None:
    job_id = service.trigger("load.bad_row", args={"row": 7})["job_id"]
    assert service.ended(job_id)["status"] == "succeeded"
    history = service.history(job_id)
    assert [each["event_type"] for each in history] == ["queued", "claimed", "error", "completed"]
    assert history[2]["error"] == "row 7 cannot be loaded, password=***"
    assert history[0]["actor"] == "http (operate token)"
    assert service.status(job_id)["error"] is None


def test_a_key_returns_its_job_for_as_long_as_the_job_exists(
    service: http_service.Service, own_database: Any
) -> None:
    first = service.trigger(idempotency_key="one", args={"n": 1})["job_id"]
    service.ended(first)
    # Two years ago, beyond every window.
    own_database.conn.execute(
        "UPDATE ingest_jobs SET created_at = now() - interval '700 days',"
        " idempotency_window_s = 1 WHERE id = %s",
        (first,),
    )
    assert service.trigger(idempotency_key="one", args={"n": 1}) == {
        "job_id": first,
        "status": "succeeded",
    }
    assert service.post(
        TRIGGER,
        {"queue": "load.a", "task": "load.chunks", "lock_key": "k", "args": {"n": 1}},
        headers={"idempotency-key": "one"},
    ).json()["job_id"] == first  # fmt: skip
    jobs.delete(first)
    assert service.trigger(idempotency_key="one", args={"n": 1})["job_id"] != first


def test_a_key_with_other_content_is_a_conflict_with_both(service: http_service.Service) -> None:
    first = service.trigger(idempotency_key="one", args={"n": 1})["job_id"]
    clash = service.post(
        TRIGGER,
        {"queue": "load.a", "task": "load.chunks", "lock_key": "k", "args": {"n": 2},
         "idempotency_key": "one"},
    )  # fmt: skip
    assert clash.status_code == 409
    problem = clash.json()
    assert (problem["existing"]["job_id"], problem["existing"]["args"]) == (first, {"n": 1})
    assert problem["requested"]["args"] == {"n": 2}
    assert problem["type"] == "urn:queue-workflows:idempotency-clash"
    assert clash.headers["content-type"] == "application/problem+json"


def test_a_trigger_that_cannot_be_queued_is_refused(shared: http_service.Service) -> None:
    cases: list[Any] = [
        ({"lock_key": None}, "lock_key"),
        ({"queue": "nowhere"}, "nowhere"),
        ({"task": "load.nothing"}, "load.nothing"),
        ({"priority": 40_000}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"available_at": "2026-01-01T00:00:00"}, "available_at"),
        ({"available_at": "soon"}, "available_at"),
        ({"args": [1]}, "args"),
        ({"args": {"x": "\x00"}}, "args"),
        ({"lock_key": "k" * 1001}, "lock_key"),
        ({"surprise": 1}, "surprise"),
    ]
    for change, named in cases:
        with tabled.case(change, named):
            body = {"queue": "load.a", "task": "load.chunks", "lock_key": "k", **change}
            body = {name: value for name, value in body.items() if value is not None}
            refused = shared.post(TRIGGER, body)
            assert refused.status_code == 422, refused.text
            assert named in refused.json()["detail"]


def test_jobs_of_a_lock_key_run_one_at_a_time_the_oldest_first(
    service: http_service.Service, tmp_path: Path
) -> None:
    ids = [
        service.trigger(args={"folder": str(tmp_path), "n": 1}, lock_key="one")["job_id"]
        for _ in range(3)
    ]
    until(lambda: (tmp_path / f"started-{ids[0]}").exists())
    assert [service.status(each)["status"] for each in ids] == ["running", "queued", "queued"]
    (tmp_path / "go").touch()
    over = [service.ended(each) for each in ids]
    assert [each["status"] for each in over] == ["succeeded"] * 3
    times = [(each["started_at"], each["finished_at"]) for each in over]
    assert times == sorted(times) and times[0][1] <= times[1][0] <= times[1][1] <= times[2][0]


def test_a_lapsed_lease_is_lost_then_queued_again_by_the_reaper(
    cli: Commands, db: ModuleType, own_database: Any
) -> None:
    options = {"DL_REAPER_PERIOD_SEC": "1"}
    with http_service.served(cli, workers='[{"queue": "load.b"}]', **options) as service:
        # A worker of queue load.a that is gone: nobody renews its claim.
        config.register_ingest_task("load.chunks", lambda args: None)
        config.configure(ingest_queues={"load.a", "load.b"})
        job_id = jobs.enqueue("load.chunks", queue="load.a", args={"n": 1}, max_attempts=3)
        own_database.conn.execute(
            "UPDATE ingest_jobs SET status = 'running', worker_id = 'gone:1:x',"
            " claimed_by = 'gone',"
            " claim_no = claim_no + 1, started_at = now(),"
            " lease_expires_at = now() - interval '1 s' WHERE id = %s",
            (job_id,),
        )
        seen: set[str] = set()

        def queued_again() -> bool:
            seen.add(service.status(job_id)["status"])
            return service.status(job_id)["status"] == "queued"

        until(queued_again)
        assert "lost" in seen or "reclaimed" in service.events(job_id)
        assert "reclaimed" in service.events(job_id)


def test_the_intervals_take_effect(cli: Commands, tmp_path: Path) -> None:
    options = {"DL_HEARTBEAT_SEC": "0.2", "DL_DEFAULT_LEASE_TTL_SEC": "7"}
    with http_service.served(cli, **options) as service:
        job_id = service.trigger(args={"folder": str(tmp_path)})["job_id"]
        until(lambda: (tmp_path / f"started-{job_id}").exists())
        first = service.status(job_id)["heartbeat_at"]
        began = time.monotonic()
        until(lambda: service.status(job_id)["heartbeat_at"] != first)
        assert time.monotonic() - began < patience(2.3), "a third of the lease"
        row = jobs.get(job_id, kind="ingest")
        assert row is not None and row["lease_expires_at"] is not None
        assert 5 < (row["lease_expires_at"] - row["heartbeat_at"]).total_seconds() < 8


def test_every_line_of_the_service_and_its_workers_is_json(cli: Commands) -> None:
    with http_service.served(cli, "--log-format", "json") as service:
        assert service.ended(service.trigger(args={"n": 1})["job_id"])["status"] == "succeeded"
        service.command.send(signal.SIGTERM)
        assert service.command.wait() == 0
        lines = [json.loads(line) for line in service.command.err.splitlines()]
    assert service.command.out == ""
    assert any(line["message"].endswith(f" on {service.url}") for line in lines)
    assert len({line["pid"] for line in lines}) >= 2
    (request,) = [line for line in lines if line["message"].startswith("POST ")]
    assert request["request_id"] and request["status"] == 200


def test_sigterm_stops_all_and_hands_the_running_job_back(
    service: http_service.Service, tmp_path: Path
) -> None:
    job_id = service.trigger(args={"folder": str(tmp_path)})["job_id"]
    until(lambda: (tmp_path / f"started-{job_id}").exists())
    began = time.monotonic()
    service.command.send(signal.SIGTERM)
    assert service.command.wait() == 0, service.command.err
    assert time.monotonic() - began < patience(14)
    until(lambda: not service.command.family())
    row = jobs.get(job_id, kind="ingest")
    assert row is not None
    assert (row["status"], row["attempts"], row["worker_id"]) == ("queued", 0, None)


def test_a_killed_worker_process_is_replaced_and_its_job_runs_again(
    service: http_service.Service, tmp_path: Path
) -> None:
    job_id = service.trigger(args={"folder": str(tmp_path)})["job_id"]
    until(lambda: (tmp_path / f"started-{job_id}").exists())
    (worker,) = service.command.pids("--workers")
    (tmp_path / "go").touch()
    os.kill(worker, signal.SIGKILL)
    assert service.ended(job_id)["status"] == "succeeded"


def test_the_invariants_hold(service: http_service.Service, conn: db.Connection) -> None:
    for number in range(5):
        service.ended(service.trigger(lock_key=f"k{number}", args={"n": 2})["job_id"])
    service.ended(service.trigger("load.bad_row")["job_id"])
    assert invariants.broken(conn, slack_s=5) == []


@pytest.fixture(scope="module")
def shared(modules_database: str) -> Generator[http_service.Service]:
    """A service for tests that change nothing."""
    with (
        commands.commands(QUEUE_WORKFLOWS_DB_URL=modules_database) as cli,
        http_service.served(cli, workers="", ready=False) as made,
    ):
        yield made


# --- what the OpenAPI document says --------------------------------------------------------------

Answer = tuple[str, int, str]


def answers(service: http_service.Service, method: str, path: str) -> Iterator[Answer]:
    """Send requests of each kind that an endpoint may refuse; yield what they get."""
    url = re.sub(r"\{\w+\}", "x", path)
    is_change = method != "GET"

    def sent(
        what: str,
        query: str = "",
        content: Any = b"{}",
        kind: str = "application/json",
        **more: Any,
    ) -> Answer:
        given = [("content-type", kind)] if is_change else []
        headers = [*given] + [(name.replace("_", "-"), text) for name, text in more.items()]
        body = {"content": content} if is_change else {}
        with service.client.stream(method, url + query, headers=headers, **body) as got:
            return what, got.status_code, got.headers.get("content-type", "")

    yield sent("usual")
    yield sent("no text", content=b"\xff")
    yield sent("no member", content=b'{"member": 1}')
    yield sent("wrong query", "?limit=x&wait=x&days=x&cursor=x&kind=x&since=x")
    yield sent("a NUL", "?x=%00")
    yield sent("a long URL", "?x=" + "y" * 5000)
    yield sent("long headers", x_long="y" * 17_000)
    yield sent("a header twice", last_event_id="1", LAST_EVENT_ID="1")
    yield sent("another host", host="elsewhere.example")
    yield sent("no JSON", kind="text/plain")
    yield sent("too large", content=b" " * 3_000_000)
    yield sent("another key", idempotency_key=b"\xff")
    yield sent("too far back", last_event_id="1-i1")
    yield sent("another site", sec_fetch_site="cross-site")
    for token in ("", "Bearer x"):
        got = service.client.request(method, url, headers={"authorization": token})
        yield "no token", got.status_code, got.headers.get("content-type", "")


def test_every_endpoint_answers_only_what_its_document_says(cli: Commands) -> None:
    with http_service.served(cli, workers="") as service:
        document = service.get("/openapi.json").json()
        seen, unknown, count = set[int](), list[Any](), 0
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                count += 1
                said = operation["responses"]
                for what, status, kind in answers(service, method.upper(), path):
                    seen.add(status)
                    if str(status) not in said:
                        unknown.append((method, path, what, status))
                    elif status >= 400 and kind not in said[str(status)]["content"]:
                        unknown.append((method, path, what, status, kind))
        assert not unknown, unknown
        assert count > 30
        assert {200, 400, 401, 403, 404, 413, 414, 415, 421, 422, 431} <= seen


def test_the_document_has_what_repeated_requests_get_and_its_example_is_taken(
    cli: Commands,
) -> None:
    with http_service.served(cli, workers="") as service:
        document = service.get("/openapi.json").json()
        run = {"workflow": "doubled", "inputs": {"number": 1}, "idempotency_key": "one"}
        codes = [service.post("/api/v1/runs", run).status_code for _ in range(2)]
        assert codes == [201, 200]
        assert {"200", "201"} <= document["paths"]["/api/v1/runs"]["post"]["responses"].keys()
        example = document["components"]["schemas"]["Trigger"]["example"]
        job_id = service.post(TRIGGER, example).json()["job_id"]
        for url in (f"/api/v1/jobs/{job_id}", f"/api/v1/jobs/{job_id}/status"):
            same = service.get(url, headers={"if-none-match": service.get(url).headers["etag"]})
            path = url.replace(job_id, "{job_id}")
            assert str(same.status_code) == "304" in document["paths"][path]["get"]["responses"]


def test_a_hundred_thousand_unknown_members_are_one_fault(cli: Commands) -> None:
    with http_service.served(cli, workers="") as service:
        for path in (TRIGGER, "/api/v1/runs", "/api/v1/queues/load.a/pause"):
            refused = service.post(path, {f"m{n}": 1 for n in range(100_000)})
            assert refused.status_code == 422
            assert "unknown members: 'm0', 'm1', 'm2' and 99997 more" in refused.json()["detail"]


# --- in an outage --------------------------------------------------------------------------------


def test_nothing_waits_for_a_frozen_database_longer_than_its_time(cli: Commands, wire: Any) -> None:
    env = {"QUEUE_WORKFLOWS_DB_URL": wire.dsn, "APP_REQUEST_TIMEOUT_SEC": "1"}
    with http_service.served(cli, workers="", **env) as service:
        job = f"/api/v1/jobs/{service.trigger()['job_id']}"
        body = {"queue": "load.a", "task": "load.chunks", "lock_key": "k"}
        wire.freeze()
        try:
            for path, more, limit in (
                (f"{job}/status?wait=1", {}, "2 s"),
                (f"{job}/stream", {}, "1 s"),
                ("/api/v1/events", {"headers": {"last-event-id": "1-i1"}}, "1 s"),
                ("/api/v1/jobs?wait=60", {}, "1 s"),
                (f"{TRIGGER}?wait=60", {"method": "POST", "json": body}, "1 s"),
            ):
                began = time.monotonic()
                request = {"method": "GET", "timeout": 90, **more}
                with service.client.stream(url=path, **request) as got:
                    assert got.status_code == 503, path
                    assert f"no result within {limit};" in json.loads(got.read())["detail"], path
                assert time.monotonic() - began < patience(20), path
        finally:
            wire.thaw()
