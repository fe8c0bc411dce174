"""Beyond the ETL job service: runs, workers, queues, schedules, pages, long polls and streams."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest
from psycopg import sql

from queue_workflows import config, db, errors, history, jobs, runs, schedules, workers
from queue_workflows.client import Client
from tests.support import database, etl_app, factories, http_service, tabled
from tests.support.commands import Commands
from tests.support.wait import until

UP = ("queue-workflows", "up", "--app", http_service.APP, "--no-ingest", "--cpu", "1", "--gpu", "0")


@pytest.fixture
def alone(cli: Commands) -> Generator[http_service.Service]:
    """A service without workers."""
    with http_service.served(cli, workers="") as made:
        yield made


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_are_for_those_who_may_read(alone: http_service.Service) -> None:
    config.configure(ingest_queues={"load.cbr"})
    config.register_ingest_task("load.chunks", etl_app.load_chunks)
    jobs.enqueue("load.chunks", queue="load.cbr")
    found = alone.get("/metrics")
    assert found.status_code == 200, found.text
    assert found.headers["content-type"].startswith("text/plain; version=")
    assert 'queue_workflows_jobs{queue="load.cbr",state="queued"} 1\n' in found.text
    assert httpx.get(f"{alone.url}/metrics").status_code == 401


# --- runs ----------------------------------------------------------------------------------------


def test_a_run_is_submitted_followed_answered_and_retried(
    alone: http_service.Service, cli: Commands
) -> None:
    cli.start(*UP)
    body = {"workflow": "doubled", "inputs": {"number": 21}, "priority": 7}
    made = alone.post("/api/v1/runs", body, headers={"idempotency-key": "one"})
    assert made.status_code == 201, made.text
    run_id = made.json()["id"]
    assert made.headers["location"] == f"/api/v1/runs/{run_id}"
    again = alone.post("/api/v1/runs", body, headers={"idempotency-key": "one"})
    assert (again.status_code, again.json()["id"]) == (200, run_id)
    clash = alone.post(
        "/api/v1/runs", body | {"inputs": {"number": 1}}, headers={"idempotency-key": "one"}
    )
    assert clash.status_code == 409

    def asks() -> bool:
        nodes = alone.get(f"/api/v1/runs/{run_id}/nodes").json()["nodes"]
        states = [node["status"] for node in nodes]
        return states[:2] == ["completed", "awaiting_input"] and bool(nodes[1]["input_spec"])

    until(asks, timeout_s=60)
    why = alone.get(f"/api/v1/runs/{run_id}/why").json()
    assert why["nodes"][0]["clause"] == "answer"
    path = f"/api/v1/runs/{run_id}/nodes/ok/answer"
    assert alone.post(path, {"value": "perhaps"}).status_code == 422
    assert alone.post(path, {"value": "yes"}).status_code == 200
    assert alone.post(path, {"value": "yes"}).status_code == 409
    over = alone.get(f"/api/v1/runs/{run_id}", params={"wait": 30}).json()
    assert (over["status"], over["priority"], over["output"]) == ("completed", 7, {"number": 42})
    assert alone.post(f"/api/v1/runs/{run_id}/retry").status_code == 409
    retried = alone.post(f"/api/v1/runs/{run_id}/retry", {"from_node": "work/double"})
    assert (retried.status_code, retried.json()["status"]) == (200, "queued")
    canceled = alone.post(f"/api/v1/runs/{run_id}/cancel").json()
    assert canceled["status"] == "cancelled"
    assert alone.post(f"/api/v1/runs/{run_id}/cancel").json()["status"] == "cancelled"


def test_inputs_of_a_declared_workflow_are_checked(alone: http_service.Service) -> None:
    refused = alone.post("/api/v1/runs", {"workflow": "greet", "inputs": {"times": "many"}})
    assert refused.status_code == 422
    assert refused.json()["type"] == "urn:queue-workflows:args-refused"
    assert (
        alone.post("/api/v1/runs", {"workflow": "greet", "inputs": {"times": 2}}).status_code == 201
    )


def test_the_nodes_of_a_run_come_in_pages(alone: http_service.Service, own_database: Any) -> None:
    run_id = alone.post("/api/v1/runs", {"workflow": "doubled", "inputs": {"number": 1}}).json()[
        "id"
    ]
    names = [f"cut[clip-{number:03}]" for number in range(250)]
    own_database.conn.execute(
        "INSERT INTO workflow_node_jobs (run_id, node_id, node_module, queue)"
        " SELECT %s, unnest(%s::text[]), 'double', 'cpu'",
        (run_id, names[::-1]),
    )
    path, found, cursor = f"/api/v1/runs/{run_id}/nodes", list[str](), None
    while True:
        params = {"limit": 100} | ({"cursor": cursor} if cursor else {})
        page = alone.get(path, params=params).json()
        found += [node["node_id"] for node in page["nodes"]]
        if (cursor := page["next"]) is None:
            break
        assert len(page["nodes"]) == 100
    assert found == names
    assert len(alone.get(path).json()["nodes"]) == 200
    assert alone.get(path, params={"limit": 250}).json()["next"] is None
    with Client(alone.url, token=http_service.TOKEN) as client:
        assert [node["node_id"] for node in client.runs.nodes(run_id)] == names
        assert len(client.runs.nodes(run_id, limit=3)) == 3
    assert alone.get("/api/v1/runs/x/nodes").status_code == 404


def test_runs_are_found_page_by_page(alone: http_service.Service, conn: db.Connection) -> None:
    for number in range(5):
        factories.run(
            conn, id=f"r{number}", workflow_name=f"w{number % 2}", context={"n": [number]},
            created_at=f"2026-01-01 00:0{number}:00+00", error=f"no price for {number}",
        )  # fmt: skip
    cases: dict[str, tuple[dict[str, Any], list[str]]] = {
        "all": ({}, ["r4", "r3", "r2", "r1", "r0"]),
        "a workflow": ({"workflow": "w0"}, ["r4", "r2", "r0"]),
        "since": ({"since": "2026-01-01T00:03:00Z"}, ["r4", "r3"]),
        "until": ({"until": "2026-01-01T01:01:00+01:00"}, ["r1", "r0"]),
        "a text": ({"text": "FOR 2"}, ["r2"]),
        "an input": ({"input": '{"n": [3]}'}, ["r3"]),
    }
    for name, (given, wanted) in cases.items():
        with tabled.case(name):
            found, cursor = list[str](), None
            while True:
                more = {"cursor": cursor} if cursor else {}
                reply = alone.get("/api/v1/runs", params=given | {"limit": 2} | more)
                assert reply.status_code == 200, reply.text
                page = reply.json()
                found += [row["id"] for row in page["items"]]
                if (cursor := page["next"]) is None:
                    break
            assert found == wanted
    refused = [
        {"since": "2026-01-01T00:03:00"}, {"since": "yesterday"}, {"until": "7d"}, {"limit": 0},
        {"input": "[1]"}, {"input": "{"}, {"input": '{"n": NaN}'}, {"input": "x" * 2001},
        {"text": "x" * 201}, {"cursor": "x"},
    ]  # fmt: skip
    for given in refused:
        with tabled.case(given):
            reply = alone.get("/api/v1/runs", params=given)
            assert (reply.status_code, reply.json()["status"]) == (422, 422), reply.text
    since = datetime(2026, 1, 1, 0, 3, tzinfo=timezone.utc)
    with Client(alone.url, token=http_service.TOKEN) as client:
        assert [row["id"] for row in client.runs.list(since=since, limit=1)] == ["r4"]
        assert [row["id"] for row in client.runs.list(since=since, text="3")] == ["r3"]
        assert [row["id"] for row in client.runs.list(input={"n": [1]}, until=since)] == ["r1"]
        assert client.runs.list(since=timedelta(hours=1)) == []


# --- jobs ----------------------------------------------------------------------------------------


def test_pages_have_every_job_once_in_order(alone: http_service.Service) -> None:
    made = [alone.trigger(lock_key=f"k{n}", args={"n": n})["job_id"] for n in range(7)]
    found: list[str] = []
    cursor: str | None = None
    while True:
        params = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = alone.get("/api/v1/jobs", params=params).json()
        found += [item["id"] for item in page["items"]]
        if cursor is None:
            alone.trigger(lock_key="later")  # a newer one does not move the pages
        cursor = page["next"]
        if cursor is None:
            break
    assert found == made[::-1]


def test_jobs_are_found_by_filters_and_text(alone: http_service.Service) -> None:
    one = alone.trigger(lock_key="Copper", queue="load.b")["job_id"]
    two = alone.trigger(lock_key="zinc")["job_id"]
    alone.post(f"/api/v1/jobs/{two}/cancel")

    def found(**params: Any) -> list[str]:
        return [item["id"] for item in alone.get("/api/v1/jobs", params=params).json()["items"]]

    assert found(q="copp") == [one] == found(queue="load.b") == found(key="Copper")
    assert found(status="canceled") == [two]
    assert found(status=["queued", "canceled"]) == [two, one]
    assert found(task="load.flaky") == found(q="a\\b%_'") == []
    assert alone.get("/api/v1/jobs", params={"status": "canceled"}).json()["items"][0][
        "status"
    ] == "canceled"  # fmt: skip


def test_every_answer_gives_a_job_whose_lease_has_lapsed_one_state(
    cli: Commands, own_database: Any
) -> None:
    rare = {"DL_REAPER_PERIOD_SEC": "3600", "DL_HEARTBEAT_SEC": "1"}
    with http_service.served(cli, workers="", **rare) as service:
        keys = {"idempotency_key": "one", "lock_key": "a"}
        lapsed = service.trigger(**keys)["job_id"]
        runs_on, waits = (service.trigger(lock_key=key)["job_id"] for key in "bc")
        own_database.conn.execute(
            "UPDATE ingest_jobs SET status = 'running', worker_id = 'gone:1:x', claimed_by = 'g',"
            " claim_no = claim_no + 1, started_at = now(), lease_expires_at = now()"
            " + CASE id WHEN %s THEN interval '-1 s' ELSE '1 h' END WHERE id = ANY (%s)",
            (lapsed, [lapsed, runs_on]),
        )

        def listed(**params: Any) -> list[tuple[str, str]]:
            items = service.get("/api/v1/jobs", params=params).json()["items"]
            return [(item["id"], item["status"]) for item in items]

        for job_id, state in ((lapsed, "lost"), (runs_on, "running"), (waits, "queued")):
            path = f"/api/v1/jobs/{job_id}"
            found = [service.get(f"{path}{more}").json() for more in ("/status", "", "/why")]
            assert [each["status"] for each in found] == [state] * 3
            assert (job_id, state) in listed()
            assert listed(status=state) == [(job_id, state)]
        assert service.trigger(**keys)["status"] == "lost"
        assert len(listed(status=["running", "lost"])) == 2
        refused = service.get("/api/v1/jobs", params={"status": "done"})
        assert refused.status_code == 422
        assert "queued, running, succeeded, failed, canceled, lost" in refused.json()["detail"]


def test_a_job_is_shown_explained_and_retried(alone: http_service.Service) -> None:
    job_id = alone.trigger()["job_id"]
    assert alone.get(f"/api/v1/jobs/{job_id}").json()["attempts"] == []
    why = alone.get(f"/api/v1/jobs/{job_id}/why").json()
    assert (why["can_run"], why["workers"]) == (False, [])
    assert alone.post(f"/api/v1/jobs/{job_id}/retry").status_code == 409
    alone.post(f"/api/v1/jobs/{job_id}/cancel")
    retried = alone.post(f"/api/v1/jobs/{job_id}/retry")
    assert (retried.status_code, retried.json()["status"]) == (200, "queued")
    assert alone.post("/api/v1/jobs/nothing/retry").status_code == 404
    acts = [each["actor"] for each in alone.history(job_id)]
    assert acts == ["http (operate token)"] * 3


def test_a_task_gets_its_args_or_the_trigger_is_refused(service: http_service.Service) -> None:
    job_id = service.trigger("load.payload", args={"n": 1})["job_id"]
    assert service.ended(job_id)["status"] == "succeeded"
    assert jobs.get(job_id, kind="ingest")["result"] == {"n": 1}
    body = {"queue": "load.a", "task": "load.day", "lock_key": "k", "args": {"n": 1}}
    refused = service.post("/api/v1/jobs/trigger", body)
    assert refused.status_code == 422
    assert "parameter 'day' gets the job's reason" in refused.json()["detail"]


# --- workers, queues, schedules ------------------------------------------------------------------


def test_workers_are_switched(service: http_service.Service) -> None:
    items = until(lambda: service.get("/api/v1/workers").json()["items"], timeout_s=60)
    host = items[0]["host_label"]
    assert {item["queue"] for item in items} <= {"load.a", "load.b"}
    off = service.post(f"/api/v1/workers/{host}/load.a/drain", {"reason": "disk", "for_s": 600})
    assert (off.status_code, off.json()["desired_state"]) == (200, "off")
    assert off.json()["requested_by"] == "http (operate token)"

    def parked() -> bool:
        found = service.get("/api/v1/workers").json()["items"]
        return [each["state"] for each in found if each["queue"] == "load.a"] == ["parked"]

    until(parked)
    job_id = service.trigger(args={"n": 1})["job_id"]
    assert service.get(f"/api/v1/jobs/{job_id}/why").json()["can_run"] is False
    assert service.post(f"/api/v1/workers/{host}/load.a/on").json()["desired_state"] == "on"
    assert service.ended(job_id)["status"] == "succeeded"
    assert service.post(f"/api/v1/workers/{host}/load.a/off").json()["stop_policy"] == "hard"


def test_switches_of_unknown_machines_and_queues_are_not_found(
    alone: http_service.Service, own_database: Any
) -> None:
    conn = own_database.conn
    conn.execute("INSERT INTO worker_heartbeats (host_label, queue) VALUES ('render-1', 'load.a')")
    for action in ("on", "off", "drain"):
        for path, meant in (("render-2/load.a", "render-1"), ("render-1/load.aa", "load.a")):
            refused = alone.post(f"/api/v1/workers/{path}/{action}")
            assert refused.status_code == 404, refused.text
            assert f"did you mean {meant!r}?" in refused.json()["detail"]
    for action in ("pause", "resume", "limits"):
        body = {"max_running": 1} if action == "limits" else None
        refused = alone.post(f"/api/v1/queues/load.aa/{action}", body)
        assert refused.status_code == 404, refused.text
        assert "did you mean 'load.a'?" in refused.json()["detail"]
    for table in ("worker_controls", "queue_settings", "queue_partitions"):
        assert conn.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    with Client(alone.url, token=http_service.TOKEN) as client, pytest.raises(errors.UnknownWorker):
        client.workers.drain("render-2", "load.a")
    assert alone.post("/api/v1/workers/render-1/all/off").json()["desired_state"] == "off"
    assert alone.post("/api/v1/queues/all/pause").status_code == 404
    workers.disable("render-2", "load.a")  # before its first start
    assert alone.post("/api/v1/workers/render-2/load.a/on").json()["desired_state"] == "on"


def test_queues_are_paused_resumed_and_limited(service: http_service.Service) -> None:
    paused = service.post("/api/v1/queues/load.a/pause", {"for_s": 600}).json()
    begun, over = map(datetime.fromisoformat, (paused["paused_at"], paused["paused_until"]))
    assert (over - begun).total_seconds() == pytest.approx(600, abs=5)
    job_id = service.trigger(args={"n": 1})["job_id"]
    queue = service.get("/api/v1/queues/load.a").json()
    assert (queue["state"], queue["ready"]) == ("paused", 1)
    assert service.post("/api/v1/queues/load.a/resume").json() == {"resumed": True}
    assert service.post("/api/v1/queues/load.a/resume").json() == {"resumed": False}
    assert service.ended(job_id)["status"] == "succeeded"
    assert service.post("/api/v1/queues/load.a/limits", {"max_running": 1}).status_code == 200
    assert service.post("/api/v1/queues/load.a/limits", {"rate": "100/m"}).status_code == 200
    queue = service.get("/api/v1/queues/load.a").json()
    assert (queue["max_running"], queue["rate"]) == (1, "100/m")
    service.post("/api/v1/queues/load.a/limits", {"max_running": None})
    assert service.get("/api/v1/queues/load.a").json()["max_running"] is None
    assert service.post("/api/v1/queues/load.a/limits", {"rate": "fast"}).status_code == 422
    for pause, ends in (({"partition": "p", "for_s": 600}, True), ({"partition": "q"}, False)):
        row = service.post("/api/v1/queues/load.a/pause", pause).json()
        assert row["partition_key"] == pause["partition"], row
        assert (row["paused_until"] is not None) is ends, row
    assert service.get("/api/v1/queues/load.a").json()["state"] == "open"
    assert service.post("/api/v1/queues/load.a/resume", {"partition": "p"}).json()["resumed"]
    assert not service.post("/api/v1/queues/load.a/resume", {"partition": "p"}).json()["resumed"]
    assert service.post("/api/v1/queues/load.a/resume", {"partition": "q"}).json()["resumed"]
    assert {"load.a", "load.b"} <= {
        item["queue"] for item in service.get("/api/v1/queues").json()["items"]
    }


def test_schedules_are_listed_paused_and_fired(alone: http_service.Service) -> None:
    etl_app.setup()
    config.register_ingest_task("load.chunks", etl_app.load_chunks)
    schedules.add("nightly", "0 3 * * *", task_name="load.chunks", queue="load.a")
    assert [item["name"] for item in alone.get("/api/v1/schedules").json()["items"]] == ["nightly"]
    assert alone.post("/api/v1/schedules/nightly/pause").json()["paused"] is True
    assert alone.get("/api/v1/schedules").json()["items"][0]["paused"] is True
    assert alone.post("/api/v1/schedules/nightly/resume").json()["paused"] is False
    fired = alone.post("/api/v1/schedules/nightly/run").json()
    assert alone.status(fired["id"])["status"] == "queued"
    coming = alone.get("/api/v1/schedules/nightly/preview", params={"days": 3}).json()["items"]
    assert len(coming) == 3


def test_ids_may_hold_slashes(alone: http_service.Service, own_database: Any) -> None:
    job_id, run_id = "a/b c%2Fd/cancel", "runs/1"
    own_database.conn.execute(
        "INSERT INTO ingest_jobs (id, task_name, queue) VALUES (%s, 'load.chunks', 'load.a')",
        (job_id,),
    )
    own_database.conn.execute(
        "INSERT INTO workflow_runs (id, workflow_name) VALUES (%s, 'doubled')", (run_id,)
    )
    path = f"/api/v1/jobs/{quote(job_id, safe='')}"
    assert alone.get(f"{path}/status").json()["job_id"] == job_id
    assert alone.get(path).json()["id"] == job_id
    assert alone.post(f"{path}/cancel").json()["status"] == "canceled"
    assert alone.post(f"{path}/retry").json() | {"job_id": ""} == alone.get(
        f"{path}/status"
    ).json() | {"job_id": ""}
    assert alone.get(path.replace("%2F", "/")).status_code == 404
    run_path = f"/api/v1/runs/{quote(run_id, safe='').lower()}"
    assert alone.post(f"{run_path}/cancel").json()["status"] == "cancelled"
    with Client(alone.url, token=http_service.TOKEN) as client:
        assert client.jobs.status(job_id)["job_id"] == job_id


# --- waiting -------------------------------------------------------------------------------------


def test_a_long_poll_returns_what_has_changed(
    service: http_service.Service, tmp_path: Path
) -> None:
    job_id = service.trigger(args={"folder": str(tmp_path)})["job_id"]
    until(lambda: (tmp_path / f"started-{job_id}").exists())
    path = f"/api/v1/jobs/{job_id}/status"
    first = service.get(path)
    tag = {"if-none-match": first.headers["etag"]}
    while (now := service.get(path, headers=tag)).status_code != 304:
        tag = {"if-none-match": now.headers["etag"]}  # a heartbeat came in between
    changed = service.get(path, headers=tag, params={"wait": 15})
    assert changed.status_code == 200, "the next heartbeat, at the latest"
    (tmp_path / "go").touch()
    assert service.get(path, params={"wait": 30}).json()["status"] == "succeeded"
    last = service.get(path)
    same = service.get(path, headers={"if-none-match": last.headers["etag"]}, params={"wait": 0.5})
    assert (same.status_code, same.content) == (304, b"")


def test_long_polls_that_nobody_reads_end(cli: Commands) -> None:
    with http_service.served(cli, workers="", APP_MAX_STREAMS="2") as service:
        path = f"/api/v1/jobs/{service.trigger()['job_id']}/status"
        head = f"GET {path}?wait=60 HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer "
        request = f"{head}{http_service.TOKEN}\r\n\r\n".encode()

        def third() -> int:
            return service.get(path, params={"wait": 0.01}).status_code

        with (
            socket.create_connection(service.address) as one,
            socket.create_connection(service.address) as two,
        ):
            one.sendall(request)
            two.sendall(request)
            until(lambda: third() == 503)
        until(lambda: third() == 200, timeout_s=20)


class Stream:
    """The events of a stream, read by a thread."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.events: list[dict[str, Any]] = []
        self.opened = threading.Event()
        self._lines = lines
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        event: dict[str, Any] = {}
        try:
            for line in self._lines:
                name, _, value = line.partition(": ")
                if name == "retry":
                    self.opened.set()
                elif name == "data":
                    event["data"] = json.loads(value)
                elif name:
                    event[name] = value
                elif "data" in event:
                    self.events.append(event)
                    event = {}
        except httpx.HTTPError:
            return

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()

    def types(self, job_id: str) -> list[str]:
        data = [event["data"] for event in [*self.events]]
        return [each["event_type"] for each in data if each.get("job_id") == job_id]


