"""The cause of a lapsed lease, database or worker, and the notes that a worker leaves."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from queue_workflows import db
from queue_workflows.engine import job_tables
from queue_workflows.runtime import clock, identity
from queue_workflows.worker import note_reporter, notes, renewal_failures
from tests.support.clocks import Clock

LEASE = job_tables.Lease(job_tables.INGEST_JOBS, "j", "w:1:m:x", 3)


class DedicatedConnection:
    """What a dedicated connection reports about itself."""

    failure: psycopg.Error | None = None
    waiting_s = 0.0


def renewals(lease_s: float = 8.0) -> tuple[renewal_failures.Renewals, DedicatedConnection, Clock]:
    kept, now = DedicatedConnection(), Clock(100.0)
    return renewal_failures.Renewals(lease_s, cast("db.DedicatedConnection", kept), now), kept, now


def watch(made: renewal_failures.Renewals, now: Clock[float], seconds: float) -> None:
    """The thread that decides runs for that long."""
    for _ in range(int(seconds / 0.5)):
        now.now += 0.5
        made.watched()


@pytest.mark.parametrize("how", ["refused", "another failed", "no reply"])
def test_an_unreachable_database_is_the_cause(how: str) -> None:
    made, kept, now = renewals()
    assert not made.blame_database()
    if how == "refused":
        made.refused(db.OperationalError("the connection is lost"))
    elif how == "another failed":
        kept.failure = db.InterfaceError("closed")
    else:
        kept.waiting_s = 5.0
    watch(made, now, 6)
    assert made.blame_database()
    kept.failure, kept.waiting_s = None, 0.0
    made.renewed(now.now)
    assert not made.blame_database()


def test_a_refused_value_of_the_handler_is_not_the_databases_fault() -> None:
    made, _, now = renewals()
    made.refused(psycopg.errors.UntranslatableCharacter())
    watch(made, now, 6)
    assert not made.blame_database()


@pytest.mark.parametrize(("lease_s", "held_up_s", "blamed"), [
    (8.0, 1.9, True), (8.0, 2.1, False), (4.0, 1.9, True), (100.0, 24.0, True),
    (100.0, 26.0, False),
])  # fmt: skip
@pytest.mark.parametrize("since_then", [0.0, 2.0])
def test_a_process_that_stalled_itself_does_not_blame_the_database(
    lease_s: float, held_up_s: float, blamed: bool, since_then: float
) -> None:
    made, kept, now = renewals(lease_s)
    kept.waiting_s = 50.0
    watch(made, now, 2)
    now.now += held_up_s
    if since_then:
        made.watched()
    watch(made, now, since_then)
    assert made.blame_database() is blamed
    assert made.starved is not blamed


@pytest.mark.parametrize("noted", [False, True], ids=["not noted yet", "noted"])
@pytest.mark.parametrize(
    ("before_s", "since_s", "starved"), [(5.0, 0.1, False), (0.0, 5.0, True), (0.4, 1.9, False)]
)
def test_a_renewal_forgets_what_was_before_it_was_sent_and_no_stall_since(
    before_s: float, since_s: float, starved: bool, noted: bool
) -> None:
    made, _, now = renewals()
    now.now += before_s
    sent = now.now
    now.now += since_s
    if noted:
        made.watched()
    made.renewed(sent)
    assert made.starved is starved
    now.now += 0.5
    made.renewed(now.now)
    assert not made.starved


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUEUE_WORKFLOWS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://u@nowhere/d")
    return tmp_path / "state"


def test_a_note_is_found_by_workers_on_the_same_database_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes.write_note(["w:1:m:x"], [LEASE])
    (path,) = notes.paths()
    assert path.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    with path.open("rb") as file:
        note = notes.read(file, path)
    assert note is not None
    assert (note.leases, note.workers, note.pid) == ([LEASE], ["w:1:m:x"], os.getpid())
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://u@nowhere/other")
    assert notes.paths() == []


def test_a_folder_that_others_may_write_holds_no_notes(folder: Path) -> None:
    notes.write_note([], [LEASE])
    assert len(notes.paths()) == 1
    folder.chmod(0o777)
    assert notes.paths() == []
    notes.write_note([], [LEASE])
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_is_a_link_holds_no_notes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    notes.write_note([], [LEASE])
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "[" * 5000, '{"leases": [["other", "j", "w", 1]]}', "\x00", '{"leases": 3}',
])  # fmt: skip
def test_what_is_no_note_is_removed(folder: Path, text: str) -> None:
    notes.write_note([], [LEASE])
    (path,) = notes.paths()
    path.write_text(text)
    assert note_reporter.Reporter(cast("db.DedicatedConnection", None)).report()
    assert list(folder.iterdir()) == []


def note(**more: Any) -> notes.Note:
    given = {
        "pid": os.getpid(), "machine": identity.machine(), "boot": identity.boot_id(),
        "at": clock.boot_s(), "workers": [], "leases": [],
    }  # fmt: skip
    return notes.Note(**cast("Any", given | more))


@pytest.mark.parametrize(("more", "dead"), [
    ({}, True), ({"pid": 1}, False), ({"pid": 2**22 + 5}, True), ({"pid": 1, "at": -100.0}, True),
    ({"pid": 1, "boot": "another"}, True), ({"pid": 2**22 + 5, "machine": "another"}, False),
])  # fmt: skip
def test_a_note_is_reported_once_its_process_has_ended(more: dict[str, Any], dead: bool) -> None:
    if "at" in more:
        more = more | {"at": clock.boot_s() - notes.DEAD_AFTER_S}
    assert note(**more).writer_has_ended() is dead


def test_a_note_of_a_process_that_runs_stays(folder: Path) -> None:
    notes.write_note([], [LEASE])
    (path,) = notes.paths()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 1}))
    assert not note_reporter.Reporter(cast("db.DedicatedConnection", None)).report()
    assert path.exists()


def test_the_note_of_an_exit_is_reported_only_after_the_process_or_not_at_all(
    folder: Path,
) -> None:
    reporter = note_reporter.Reporter(cast("db.DedicatedConnection", None))
    own = notes.ExitNote()
    own.write(["w:1:m:x"], [LEASE])
    (first,) = notes.paths()
    own.write(["w:1:m:x"], [])
    (second,) = notes.paths()
    assert first != second
    assert not reporter.report(), "this process still runs"
    own.withdraw()
    assert list(folder.iterdir()) == []
    own.withdraw()
    own.write([], [])
    del own  # as at the end of the process
    (path,) = notes.paths()
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
