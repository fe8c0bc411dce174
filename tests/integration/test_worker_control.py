"""The operator's switch: its rows, what it refuses, whom it wakes, and the command."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from queue_workflows import db as database
from queue_workflows import worker_control
from tests.support import ear, factories

Row = dict[str, Any]


@pytest.fixture
def heard(db: Any) -> Generator[ear.Ear]:
    made = ear.Ear()
    yield made
    made.close()


def rows() -> list[Row]:
    with database.connection() as conn:
        return conn.execute("SELECT * FROM worker_controls").fetchall()


class Worker:
    """A worker that says what is asked of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self._error = error

    def requeue_in_flight(self, reason: str) -> None:
        self.calls.append(("requeue", reason))
        if self._error is not None:
            raise self._error

    def clear_model(self) -> None:
        self.calls.append("clear")


@pytest.mark.usefixtures("db")
class TestRows:
    def test_absent_is_on(self) -> None:
        assert worker_control.get_worker_control("box", "cpu") is None
        assert worker_control.desired_state_for("box", "cpu") == "on"

    def test_the_switch_turns_one_host_and_queue_off_and_on(self) -> None:
        row = worker_control.disable_worker("box", "cpu", requested_by="ops")
        assert worker_control.get_worker_control("box", "cpu") == row
        given = [row[name] for name in ("desired_state", "stop_policy", "requested_by")]
        assert given == ["off", "hard", "ops"]
        assert worker_control.desired_state_for("box", "cpu") == "off"
        assert worker_control.desired_state_for("box", "gpu") == "on"
        assert worker_control.desired_state_for("other", "cpu") == "on"
        worker_control.enable_worker("box", "cpu")
        assert worker_control.desired_state_for("box", "cpu") == "on"
        (row,) = rows()
        assert row["requested_by"] is None

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"desired_state": "paused"}, "'paused'"),
            ({"desired_state": ""}, "''"),
            ({"desired_state": "off", "stop_policy": "gently"}, "'gently'"),
        ],
        ids=["state", "empty", "policy"],
    )
    def test_what_is_refused_is_refused_before_any_write(self, given: Row, named: str) -> None:
        with database.connection() as conn:
            with pytest.raises(ValueError, match=named):
                worker_control.set_worker_control("box", "cpu", conn=conn, **given)
            # The caller's transaction is as usable as it was.
            assert factories.one(conn, "SELECT count(*) FROM worker_controls") == 0

    def test_a_policy_of_the_host_is_stored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(worker_control.STOP_POLICIES, "gently", lambda *_, **__: None)
        assert worker_control.disable_worker("box", "cpu", stop_policy="gently")[
            "stop_policy"
        ] == "gently"  # fmt: skip

    def test_a_given_connection_is_joined(self) -> None:
        with database.connection() as conn:
            worker_control.set_worker_control("box", "cpu", desired_state="off", conn=conn)
            assert worker_control.desired_state_for("box", "cpu") == "on"
            conn.rollback()
        assert rows() == []
        with database.connection() as conn:
            worker_control.set_worker_control("box", "cpu", desired_state="off", conn=conn)
        assert worker_control.desired_state_for("box", "cpu") == "off"


def test_every_write_notifies_host_and_queue(heard: ear.Ear) -> None:
    wakes = [("worker_control", "box:cpu")]
    for turn in (worker_control.disable_worker, worker_control.disable_worker,
                 worker_control.enable_worker):  # fmt: skip
        turn("box", "cpu")
        assert heard.heard() == wakes
    with database.connection() as conn:
        conn.execute("UPDATE worker_controls SET desired_state = 'off'")
    assert heard.heard() == wakes


def test_a_write_that_is_rolled_back_notifies_nobody(heard: ear.Ear) -> None:
    with database.connection() as conn:
        worker_control.set_worker_control("box", "cpu", desired_state="off", conn=conn)
        conn.rollback()
    assert heard.heard() == []


def test_hard_requeues_then_clears_then_leaves() -> None:
    worker = Worker()
    worker_control.handler("hard")(worker, on_exit=worker.calls.append)
    assert worker.calls == [("requeue", "turned off"), "clear", 79]