@contextmanager
def stream(service: http_service.Service, last: str = "", **params: str) -> Generator[Stream]:
    headers = {"last-event-id": last} if last else {}
    with service.client.stream(
        "GET", "/api/v1/events", params=params, headers=headers, timeout=60
    ) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-accel-buffering"] == "no", "nginx sends each event at once"
        made = Stream(reply.iter_lines())
        assert made.opened.wait(30)
        yield made
        reply.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        made.join()


def test_a_stream_has_the_changes_of_jobs_and_goes_on_where_it_was(
    service: http_service.Service,
) -> None:
    first = service.trigger(args={"n": 1})["job_id"]
    service.ended(first)
    with stream(service, queue="load.a") as follows:
        second = service.trigger(args={"n": 1})["job_id"]
        until(lambda: follows.types(second)[-1:] == ["completed"])
        other = service.trigger(args={"n": 1}, queue="load.b")["job_id"]
        service.ended(other)
        assert follows.types(second) == ["queued", "claimed", "completed"]
        assert follows.types(other) == [], "of another queue"
        last = follows.events[-1]["id"]
    third = service.trigger(args={"n": 1})["job_id"]
    service.ended(third)
    with stream(service, last, queue="load.a") as follows:
        until(lambda: follows.types(third)[-1:] == ["completed"])
        assert follows.types(third)[:3] == ["queued", "claimed", "completed"]


