"""A short job may wait in an executor behind another one, as if it waited in its worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from queue_workflows import db, history, jobs
from tests.support import app_triggers, code_app, constants
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import charges, ended, row, stopped

pytestmark = pytest.mark.usefixtures("code_tasks")

TINY = "found = 1"
MANY = 60
"""Handlers that prove to be short, after which jobs are sent ahead of the end of others."""


def worker(cli: Commands, *more: str, **env: str) -> Command:
    options = ("--queue", code_app.QUEUE, "--app", "tests.support.code_app:setup", "--batch", "50")
    return cli.start("queue-claim-worker", *options, *more, **env)


def log_of(job_id: str) -> str:
    """Return what the last attempt of a job has printed."""
    found = history.get_job(job_id)
    assert found is not None
    log = found["attempts"][-1]["log"]
    return "" if log is None else log["text"]


WAITS = """
import pathlib, time
pathlib.Path({folder!r}, 'first').touch()
while not pathlib.Path({folder!r}, 'go').exists(): time.sleep(0.001)
"""
SEES_NEXT = """
import fcntl, os, struct, termios, time
def unread():
    for name in os.listdir('/proc/self/fd'):
        try:
            yield struct.unpack('i', fcntl.ioctl(int(name), termios.FIONREAD, bytes(4)))[0]
        except OSError:
            pass
ends = time.monotonic() + 0.3
while not (found := any(unread())) and time.monotonic() < ends:
    time.sleep(0.001)
"""
"""Finds whether the next job comes into a socket of the executor while this one runs."""


def test_the_next_job_is_sent_while_a_short_one_runs(cli: Commands) -> None:
    """On a busy machine a short handler may take long, so it is tried until it is seen."""
    running = worker(cli)

    def is_seen() -> bool:
        ids = [code_app.enqueued(TINY) for _ in range(MANY)]
        looks = [code_app.enqueued(SEES_NEXT), code_app.enqueued(TINY)]
        until(lambda: ended(*ids, *looks))
        return bool(code_app.found(row(looks[0])))

    until(is_seen)
    stopped(running)


PRINTS = {
    "print": "print('job {number}')",
    "no line end": "print('job {number}', end='')",
    "descriptor": "import os; os.write(1, b'job {number}')",
    "another process": "import subprocess; subprocess.run(['echo', 'job {number}'])",
    "stderr": "import sys; sys.stderr.write('job {number}')",
    "nothing": "found = {number}",
}


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_each_job_keeps_what_it_has_printed_and_nothing_else(
    cli: Commands, log_format: str
) -> None:
    codes = [*PRINTS.values()]
    texts = [codes[number % len(codes)].format(number=number) for number in range(150)]
    for _ in range(MANY):
        code_app.enqueued(TINY)
    ids = [code_app.enqueued(each) for each in texts]
    running = worker(cli, "--log-format", log_format)
    until(lambda: ended(*ids))
    stopped(running)  # what its last jobs have printed is stored by then
    for number, (job_id, text) in enumerate(zip(ids, texts, strict=True)):
        said = f"job {number}" if "job" in text else ""
        assert log_of(job_id).rstrip("\n") == said, text


def test_a_job_behind_one_that_dies_is_not_charged(cli: Commands) -> None:
    for _ in range(MANY):
        code_app.enqueued(TINY)
    dies = "print('the last words'); import sys; sys.stdout.flush(); import os; os._exit(3)"
    ids = [code_app.enqueued(dies if at % 4 == 1 else TINY, max_attempts=1) for at in range(12)]
    running = worker(cli, QUEUE_WORKFLOWS_CRASH_BACKOFF_S="0.1")
    killers = ids[1::4]
    until(lambda: all(row(each)["status"] in ("completed", "failed") for each in ids))
    for each in ids:
        crashes = charges(each)[2]
        assert crashes == (3 if each in killers else 0), row(each)
    stopped(running)  # what its last jobs have printed is stored by then
    for each in killers:
        assert "the last words" in log_of(each)


def test_a_job_that_is_cancelled_behind_a_long_one_never_begins(
    cli: Commands, tmp_path: Path
) -> None:
    for _ in range(MANY):
        code_app.enqueued(TINY)
    first = code_app.enqueued(WAITS.format(folder=str(tmp_path)))
    behind = code_app.enqueued(f"open({str(tmp_path / 'begun')!r}, 'a').close()")
    running = worker(cli)
    until((tmp_path / "first").exists)
    assert jobs.cancel(behind)
    until(lambda: ended(behind, status="cancelled"))
    (tmp_path / "go").touch()
    until(lambda: ended(first))
    assert not (tmp_path / "begun").exists()
    stopped(running)


def test_results_that_take_too_long_together_are_recorded_one_by_one(
    cli: Commands, conn: db.Connection
) -> None:
    ids = [code_app.enqueued(TINY) for _ in range(MANY)]
    ends = "OLD.status = 'running' AND NEW.status = 'completed'"
    with app_triggers.slow(conn, "ingest_jobs", ends, 0.1):
        running = worker(cli, **constants.env({"db.pool.STATEMENT_TIMEOUT_S": 1.0}))
        until(lambda: ended(*ids), timeout_s=60)
    # Those that wait too long meanwhile go back uncounted.
    assert {charges(each)[1:] for each in ids} == {(0, 0)}
    stopped(running)


def test_an_executor_gets_no_more_jobs_than_it_may_run(cli: Commands) -> None:
    ids = [code_app.enqueued(TINY) for _ in range(MANY)]
    running = worker(cli, "--max-jobs", "7")
    until(lambda: ended(*ids))
    pids = [row(each)["result"]["pid"] for each in ids]
    assert max(map(pids.count, pids)) == 7
    stopped(running)
