"""A secret in what an app raises or is given reaches no column of the engine's own, log or page."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

import queue_workflows
from queue_workflows import declare, errors, jobs, run_store, runs, schedules, steps
from queue_workflows.declare import node, workflow
from queue_workflows.runtime import log_format
from tests.support import console, factories, flow
from tests.support.asgi_service import post

CANARY = "c4nary-hunter2"
TEXT = f"cannot log in with password={CANARY} at postgres://u:{CANARY}@db/x"
DATA = {
    "context", "inputs", "args", "input_template", "resolved_inputs", "definition", "result",
    "context_delta", "headers", "output", "item", "value", "steps_done", "input_spec",
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
    caplog.handler.addFilter(masks := log_format.MaskSecrets())
    yield made
    caplog.handler.removeFilter(masks)
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
