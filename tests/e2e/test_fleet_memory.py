"""Several real workers that fill one memory: they wait for each other, and never all for ever."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

from queue_workflows import node_queue, workers
from tests.support import commands, slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import enqueued

SCRIPT = "queue-claim-worker"
APP = ("--app", "tests.support.slot_app:setup", "--queue", slot_app.QUEUE)
STALE_S = 2.0


@pytest.fixture
def cli(db: ModuleType, dsn: str) -> Generator[Commands]:
    """Starts workers for which memory is always full; none outlives the test."""
    with commands.commands(
        QUEUE_WORKFLOWS_DB_URL=dsn,
        QUEUE_WORKFLOWS_CLAIM_POLL_S="0.05",
        QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC="0.1",
        QUEUE_WORKFLOWS_STALE_WORKER_AFTER_S=str(STALE_S),
        MEMORY_CHECK_INTERVAL="0.1",
        MEMORY_THROTTLE_THRESHOLD="0.001",
        MEMORY_RESUME_THRESHOLD="0.001",
    ) as made:
        slot_app.setup()
        yield made


def statuses(ids: list[str]) -> Counter[str]:
    found = [node_queue.get_ingest_job(each) for each in ids]
    return Counter(each["status"] for each in found if each is not None)


def states() -> list[str]:
    return sorted(each["state"] for each in workers.list())


def started(cli: Commands, *shapes: tuple[str, ...]) -> list[Command]:
    """Workers of these shapes, which have reported."""
    made = [cli.start(SCRIPT, *APP, *each) for each in shapes]
    until(lambda: states() == ["idle"] * len(shapes), timeout_s=60)
    return made


@pytest.mark.parametrize(
    "shapes",
    [((), ()), (("--slots", "2"), ("--slots", "2")), ((), ("--slots", "1"), ("--batch", "5"))],
    ids=["plain", "slots", "mixed"],
)
def test_workers_whose_memory_never_gets_free_finish_all_jobs(
    cli: Commands, shapes: tuple[tuple[str, ...], ...]
) -> None:
    fleet = started(cli, *shapes)
    ids = [enqueued("quick", number=number) for number in range(20)]
    until(lambda: statuses(ids) == {"completed": 20}, timeout_s=60)
    for each in fleet:
        each.send(signal.SIGTERM)
        assert each.wait() == 0, each.err


def test_a_worker_waits_for_the_job_of_another_and_says_so(cli: Commands, tmp_path: Path) -> None:
    fleet = started(cli, (), ())
    long = enqueued("waits", folder=str(tmp_path))
    until(lambda: states() == ["busy", "throttled"])
    late = [enqueued("quick", number=number) for number in range(3)]
    shown = cli.run("queue-workflows", "workers")
    (line,) = [each for each in shown.out.splitlines() if " throttled " in each]
    assert "RAM at " in line and "(limit 0.001 %)" in line
    why = cli.run("queue-workflows", "why", late[0])
    assert "it waits for memory: RAM at " in why.out
    status = cli.run("queue-workflows", "status")
    assert "throttled" in status.out
    assert statuses(late) == {"queued": 3}
    slot_app.let_go(tmp_path)
    until(lambda: statuses([long, *late]) == {"completed": 4})
    for each in fleet:
        each.send(signal.SIGTERM)
        assert each.wait() == 0, each.err


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_dead_or_stopped_holds_back_the_others_for_a_while_only(
    cli: Commands, tmp_path: Path, signum: signal.Signals
) -> None:
    victim, other = started(cli, (), ())
    enqueued("waits", folder=str(tmp_path))
    until(lambda: states() == ["busy", "throttled"])
    busy = next(each["pid"] for each in workers.list() if each["state"] == "busy")
    if busy != victim.process.pid:
        victim, other = other, victim
    victim.send(signum)
    late = enqueued("quick", number=1)
    until(lambda: statuses([late]) == {"completed": 1}, timeout_s=STALE_S + 30)
    assert other.process.poll() is None
    victim.send(signal.SIGKILL)
    other.send(signal.SIGTERM)
    assert other.wait() == 0, other.err
