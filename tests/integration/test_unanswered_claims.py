"""A claim whose reply comes too late, or never, counts no crash, since no handler has started."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from queue_workflows import db
from queue_workflows.engine import job_tables, recovery
from queue_workflows.types import Row
from queue_workflows.worker import claimer, note_reporter, notes
from tests.support import database, factories, proxy, transitions
from tests.support.wait import until

FAMILIES = ["node", "ingest"]
_TABLES = {"node": job_tables.NODE_JOBS, "ingest": job_tables.INGEST_JOBS}


class Asking:
    """A claimer behind the wire, whose claim of a job hangs without its reply."""

    def __init__(self, conn: db.Connection, wire: proxy.Proxy, family: str) -> None:
        self._conn, self._wire = conn, wire
        self.table = _TABLES[family]
        self.who = transitions.who("cpu" if family == "node" else "fetch", lease_s=60)
        self.claimer = claimer.Claimer(self.table, lambda: self.who)
        with database.environment(QUEUE_WORKFLOWS_DB_URL=wire.dsn):
            assert self.claimer.claim() is None  # the next claim needs no preparation
        self.job: Row = factories.node(conn) if family == "node" else factories.ingest(conn)
        self.found: list[Row | None] = []
        wire.mute()
        self._thread = threading.Thread(target=self._claim)
        self._thread.start()
        until(lambda: self.reread()["status"] == "running")

    def reread(self) -> Row:
        return factories.reread(self._conn, self.job)

    def _claim(self) -> None:
        try:
            self.found.append(self.claimer.claim())
        except db.Error:
            self.found.append(None)

    def charge(self) -> None:
        """Let the lease lapse and count the crash."""
        change = f"UPDATE {self.table.name} SET lease_expires_at = now() - interval '1 second'"
        self._conn.execute(change.encode())
        recovery.reclaim_lapsed(self._conn, self.table)
        assert self.reread()["crash_count"] == 1

    def end(self, *, cut: bool) -> None:
        """Let the reply arrive, or close the connection without it."""
        if cut:
            self._wire.cut()
        self._wire.thaw()
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture
def asking(request: Any, conn: db.Connection, wire: proxy.Proxy) -> Iterator[Asking]:
    made = Asking(conn, wire, request.param)
    try:
        yield made
    finally:
        made.end(cut=True)
        made.claimer.close()


@pytest.mark.parametrize("asking", FAMILIES, indirect=True)
def test_a_reply_that_comes_after_the_lease_charges_nothing(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking.charge()
    monkeypatch.setattr(claimer, "LATE", 0.0)
    asking.end(cut=False)
    assert asking.found == [None]
    assert asking.reread()["crash_count"] == 0
    assert asking.claimer.unanswered() == {}


@pytest.mark.parametrize("asking", FAMILIES, indirect=True)
def test_a_reply_that_never_comes_charges_nothing(asking: Asking) -> None:
    asking.charge()
    assert asking.claimer.unanswered().keys() == {asking.who.worker_id}
    asking.end(cut=True)
    assert asking.found == [None]
    assert asking.reread()["crash_count"] == 1
    asking.claimer.claim()
    assert asking.reread()["crash_count"] == 0
    assert asking.claimer.unanswered() == {}


@pytest.mark.parametrize("asking", FAMILIES, indirect=True)
def test_the_note_of_an_exit_before_the_reply_charges_nothing(
    asking: Asking, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_STATE_DIR", str(tmp_path))
    asking.charge()
    notes.write_note([asking.who.worker_id], [], asking.claimer.unanswered())
    dedicated = db.DedicatedConnection()
    try:
        for _ in range(2):
            note_reporter.Reporter(dedicated).report()
            assert asking.reread()["crash_count"] == 0
    finally:
        dedicated.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("other", ["worker", "known", "earlier"])
def test_no_other_crash_is_subtracted(conn: db.Connection, family: str, other: str) -> None:
    job = (factories.node if family == "node" else factories.ingest)(conn)
    job = (transitions.claim_node if family == "node" else transitions.claim_ingest)(conn)
    table = _TABLES[family]
    worker_id = "other" if other == "worker" else job["worker_id"]
    keep = [job["id"]] if other == "known" else []
    ago_s = -60.0 if other == "earlier" else 1.0  # the claim was sent after this one
    conn.execute(f"UPDATE {table.name} SET lease_expires_at = now() - interval '1 second'".encode())
    recovery.reclaim_lapsed(conn, table)
    found = recovery.excuse_unanswered(conn, table, worker_id, asked_ago_s=ago_s, keep=keep)
    assert (found, factories.reread(conn, job)["crash_count"]) == (0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_is_locked_keeps_no_other_claim_of_a_note_charged(
    conn: db.Connection, family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_STATE_DIR", str(tmp_path))
    jobs: list[Row] = []
    for _ in range(2):
        (factories.node if family == "node" else factories.ingest)(conn)
        jobs.append(
            (transitions.claim_node if family == "node" else transitions.claim_ingest)(conn)
        )
    table = _TABLES[family]
    conn.execute(f"UPDATE {table.name} SET lease_expires_at = now() - interval '1 second'".encode())
    recovery.reclaim_lapsed(conn, table)
    for other in jobs:  # each note has the locked row first
        notes.write_note([], [job_tables.lease_of(table, each) for each in (jobs[0], other)])
    monkeypatch.setattr(note_reporter, "REPORT_FOR_S", 0.0)
    dedicated = db.DedicatedConnection(lambda made: made.execute("SET lock_timeout = '100ms'"))
    reporter = note_reporter.Reporter(dedicated)

    def crashes() -> list[int]:
        return [factories.reread(conn, job)["crash_count"] for job in jobs]

    try:
        with db.connect() as holder, holder.transaction():
            locked = f"SELECT FROM {table.name} WHERE id = %s FOR UPDATE".encode()
            holder.execute(locked, (jobs[0]["id"],))
            assert reporter.report() is False
            assert crashes() == [1, 0]
        assert reporter.report() is True
        assert crashes() == [0, 0]
    finally:
        dedicated.close()