def test_hard_leaves_even_without_a_database(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(database.OperationalError("away"))
    worker_control.handler("hard")(worker, on_exit=worker.calls.append)
    assert worker.calls[-1] == worker_control.EXIT_CONTROL_HARD_STOP
    assert "away" in caplog.text


def test_a_policy_that_nobody_registered_is_hard_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker()
    worker_control.handler("gently")(worker, on_exit=worker.calls.append)
    assert worker.calls[-1] == 79
    assert [(each.levelname, "'gently'" in each.message) for each in caplog.records] == [
        ("ERROR", True)
    ]


@pytest.mark.usefixtures("db")
class TestWatcher:
    @staticmethod
    def watcher(worker: Worker) -> worker_control.WorkerControlWatcher:
        return worker_control.WorkerControlWatcher(
            worker, host="box", queue="cpu", on_exit=worker.calls.append
        )

    def test_on_and_absent_let_the_worker_be(self) -> None:
        worker = Worker()
        assert self.watcher(worker).check_once() is False
        worker_control.enable_worker("box", "cpu")
        worker_control.disable_worker("box", "gpu")
        assert self.watcher(worker).check_once() is False
        assert worker.calls == []

    def test_a_policy_written_by_plain_sql_stops_it_hard(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with database.connection() as conn:
            factories.insert(
                conn, "worker_controls", host_label="box", queue="cpu",
                desired_state="off", stop_policy="typo",
            )  # fmt: skip
        worker = Worker()
        assert self.watcher(worker).check_once() is True
        assert worker.calls[-1] == 79
        assert "'typo'" in caplog.text

    def test_the_host_s_policy_is_called(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def gently(worker: Worker, *, on_exit: Any) -> None:
            worker.calls.append("gently")

        monkeypatch.setitem(worker_control.STOP_POLICIES, "gently", gently)
        worker_control.disable_worker("box", "cpu", stop_policy="gently")
        worker = Worker()
        assert self.watcher(worker).check_once() is True
        assert worker.calls == ["gently"]

    def test_the_knob_turns_it_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AI_LEADS_DISABLE_WORKER_CONTROL", "1")
        worker_control.disable_worker("box", "cpu")
        worker = Worker()
        assert self.watcher(worker).check_once() is False
        assert worker.calls == []


def test_a_database_without_the_table_is_on(
    fresh_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", fresh_database)
    try:
        database.bootstrap()
        with database.connection() as conn:
            conn.execute("DROP TABLE worker_controls CASCADE")
        assert worker_control.get_worker_control("box", "cpu") is None
        assert worker_control.desired_state_for("box", "cpu") == "on"
        with database.connection() as conn:
            assert worker_control.stop_policy_for(conn, "box", "cpu") is None
            assert factories.one(conn, "SELECT 1") == 1
    finally:
        database.close_pool()


@pytest.mark.usefixtures("db")
class TestMain:
    def test_writes_the_row_and_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["--queue", "gpu", "--off", "--host", "box", "--requested-by", "ops"]
        assert worker_control.main(argv) == 0
        assert capsys.readouterr().out == "box gpu: off\n"
        (row,) = rows()
        assert (row["host_label"], row["queue"], row["requested_by"]) == ("box", "gpu", "ops")
        assert worker_control.main(["--queue", "gpu", "--on", "--host", "box"]) == 0
        assert capsys.readouterr().out == "box gpu: on\n"
        assert worker_control.desired_state_for("box", "gpu") == "on"

    def test_the_host_is_this_one_by_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AI_LEADS_HOST_LABEL", "here")
        assert worker_control.main(["--queue", "cpu", "--off"]) == 0
        assert worker_control.desired_state_for("here", "cpu") == "off"

    def test_an_unknown_policy_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert worker_control.main(["--queue", "cpu", "--off", "--policy", "gently"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("queue-worker-control: ")
        assert "'gently'" in line
        assert rows() == []

    @pytest.mark.parametrize(
        "argv",
        [
            [],
            ["--queue", "cpu"],
            ["--on"],
            ["--queue", "cpu", "--on", "--off"],
            ["--queue", "cpu", "--on", "--unheard-of"],
        ],
        ids=" ".join,
    )
    def test_bad_options_exit_2(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as left:
            worker_control.main(argv)
        assert left.value.code == 2
        assert "usage: queue-worker-control" in capsys.readouterr().err
        assert rows() == []


def test_without_a_database_url_it_says_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert worker_control.main(["--queue", "cpu", "--on"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "QUEUE_WORKFLOWS_DB_URL" in line
    assert "--embedded" in line
