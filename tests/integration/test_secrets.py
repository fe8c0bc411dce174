"""A secret in what an app raises or is given reaches no column of the engine's own, log or page."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export import in_memory_span_exporter
from psycopg import sql
from psycopg.types.json import Jsonb

import queue_workflows
from queue_workflows import (
    declare,
    errors,
    events,
    jobs,
    queues,
    run_store,
    runs,
    schedules,
    steps,
    streams,
    workers,
)  # fmt: skip
from queue_workflows.client import Client
from queue_workflows.declare import node, workflow
from tests.support import alert_senders, console, exports, factories, flow
from tests.support.asgi_service import post, streamed

Sent = Callable[[], dict[str, str]]
CANARY = "c4nary-hunter2"
TOMORROW = datetime.now(timezone.utc) + timedelta(days=1)
TEXT = f"cannot log in with password={CANARY} at postgres://u:{CANARY}@db/x"
DATA = {
    "context", "inputs", "args", "input_template", "resolved_inputs", "definition", "result",
    "context_delta", "headers", "output", "item", "value", "steps_done", "input_spec",
    "progress", "part",
}  # fmt: skip
"""Columns that hold what the app stores there itself."""


@dataclasses.dataclass
class Login:
    user: str
    password: int

    def __post_init__(self) -> None:
        raise PermissionError(TEXT)


@node(name="secrets.fail")
def fail() -> None:
    raise PermissionError(TEXT)


@node(name="secrets.leave")
def leave() -> None:
    raise SystemExit(TEXT)


@node(name="secrets.call")
def call() -> None:
    with pytest.raises(PermissionError):
        steps.step("login", log_in, "u", password=CANARY)
    steps.step("again", str, {"api_key": CANARY})


def log_in(user: str, *, password: str) -> None:
    raise PermissionError(f"{user}: {TEXT}")


@node(name="secrets.users")
def users() -> list[dict[str, Any]]:
    return [{"user": "a", "password": CANARY}]


@node(name="secrets.take")
def take(login: Login) -> None: ...


@workflow
def failing() -> None:
    fail()


@workflow
def leaving() -> None:
    leave()


@workflow
def stepping() -> None:
    call()


@workflow
def vault(password: int) -> None:
    fail()


@workflow
def logins(login: Login) -> None:
    take(login)


@workflow
def all_logins() -> None:
    take.map(users(), key="user")  # pyright: ignore[reportArgumentType]


@workflow
def all_children() -> None:
    logins.map(users(), key="user")  # pyright: ignore[reportArgumentType]


def load(args: Any) -> None:
    raise PermissionError(TEXT)


def typed(*, api_key: int) -> None: ...


@pytest.fixture
def app(db: ModuleType, conn: Any, caplog: pytest.LogCaptureFixture) -> Iterator[flow.Flow]:
    made = flow.Flow()
    declare.install(
        fail, leave, call, users, take, failing, leaving, stepping, vault, logins, all_logins,
        all_children,
    )  # fmt: skip
    queue_workflows.configure(ingest_queues={"load"})
    queue_workflows.register_ingest_task("load", load)
    queue_workflows.register_ingest_task("typed", typed)
    caplog.set_level(logging.INFO)
    with exports.masked(caplog.handler):
        yield made
    made.close()
    assert CANARY not in caplog.text
    assert leaks(conn) == []


def leaks(conn: Any) -> list[str]:
    """The tables and columns that hold the secret, but for the app's own values."""
    tables = "SELECT tablename AS name FROM pg_tables WHERE schemaname = 'public'"
    found: list[str] = []
    for table in [row["name"] for row in conn.execute(tables).fetchall()]:
        query = sql.SQL("SELECT to_jsonb(t) AS row FROM {} t").format(sql.Identifier(table))
        found += [
            f"{table}.{column}: {value}"
            for row in conn.execute(query).fetchall()
            for column, value in row["row"].items()
            if column not in DATA and CANARY in str(value)
        ]
    return found


def ended(app: flow.Flow, run_id: str) -> str:
    app.go()
    row = run_store.get_run(run_id)
    assert row is not None
    return row["error"] or ""


