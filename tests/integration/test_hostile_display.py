"""Every command that reads or removes works on every row, and prints nothing that harms."""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from queue_workflows import config
from queue_workflows import db as engine
from queue_workflows.__main__ import main
from tests.support import hostile

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
RUN = {"workflow_name": "w", "status": "queued"}
NODE = {"run_id": "parent", "node_id": "n", "node_module": "m", "queue": "cpu", "status": "queued"}
INGEST = {"task_name": "t", "queue": "fetch", "status": "queued"}


class Said(NamedTuple):
    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    def is_fine(self) -> bool:
        """It ended in order, printed no traceback and nothing that a terminal would obey."""
        text = (self.out + self.err).replace("\n", "")
        assert not {unicodedata.category(char) for char in text} & HIDDEN, self
        assert "Traceback" not in self.err and "unexpected error" not in self.err, self
        assert self.code in (0, 1, 2), self
        assert self.code == 0 or self.err.startswith("queue-workflows") or self.out, self
        if self.code == 2:
            assert self.err.count("\n") == 1, self
        if "--json" in self.argv and self.out:
            json.loads(self.out, parse_constant=_refuse)
        return True


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture
def said(
    fresh_database: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Generator[Callable[..., Said]]:
    """Runs a command in this process, on a database whose constraints are gone."""
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", fresh_database)
    engine.bootstrap()
    close = engine.close_pool
    # A thousand commands would open as many pools.
    monkeypatch.setattr(engine, "close_pool", lambda: None)

    def call(*argv: str) -> Said:
        config.reset_for_tests()
        return Said(argv, main(argv), *capfd.readouterr())

    yield call
    close()


@pytest.fixture
def conn(said: object) -> Generator[Any]:
    with engine.connect() as own:
        hostile.without_checks(own)
        yield own


LISTS = [
    ("runs", "--limit", "1000"), ("runs",), ("status",), ("inputs",), ("queues",), ("workers",),
    ("models",), ("jobs", "list", "--limit", "10000"), ("doctor",), ("audit",),
    ("prune", "--dry-run"), ("health",), ("samples", "--past", "1d", "--host", "h"),
]  # fmt: skip


def failures_of(said: Callable[..., Said], calls: list[tuple[str, ...]]) -> list[str]:
    failures: list[str] = []
    for argv in calls:
        try:
            said(*argv).is_fine()
        except BaseException as error:
            failures.append(f"{argv}: {type(error).__name__}: {str(error)[-1500:]}")
    return failures


def lists() -> list[tuple[str, ...]]:
    return [(*argv, *more) for argv in LISTS for more in ((), ("--json",))]


def dump(name, failures):
    from pathlib import Path
    Path(f"/tmp/display_fail_{name}.txt").write_text("\n\n".join(failures))
    assert not failures, len(failures)


def calls(rows, *commands):
    return [(*c.split(), "--", row.id) for row in rows for c in commands]


def test_runs(conn: Any, said: Callable[..., Said]) -> None:
    began = time.monotonic()
    rows = [*hostile.fill(conn, "workflow_runs", RUN, "id")]
    failures = failures_of(said, lists())
    failures += failures_of(said, calls(rows, "show", "show --json", "show --full", "why", "cancel", "retry", "cancel"))
    print(len(rows), time.monotonic() - began)
    left = conn.execute("SELECT id, status FROM workflow_runs WHERE status IN ('queued', 'running')").fetchall()
    print("left", left[:20])
    dump("runs", failures)


@pytest.mark.parametrize("status", ["queued", "running", "awaiting_input", "failed"])
def test_nodes(conn: Any, said: Callable[..., Said], status: str) -> None:
    began = time.monotonic()
    conn.execute("INSERT INTO workflow_runs (id, workflow_name, status) VALUES ('parent', 'w', 'running')")
    rows = [*hostile.fill(conn, "workflow_node_jobs", NODE | {"status": status}, "id")]
    failures = failures_of(said, lists() + [("show", "parent"), ("show", "parent", "--json"), ("show", "parent", "--full")])
    failures += failures_of(said, calls(rows, "show", "show --json", "why", "why --json", "cancel", "retry", "cancel"))
    print(len(rows), time.monotonic() - began)
    dump(f"nodes_{status}", failures)


@pytest.mark.parametrize("status", ["queued", "running", "failed"])
def test_ingest(conn: Any, said: Callable[..., Said], status: str) -> None:
    began = time.monotonic()
    rows = [*hostile.fill(conn, "ingest_jobs", INGEST | {"status": status}, "id")]
    failures = failures_of(said, lists())
    failures += failures_of(said, calls(rows, "show", "show --json", "jobs show", "why", "cancel", "jobs retry", "retry", "jobs cancel", "jobs delete"))
    left = conn.execute("SELECT id, status FROM ingest_jobs").fetchall()
    print("left", left[:20])
    print(len(rows), time.monotonic() - began)
    dump(f"ingest_{status}", failures)
