"""`queue-workflows supervise` restarts flagged workers, and runs commands without a shell."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import errors, node_queue, workers
from queue_workflows.cli import supervise
from queue_workflows.runtime import service, signals
from tests.support import factories, tabled
from tests.support.wait import patience, until
from tests.support.worker_views import alive

COMMANDS = {"cpu": ["restart-cpu"], "gpu": ["restart-gpu"]}


class Bench:
    """A bouncer whose commands are noted and whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.ran: list[str] = []
        self.works = True
        self.bouncer = supervise.Restarter("box", COMMANDS, run=self._run, now_fn=lambda: self.now)

    def _run(self, queue: str, words: list[str]) -> bool:
        assert words == COMMANDS[queue]
        self.ran.append(queue)
        return self.works

    def look(self, after_s: float = 0.0) -> list[str]:
        """The commands that one poll runs, that much later."""
        self.now += after_s
        self.ran.clear()
        self.bouncer.restart_due()
        return list(self.ran)


@pytest.fixture
def bench(conn: Any) -> Iterator[Bench]:
    made = Bench()
    yield made
    made.bouncer.close()


def flag(conn: Any, queue: str = "cpu", host: str = "box") -> None:
    """A silent worker of this host and queue with a running job, which the engine flags."""
    node_queue.upsert_worker_heartbeat(host_label=host, queue=queue, concurrency=1)
    if queue in ("cpu", "gpu"):
        factories.node(conn, queue=queue, status="running", claimed_by=host)
    else:
        factories.ingest(conn, queue=queue, status="running", claimed_by=host)
    conn.execute(
        "UPDATE worker_heartbeats SET last_seen = now() - interval '1 minute'"
        " WHERE (host_label, queue) = (%s, %s)",
        (host, queue),
    )
    assert node_queue.flag_stale_workers_holding_running_jobs()


def beat(queue: str = "cpu") -> None:
    node_queue.upsert_worker_heartbeat(host_label="box", queue=queue, concurrency=1)


# --- when


def test_a_flagged_worker_of_this_machine_is_restarted_once(conn: Any, bench: Bench) -> None:
    assert bench.look() == []
    flag(conn)
    flag(conn, host="elsewhere")
    assert bench.look() == ["cpu"]
    assert bench.look(after_s=10_000) == []


def test_each_flagging_is_acted_on(conn: Any, bench: Bench) -> None:
    flag(conn)
    assert bench.look() == ["cpu"]
    beat()
    assert bench.look(after_s=3600) == []
    flag(conn)
    assert bench.look() == ["cpu"]


def test_flaggings_in_a_row_wait_longer_up_to_a_bound(conn: Any, bench: Bench) -> None:
    waits: list[float] = []
    for _ in range(8):
        flag(conn)
        waited = 0.0
        while not bench.look():
            bench.now += 1
            waited += 1
        waits.append(waited)
        beat()
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300]
    flag(conn)
    assert bench.look(after_s=2 * supervise.MAX_DELAY_S + 1) == ["cpu"]
    beat()
    flag(conn)
    assert bench.look(after_s=9) == []
    assert bench.look(after_s=1) == ["cpu"]


def test_one_queues_wait_is_not_anothers(conn: Any, bench: Bench) -> None:
    flag(conn)
    assert bench.look() == ["cpu"]
    flag(conn, "gpu")
    assert bench.look() == ["gpu"]


def test_a_command_that_fails_is_tried_again(conn: Any, bench: Bench) -> None:
    bench.works = False
    flag(conn)
    assert bench.look() == ["cpu"]
    assert bench.look(after_s=9) == []
    assert bench.look(after_s=1) == ["cpu"]
    bench.works = True
    assert bench.look(after_s=20) == ["cpu"]
    assert bench.look(after_s=10_000) == []


def test_a_queue_that_is_off_is_left_alone_until_it_is_on(conn: Any, bench: Bench) -> None:
    flag(conn)
    workers.disable("box", "all", stop_policy="drain")
    assert bench.look() == []
    workers.enable("box", "all")
    assert bench.look() == ["cpu"]