@pytest.mark.parametrize("name", ["failing", "leaving", "all_logins", "all_children"])
def test_an_error_of_a_node_is_masked_everywhere(app: flow.Flow, name: str) -> None:
    run_id = runs.submit(name)["id"]
    error = ended(app, run_id)
    assert "cannot log in with password=***" in error or "takes int, not a str" in error
    for page in (("show", run_id), ("show", run_id, "--json"), ("runs",), ("status",)):
        printed = console.command(*page).out
        if name in ("failing", "leaving"):
            assert CANARY not in printed


def test_the_arguments_and_errors_of_steps_are_masked(app: flow.Flow, conn: Any) -> None:
    ended(app, runs.submit("stepping")["id"])
    rows = conn.execute("SELECT name, arguments, error FROM job_steps ORDER BY position").fetchall()
    assert [(row["name"], row["arguments"]) for row in rows] == [
        ("login", '("u", password=***)'), ("again", '({"api_key": ***})'),
    ]  # fmt: skip
    assert rows[0]["error"].startswith("PermissionError: u: cannot log in with password=***")


@pytest.mark.parametrize(
    ("name", "inputs", "said"),
    [
        ("vault", {"password": CANARY}, "'password' takes int, not a str"),
        ("vault", {"password": {"a": CANARY}}, "'password' takes int, not a dict"),
        ("logins", {"login": {"user": "a", "password": CANARY}},
         "'login': 'password' takes int, not a str"),
        ("logins", {"login": {"user": {"token": CANARY * 30}, "password": 1}},
         "'login': 'user': str, not {'token': "),
        ("logins", {"login": {"user": f"https://u:{CANARY}@h", "password": 1, "x": 2}}, "'x'"),
        ("logins", {"login": {"user": "a", "password": 1}}, "'login': PermissionError: cannot"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_type_and_not_the_secret(
    app: flow.Flow, conn: Any, name: str, inputs: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.ArgsRefused) as refused:
        runs.submit(name, inputs=inputs)
    reply = post("/api/v1/runs", {"workflow": name, "inputs": inputs})
    ((key, value),) = inputs.items()
    given = value if isinstance(value, str) else json.dumps(value)
    printed = console.refusal("run", name, "--input", f"{key}={given}")
    factories.insert(
        conn, "workflow_runs", id="r", workflow_name=name, status="queued", mode="node",
        context=Jsonb(inputs),
    )  # fmt: skip
    stored = ended(app, "r")
    with pytest.raises(errors.ArgsRefused):
        schedules.add("s", "0 3 * * *", workflow_name=name, inputs=inputs)
    if "PermissionError" not in said:  # an exception in the app's own process is as the app made it
        assert CANARY not in str(refused.value)
    for text in (reply.json()["detail"], printed, stored):
        assert said in text
        assert CANARY not in text


def test_a_run_that_cannot_start_has_no_secret_in_its_error(app: flow.Flow) -> None:
    def load(name: str) -> Any:
        raise PermissionError(TEXT)

    queue_workflows.set_workflow_provider(load, load)
    run_id = runs.submit("elsewhere")["id"]
    app.look()
    row = run_store.get_run(run_id)
    assert row is not None
    assert "password=***" in row["error"]


def test_an_error_that_an_app_stores_is_masked(app: flow.Flow) -> None:
    run_id = runs.submit("failing")["id"]
    runs.update(run_id, status="failed", error=TEXT)


def test_errors_of_tasks_are_masked(app: flow.Flow, conn: Any) -> None:
    job = jobs.enqueue("load", queue="load", args={})
    with pytest.raises(errors.ArgsRefused, match="'api_key' takes int, not a str") as refused:
        jobs.enqueue("typed", queue="load", args={"api_key": CANARY})
    assert CANARY not in str(refused.value)
    factories.insert(
        conn, "ingest_jobs", id="i", task_name="typed", queue="load", status="queued",
        args=Jsonb({"api_key": CANARY}), reason="x",
    )  # fmt: skip
    app.work("load")
    app.work("load")
    assert job


# --- the canary: one secret in many forms, and every output ------------------------------------

DSN = f"postgres://service-user:{CANARY * 12}@db.example/x"
"""So long that a cut goes through the password."""
SECRETS = {
    "password": CANARY, "dsn": DSN, "nested": {"token": {"a": ["b", f"c {CANARY}"]}},
    "body": json.dumps({"api_key": f"{CANARY} and {CANARY}"}),
    "command": ["dump", "--password", CANARY, f"--token={CANARY}"],
    "headers": [["authorization", CANARY]],
}  # fmt: skip


@node(name="canary.spend")
def spend(secrets: dict[str, Any], status_callback: Any) -> dict[str, Any]:
    print(f"{TEXT} {secrets}")
    status_callback(secrets)
    steps.step("pay", dict, secrets)
    streams.stream("said", secrets)
    return secrets


@node(name="canary.lose")
def lose(secrets: dict[str, Any]) -> None:
    try:
        log_in("u", password=CANARY)
    except PermissionError as error:
        raise ValueError(secrets) from error


@workflow
def spending(secrets: dict[str, Any]) -> None:
    lose(spend(secrets))


def pay(args: Any) -> None:
    raise PermissionError(args)


@pytest.fixture
def sent(db: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    """Alerts, spans and logs of events from now on: `sent()` sends them and returns the texts."""
    for name in ("AUDIT_LOG_PATH", "METRIC_PATH"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(f"QUEUE_WORKFLOWS_{name}", str(tmp_path / name))
    spans = in_memory_span_exporter.InMemorySpanExporter()
    alerts: list[Any] = []
    script = f"import sys; open({str(tmp_path / 'alerts')!r}, 'a').write(sys.stdin.read())"
    one = alert_senders.made(monkeypatch, alerts.append, (sys.executable, "-c", script))
    one.run_once()
    wanted = exports.wanted(spans)
    for each in wanted:
        each.run()

    def call() -> dict[str, str]:
        one.run_once()
        for each in wanted:
            each.run()
        texts = {
            path.parent.name: path.read_text()
            for name in ("AUDIT_LOG_PATH", "METRIC_PATH")
            for path in (tmp_path / name).iterdir()
        }
        texts["command of alerts"] = (tmp_path / "alerts").read_text()
        texts["hook of alerts"] = repr(alerts)
        texts["spans"] = "".join(span.to_json() for span in spans.get_finished_spans())
        return texts

    yield call
    one.stop()
    for each in wanted:
        each.stop()


def own(value: Any, name: str = "") -> str:
    """The text of a JSON value but for what an app stored itself, which JSON has as it is."""
    if isinstance(value, dict) and name not in DATA:
        return " ".join(own(member, key) for key, member in value.items())
    if isinstance(value, list) and name not in DATA:
        return " ".join(own(member, name) for member in value)
    return "" if name in DATA else str(value)


def pages(run_id: str, job_ids: list[str]) -> dict[str, str]:
    """What commands print about a run and its jobs, and about everything."""
    found: dict[str, str] = {}
    commands = [
        *(("show", each, *more) for each in (run_id, *job_ids) for more in ((), ("--full",))),
        *(("show", each, "--follow") for each in (run_id, job_ids[-1])),
        *(("show", each, "--steps", *more) for each in job_ids for more in ((), ("--full",))),
        *(("why", each) for each in (run_id, *job_ids)),
        *((name,) for name in ("runs", "status", "workers", "queues", "audit", "doctor")),
        *(("metrics",), ("jobs", "list"), ("events", "list"), ("inputs",), ("schedules",)),
    ]
    for argv in commands:
        done = console.command(*argv)
        assert done.code in (0, 1), done
        found[" ".join(argv)] = done.out + done.err
        if argv[0] != "metrics" and "--follow" not in argv:
            shown = json.loads(console.command(*argv, "--json").out)
            found[" ".join((*argv, "--json"))] = own(shown)
    return found


def replies(run_id: str, job_id: str, waiting: str) -> dict[str, str]:
    """What the service replies, the bodies of its errors, and its streams."""
    runs_, jobs_ = "/api/v1/runs", "/api/v1/jobs"
    paths = [
        *(runs_, f"{runs_}/{run_id}", f"{runs_}/{run_id}/nodes", f"{runs_}/{run_id}/why"),
        *(jobs_, f"{jobs_}/{job_id}", f"{jobs_}/{job_id}/status", f"{jobs_}/{job_id}/events"),
        *(f"{jobs_}/{waiting}/why", "/api/v1/workers", "/api/v1/queues", "/metrics", "/ready"),
    ]
    found = {f"GET {path}": streamed(path=path)[1] for path in paths}
    found = {
        name: own(json.loads(text)) if text.startswith(("{", "[")) else text
        for name, text in found.items()
    }
    trigger = {"queue": "load", "task": "pay", "lock_key": "k"}
    for path, body in (
        (runs_, {"workflow": DSN}),
        (runs_, {"workflow": "spending", "inputs": {"secrets": DSN}}),
        (runs_, {"workflow": "spending", "inputs": {"secrets": SECRETS, "password": CANARY}}),
        (runs_, {"workflow": "spending", "token": CANARY}),
        (f"{jobs_}/trigger", trigger | {"queue": DSN}),
        (f"{jobs_}/trigger", trigger | {"task": "typed", "args": {"api_key": SECRETS}}),
        (f"{jobs_}/trigger", trigger | {"priority": DSN}),
    ):
        reply = post(path, body)
        assert reply.status_code in (404, 422), reply.text
        found[f"POST {path} {sorted(body)}"] = reply.text
    return found


def refusals_of_clients() -> dict[str, str]:
    """The errors of a client whose service, proxy or URL has a secret."""
    found: dict[str, str] = {}
    for url in (f"http://u:{CANARY}/x@h", f"ftp://u:{CANARY}@h", f"http://u:{CANARY}@127.0.0.1:1"):
        with Client(url, retries=0) as client, pytest.raises(errors.QueueWorkflowsError) as error:
            client.runs.get("r")
        found[f"client of {url}"] = f"{error.value} {error.value!r}"
    for content in (json.dumps({"detail": f"{TEXT} {SECRETS}"}), json.dumps({"title": DSN}), TEXT):
        transport = httpx.MockTransport(
            lambda _, content=content: httpx.Response(500, text=content)
        )
        with (
            httpx.Client(transport=transport) as http,
            Client(http=http, token=CANARY, retries=0) as client,
            pytest.raises(errors.ServiceFailed) as failed,
        ):
            client.runs.get("r")
        found[f"client that got {content:.20}"] = str(failed.value)
    with pytest.raises(errors.InvalidConfig) as refused:
        Client(token=f"{CANARY} ")
    return found | {"client with a token": str(refused.value)}


def test_a_secret_is_in_no_output(
    app: flow.Flow, conn: Any, sent: Sent, caplog: pytest.LogCaptureFixture
) -> None:
    declare.install(spend, lose, spending)
    queue_workflows.register_ingest_task("pay", pay, queue="load")
    run_id = runs.submit("spending", inputs={"secrets": SECRETS})["id"]
    job_id = jobs.enqueue("pay", queue="load", args=SECRETS, headers={"cookie": CANARY, "dsn": DSN})
    waiting = jobs.enqueue("pay", queue="load", args=SECRETS, available_at=TOMORROW)
    cancelled = jobs.enqueue("pay", queue="load", args=SECRETS)
    jobs.cancel_many([cancelled], by=TEXT)
    app.go()
    app.work("load")
    events.send("paid", value=SECRETS)
    events.send("late", value=DSN)
    workers.disable("box", "gpu", by=TEXT, reason=TEXT, until=timedelta(hours=1))
    queues.pause("load", by=TEXT)
    nodes = [row["id"] for row in runs.nodes(run_id)]

    outputs = sent() | pages(run_id, [*nodes, job_id, waiting, cancelled])
    outputs |= replies(run_id, job_id, waiting) | refusals_of_clients()
    outputs["logs"] = caplog.text
    for name in ("spans", "hook of alerts", "command of alerts", "METRIC_PATH", "AUDIT_LOG_PATH"):
        assert "***" in outputs[name], name
    assert {name: text for name, text in outputs.items() if "c4nary" in text} == {}