def test_a_stream_has_the_changes_of_runs(alone: http_service.Service, cli: Commands) -> None:
    with stream(alone) as follows:
        cli.start(*UP)
        run_id = alone.post(
            "/api/v1/runs", {"workflow": "doubled", "inputs": {"number": 1}}
        ).json()["id"]

        def states() -> list[str]:
            changed = [each["data"] for each in [*follows.events] if each["event"] == "run"]
            return [each["status"] for each in changed if each["run_id"] == run_id]

        until(lambda: states()[-1:] == ["running"], timeout_s=60)
        alone.post(f"/api/v1/runs/{run_id}/cancel")
        until(lambda: states()[-1:] == ["cancelled"])


def test_a_stream_that_is_too_far_behind_is_told(
    alone: http_service.Service, own_database: Any
) -> None:
    job_id = alone.trigger()["job_id"]
    own_database.conn.execute(
        "INSERT INTO ingest_job_events (job_id, event_type, queue)"
        " SELECT %s, 'note', 'load.a' FROM generate_series(1, 4000)",
        (job_id,),
    )
    at = history.feed().now.timestamp() - 5
    headers = {"last-event-id": f"{int(at * 1e6)}-i1"}
    with alone.client.stream("GET", "/api/v1/events", headers=headers) as reply:
        assert reply.status_code == 410


