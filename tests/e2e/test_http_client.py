"""The client against a running service: the verbs, errors, waits, events, traces and logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest

from queue_workflows import client, db, errors
from queue_workflows.client import Client
from tests.support import http_service
from tests.support.commands import Commands
from tests.support.wait import until

JOB = {"queue": "load.a", "lock_key": "k"}
GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def own(service: http_service.Service) -> Generator[Client]:
    with Client(service.url, token=http_service.TOKEN) as made:
        yield made


def test_the_verbs_of_jobs(own: Client, tmp_path: Path) -> None:
    job_id = own.jobs.enqueue("load.chunks", args={"n": 2}, idempotency_key="one", **JOB)
    assert own.jobs.enqueue("load.chunks", args={"n": 2}, idempotency_key="one", **JOB) == job_id
    with pytest.raises(errors.IdempotencyClash) as clash:
        own.jobs.enqueue("load.chunks", args={"n": 3}, idempotency_key="one", **JOB)
    assert clash.value.job_id == job_id
    assert own.jobs.wait(job_id, timeout_s=60.0)["status"] == "succeeded"
    shown = own.jobs.get(job_id)
    assert shown is not None and shown["attempts"][0]["outcome"] == "completed"
    assert [each["id"] for each in own.jobs.list(status="succeeded", queue="load.a")] == [job_id]
    assert own.jobs.list(since=timedelta(hours=1), key="one")[0]["id"] == job_id
    assert [each["event_type"] for each in own.jobs.events(job_id)][:2] == ["queued", "claimed"]
    with pytest.raises(errors.InvalidConfig):
        own.jobs.retry(job_id)

    running = own.jobs.enqueue("load.chunks", args={"folder": str(tmp_path)}, **JOB)
    until(lambda: (tmp_path / f"started-{running}").exists())
    behind = own.jobs.enqueue("load.chunks", **JOB)
    why = own.jobs.explain(behind)
    assert why is not None and why["clause"] == "locked"
    with pytest.raises(errors.WaitTimeout, match="is queued"):
        own.jobs.wait(behind, timeout_s=0.2)
    assert own.jobs.cancel(behind)["status"] == "canceled"
    own.jobs.cancel(running)
    assert own.jobs.wait(running, timeout_s=60.0)["status"] == "canceled"
    assert own.jobs.retry(behind)["status"] in ("queued", "running", "succeeded")


def test_errors_are_those_of_the_python_api(own: Client, service: http_service.Service) -> None:
    with pytest.raises(errors.UnknownTask):
        own.jobs.enqueue("no.such", **JOB)
    with pytest.raises(errors.UnknownQueue):
        own.jobs.enqueue("load.chunks", queue="none", lock_key="k")
    with pytest.raises(errors.RequestRefused):
        own.jobs.enqueue("load.chunks", queue="load.a", lock_key="")
    for call in (own.jobs.status, own.jobs.cancel, own.jobs.retry, own.runs.cancel, own.runs.nodes):
        with pytest.raises(errors.UnknownJob):
            call("no such \n\x1b")
    assert own.jobs.get("no such") is None
    assert own.runs.get("no such") is None
    assert own.jobs.explain("no such") is None
    with pytest.raises(errors.UnknownSchedule):
        own.schedules.pause("none")
    with pytest.raises(errors.UnknownQueue):
        own.queues.get("none")
    for token in ("wrong", ""):
        with Client(service.url, token=token) as other, pytest.raises(errors.AccessDenied):
            other.jobs.list()
    with (
        Client(service.url + "/other", token=http_service.TOKEN) as other,
        pytest.raises(errors.RequestRefused),
    ):
        other.jobs.get("x")


def test_the_verbs_of_runs(own: Client, cli: Commands) -> None:
    with pytest.raises(errors.UnknownWorkflow):
        own.runs.submit("none")
    cli.start("queue-orchestrator", "--app", http_service.APP)
    cli.start("queue-claim-worker", "--queue", "cpu", "--app", http_service.APP)
    run_id = own.runs.submit("doubled", inputs={"number": 4}, idempotency_key="r")["id"]
    assert own.runs.submit("doubled", inputs={"number": 4}, idempotency_key="r")["id"] == run_id

    def waits() -> bool:
        return any(each.get("input_spec") for each in own.runs.nodes(run_id))

    until(waits, timeout_s=60.0)
    with pytest.raises(errors.InputRefused):
        own.runs.answer(run_id, "ok", "no")
    assert (own.runs.get(run_id) or {})["output"] is None
    assert own.runs.answer(run_id, "ok", "yes")
    done = own.runs.wait(run_id, timeout_s=60.0)
    assert (done["status"], done["output"]) == ("completed", {"number": 8})
    with pytest.raises(errors.InputRefused):
        own.runs.answer(run_id, "ok", "yes")
    assert own.runs.retry(run_id, from_node="ok")["status"] == "queued"
    assert own.runs.explain(run_id) is not None
    assert own.runs.cancel(run_id)["status"] == "cancelled"
    assert [each["id"] for each in own.runs.list(workflow_name="doubled")] == [run_id]


def test_a_key_that_no_header_could_have_finds_its_run(own: Client) -> None:
    def submit(key: str) -> str:
        return own.runs.submit("doubled", inputs={"number": 4}, idempotency_key=key)["id"]

    assert submit("d\xe9j\xe0 vu\n") == submit("d\xe9j\xe0 vu\n") != submit("another")


def test_the_verbs_of_workers_queues_and_the_service(own: Client) -> None:
    assert own.health() == {"status": "ok"}
    assert own.ready() == {"status": "ready"}
    assert own.status()["version"]
    host = until(lambda: own.workers.list())[0]["host_label"]
    row = own.workers.disable(host, "load.a", reason="test", until=60.0)
    assert (row["desired_state"], row["reason"]) == ("off", "test")
    assert own.workers.drain(host, "load.a")["stop_policy"] == "drain"
    assert own.workers.enable(host, "load.a")["desired_state"] == "on"
    assert own.queues.pause("load.b", until=timedelta(minutes=1))["paused_at"]
    assert own.queues.get("load.b")["state"] == "paused"
    assert own.queues.resume("load.b") is True
    assert own.queues.resume("load.b") is False
    assert own.queues.limit("load.b", max_running=3)["max_running"] == 3
    assert own.queues.limit("load.b", rate="5/m")["max_running"] == 3
    assert own.queues.limit("load.b", max_running=None)["max_running"] is None
    assert "load.b" in {each["queue"] for each in own.queues.list()}
    assert own.schedules.list() == []


def test_events_come_while_the_job_runs(own: Client, service: http_service.Service) -> None:
    found: list[client.Event] = []
    made: list[str] = []
    begun = threading.Event()

    def follow() -> None:
        with Client(service.url, token=http_service.TOKEN) as other:
            begun.set()
            for event in other.events(kind="job", queue="load.a"):
                found.append(event)
                # Jobs of other tests may be in the queue.
                if event.data["event_type"] == "completed" and event.data["job_id"] in made:
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    begun.wait()

    # Until the stream is open its events are not sent; a job that it has seen completes.
    def seen() -> bool:
        made.append(own.jobs.enqueue("load.chunks", args={"n": 1}, **JOB))
        own.jobs.wait(made[-1], timeout_s=60.0)
        return not thread.is_alive()

    until(seen, timeout_s=60.0, every_s=0.2)
    thread.join()
    assert found[-1].data["job_id"] in made
    assert all(event.kind == "job" for event in found)


def test_the_async_client(service: http_service.Service) -> None:
    async def run() -> str:
        async with client.AsyncClient(service.url, token=http_service.TOKEN) as other:
            made = [
                await other.jobs.enqueue("load.chunks", queue="load.b", lock_key=f"k{number}")
                for number in range(3)
            ]
            waits = [other.jobs.wait(each, timeout_s=60.0) for each in made]
            found = await asyncio.gather(*waits)
            with pytest.raises(errors.UnknownJob):
                await other.jobs.status("none")
            return {each["status"] for each in found}.pop()

    assert asyncio.run(run()) == "succeeded"


def test_a_service_that_restarts_is_reached_again(cli: Commands, db: ModuleType) -> None:
    with http_service.served(cli, workers="[]") as service:
        port = str(service.address[1])
        with Client(service.url, token=http_service.TOKEN, retries=8) as own:
            job_id = own.jobs.enqueue("load.chunks", idempotency_key="k", **JOB)
            service.command.send(signal.SIGKILL)
            service.command.wait()
            with pytest.raises(errors.ServiceUnavailable):
                Client(service.url, token=http_service.TOKEN, retries=0).jobs.status(job_id)
            again = cli.start(
                "queue-workflows", "serve", "--port", port, "--app", http_service.APP,
                QUEUE_WORKFLOWS_TOKEN=http_service.TOKEN, WORKERS_JSON="[]",
            )  # fmt: skip
            until(lambda: _answers(own), timeout_s=60.0)
            same = own.jobs.enqueue("load.chunks", idempotency_key="k", **JOB)
            assert same == job_id
            again.send(signal.SIGTERM)
            again.wait()


def _answers(own: Client) -> bool:
    with contextlib.suppress(errors.ServiceUnavailable):
        return bool(own.health())
    return False


def test_a_request_has_its_id_its_trace_and_its_line_in_the_log(
    cli: Commands, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text(f"AUDIT_LOG_PATH={tmp_path}\nLOG_PATH={tmp_path}\n")
    with http_service.served(cli, "--log-format", "json", cwd=tmp_path) as service:
        reply = service.post(
            "/api/v1/jobs/trigger?x=c4nary",
            {**JOB, "task": "load.chunks"},
            headers={"X-Request-Id": "my-request", "traceparent": GIVEN},
        )
        assert reply.headers["x-request-id"] == "my-request"
        job_id = reply.json()["job_id"]
        other = service.get("/health", headers={"X-Request-Id": "forged\tline"})
        assert len(other.headers["x-request-id"]) == 16
        service.ended(job_id)
        until(lambda: "completed" in (tmp_path / "audit.log").read_text())
        written = (tmp_path / "app.log").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    (line,) = [each for each in lines if each.get("request_id") == "my-request"]
    assert line["message"] == "POST /api/v1/jobs/trigger 200"
    assert line["status"] == 200 and line["duration_s"] > 0
    assert "c4nary" not in written and "/health" not in written
    with contextlib.closing(db.connect()) as conn:
        row = conn.execute("SELECT headers FROM ingest_jobs WHERE id = %s", (job_id,)).fetchone()
    assert row is not None and row["headers"] == {"traceparent": GIVEN}
    audit = [json.loads(each) for each in (tmp_path / "audit.log").read_text().splitlines()]
    assert [each["event"] for each in audit if each["job_id"] == job_id] == [
        "queued", "claimed", "completed",
    ]  # fmt: skip