def test_a_queue_that_nothing_restarts_is_logged_once(
    conn: Any, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    flag(conn, "mail")
    assert [bench.look(), bench.look()] == [[], []]
    said = [text for text in lines(caplog).splitlines() if "nothing restarts it" in text]
    assert len(said) == 1
    assert "the mail worker of box is flagged dead" in said[0]
    assert "add --bounce mail=... or --unit mail=..." in said[0]


def test_a_worker_that_came_back_meanwhile_is_left_alone(conn: Any) -> None:
    ran: list[str] = []

    def run(queue: str, _: list[str]) -> bool:
        ran.append(queue)
        beat("gpu")
        return True

    flag(conn)
    flag(conn, "gpu")
    bouncer = supervise.Restarter("box", COMMANDS, run=run)
    bouncer.restart_due()
    bouncer.close()
    assert ran == ["cpu"]


def test_no_restart_begins_once_it_is_to_stop(conn: Any, bench: Bench) -> None:
    flag(conn)
    bench.bouncer.restart_due(lambda: True)
    assert bench.ran == []


def test_an_outage_is_logged_once_and_survived(
    conn: Any, bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag(conn)
    caplog.set_level(logging.INFO)
    loop = service.Loop("supervise", [service.Task("bounce", 5.0, bench.bouncer.restart_due)])

    def look() -> list[str]:
        loop.wake()
        loop.run_due()
        return bench.ran

    with monkeypatch.context() as away:
        away.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://127.0.0.1:1/none_test")
        assert [look(), look()] == [[], []]
    assert len([r for r in caplog.records if r.message.startswith("supervise: ")]) == 1
    assert look() == ["cpu"]


# --- how


def runner(*, timeout_s: float = 30.0) -> tuple[Callable[..., bool], signals.Flag]:
    flag = signals.Flag()
    return functools.partial(supervise.run_command, stopped=flag, timeout_s=timeout_s), flag


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def lines(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_what_a_command_prints_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run, _ = runner()
    assert run("cpu", python("import sys; print('out'); print('err', file=sys.stderr)"))
    assert {"cpu: | out", "cpu: | err"} <= set(lines(caplog).splitlines())


def test_of_a_long_output_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run, _ = runner()
    assert run("cpu", python("print('x' * 100_000); print('the end')"))
    assert len(lines(caplog)) < supervise.OUTPUT_BYTES + 100
    assert "cpu: | the end" in lines(caplog)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["false"], "false ended with exit code 1"),
        (python("import os; os.kill(os.getpid(), 9)"), "was killed by signal 9"),
        (["/no/such/command"], "/no/such/command cannot be started: No such file or directory"),
    ],
)
def test_a_command_that_fails_is_an_error(
    caplog: pytest.LogCaptureFixture, words: list[str], said: str
) -> None:
    run, _ = runner()
    assert run("cpu", words) is False
    assert said in lines(caplog)


def test_no_shell_reads_the_words(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)
    run, _ = runner()
    assert run("cpu", ["echo", "$HOME;", f">{tmp_path}/x", "`id`", "a  b"])
    assert f"cpu: | $HOME; >{tmp_path}/x `id` a  b" in lines(caplog)
    assert list(tmp_path.iterdir()) == []


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(60)
"""


def test_a_command_that_does_not_end_is_killed_with_what_it_started(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    run, _ = runner(timeout_s=1.0)
    pids = tmp_path / "pids"
    assert run("cpu", [*python(STUBBORN), str(pids)]) is False
    assert "did not end within 1 s" in lines(caplog)
    found = [int(text) for text in pids.read_text().split()]
    assert len(found) == 2
    until(lambda: not [pid for pid in found if alive(pid)])


def test_a_stop_ends_a_running_command_within_a_second(tmp_path: Path) -> None:
    run, stop = runner()
    pids = tmp_path / "pids"
    done: list[bool] = []
    thread = threading.Thread(
        target=lambda: done.append(run("cpu", [*python(STUBBORN), str(pids)]))
    )
    thread.start()
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    asked = time.monotonic()
    stop.set()
    thread.join(30)
    assert done == [False]
    assert time.monotonic() - asked < patience(supervise.STOP_S)
    until(lambda: not [pid for pid in pids.read_text().split() if alive(int(pid))])


# --- options


def test_each_queue_has_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "systemctl"
    shutil.copy("/bin/true", fake)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert supervise.commands_of(
        ["gpu=env 'A=b c' true", "load.cbr=true --x=1"], ["cpu=queue-cpu.service"]
    ) == {
        "gpu": ["env", "A=b c", "true"],
        "load.cbr": ["true", "--x=1"],
        "cpu": ["systemctl", "restart", "queue-cpu.service"],
    }


def test_options_that_cannot_work_are_refused() -> None:
    cases: list[Any] = [
        ([], [], "nothing to restart: name a command per queue by --bounce"),
        (["cpu"], [], "--bounce 'cpu' should look like cpu=COMMAND"),
        (["cpu="], [], "should look like"),
        (["=true"], [], "should look like"),
        (["cpu='true"], [], "No closing quotation"),
        (
            ["cpu=no-such-command-here -x"],
            [],
            "names no command: 'no-such-command-here'",
        ),
        (["cpu=true", "cpu=false"], [], "is the second one of cpu"),
        ([], ["cpu=--now"], "names no unit: its name is one word"),
        ([], ["cpu=a b"], "names no unit: its name is one word"),
        ([], ["cpu="], "--unit 'cpu=' should look like"),
    ]
    for bounces, units, said in cases:
        with (
            tabled.case(bounces, units, said),
            pytest.raises(errors.InvalidConfig, match=said),
        ):
            supervise.commands_of(bounces, units)