def test_streams_end_when_the_service_stops(service: http_service.Service) -> None:
    with service.client.stream("GET", "/api/v1/events", timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("retry")
        service.command.send(signal.SIGTERM)
        assert [*lines] == [""], "it ends in order"
    assert service.command.wait() == 0


# --- mounted in an app's own application ---------------------------------------------------------


def test_a_mounted_service_loads_the_app_and_runs_its_jobs(
    cli: Commands, fresh_database: str, tmp_path: Path
) -> None:
    """In a database without a schema."""
    with http_service.mounted(cli, tmp_path, QUEUE_WORKFLOWS_DB_URL=fresh_database) as service:
        job_id = service.trigger(args={"n": 1})["job_id"]
        assert service.ended(job_id)["status"] == "succeeded"


def test_a_mounted_service_without_queues_makes_the_schema_and_takes_jobs_back(
    cli: Commands, fresh_database: str, tmp_path: Path
) -> None:
    env = {"QUEUE_WORKFLOWS_DB_URL": fresh_database, "DL_REAPER_PERIOD_SEC": "0.1"}
    with (
        http_service.mounted(cli, tmp_path, workers="[]", **env) as service,
        psycopg.connect(fresh_database, autocommit=True) as conn,
    ):
        job_id = service.trigger()["job_id"]
        conn.execute(
            "UPDATE ingest_jobs SET status = 'running', worker_id = 'gone:1:x', claimed_by = 'g',"
            " claim_no = claim_no + 1, started_at = now(), lease_expires_at = now()"
        )
        until(lambda: service.status(job_id)["status"] == "queued")


def test_a_service_that_is_read_only_and_has_no_queues_makes_no_schema(
    cli: Commands, fresh_database: str
) -> None:
    env = {"QUEUE_WORKFLOWS_DB_URL": fresh_database}
    with http_service.served(cli, "--read-only", workers="", ready=False, **env) as service:
        assert "no schema version" in service.get("/ready").json()["detail"]


def test_a_service_that_may_not_make_the_schema_waits_for_it(
    cli: Commands, fresh_database: str
) -> None:
    own = psycopg.conninfo.conninfo_to_dict(fresh_database)
    role = sql.Identifier(f"{own['dbname']}_serves")
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        try:
            conn.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
            url = database.url({**own, "options": f"-c role={own['dbname']}_serves"})
            env = {"QUEUE_WORKFLOWS_DB_URL": url}
            with http_service.served(cli, workers="", ready=False, **env) as service:
                until(lambda: "the schema cannot be used" in service.command.err)
                cli.run("queue-workflows", "migrate", QUEUE_WORKFLOWS_DB_URL=fresh_database)
                rights = sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA public TO {}")
                conn.execute(rights.format(role))
                until(lambda: service.get("/ready").status_code == 200)
                service.command.send(signal.SIGTERM)
                assert service.command.wait() == 0
        finally:
            conn.execute(sql.SQL("DROP OWNED BY {}").format(role))
            conn.execute(sql.SQL("DROP ROLE {}").format(role))


def test_an_app_mounts_the_service(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the ASGI application of an app, below a path, with its own lifespan."""
    import anyio
    import fastapi

    from queue_workflows import service

    api = service.app(token=http_service.TOKEN, app_allowed_hosts="app.example")
    app = fastapi.FastAPI(lifespan=api.router.lifespan_context)
    app.mount("/queue", api)

    async def talk() -> list[int]:
        transport = httpx.ASGITransport(app)
        headers = {"authorization": f"Bearer {http_service.TOKEN}"}
        async with (
            httpx.AsyncClient(
                transport=transport, base_url="http://app.example", headers=headers
            ) as client,
            app.router.lifespan_context(app),
        ):
            job = "/queue/api/v1/jobs/a%2Fb/status"
            assert (await client.get(job)).json()["detail"] == "there is no job 'a/b'"
            paths = ("/queue/health", "/queue/api/v1/jobs", "/api/v1/jobs")
            return [(await client.get(path)).status_code for path in paths]

    assert anyio.run(talk) == [200, 200, 404]
    assert jobs.list() == runs.list() == []
