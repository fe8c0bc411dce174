"""A worker without slots: one job at a time in an executor; it ends with a job that it ends."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

from queue_workflows import config, db, jobs, node_queue, run_store, workers
from tests.support import card_app, commands, constants, slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import enqueued, row, stopped

SCRIPT = "queue-claim-worker"
APP = ("--app", "tests.support.slot_app:setup")


@pytest.fixture
def cli(db: ModuleType, dsn: str) -> Generator[Commands]:
    """Starts workers on the test database; none outlives the test."""
    env = {"QUEUE_WORKFLOWS_HOST_LABEL": "box", "QUEUE_WORKFLOWS_CRASH_BACKOFF_S": "0.1"}
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn, **env) as made:
        slot_app.setup()
        yield made


def worker(cli: Commands, *more: str) -> Command:
    return cli.start(SCRIPT, "--queue", slot_app.QUEUE, *APP, *more)


def in_folder(task: str, folder: Path) -> str:
    folder.mkdir()
    return enqueued(task, folder=str(folder))


def gpu_node(module: str) -> str:
    """A node of a run of its own that needs a model."""
    run_id = run_store.insert_run(workflow_name="single", status="running")["id"]
    return node_queue.enqueue_node_job(
        run_id=run_id, node_id="n", node_module=module, queue="gpu", required_model="sketch",
        inputs={},
    )  # fmt: skip


@pytest.mark.parametrize("task", ["segfaults", "exits_at_once", "kills_itself", "closes_all"])
def test_a_handler_that_crashes_is_charged_and_its_worker_goes_on(
    cli: Commands, tmp_path: Path, task: str
) -> None:
    crashed = in_folder(task, tmp_path / "job")
    running = worker(cli)
    until(lambda: row(crashed)["crash_count"] == 1)
    after = enqueued("quick", number=1)
    until(lambda: row(after)["status"] == "completed")
    assert row(after)["result"]["pid"] != running.process.pid
    stopped(running)


def test_a_worker_takes_the_longest_lease(cli: Commands) -> None:
    job_id = enqueued("quick", number=1)
    longest_s = constants.value("worker.shapes.MAX_LEASE_S")
    running = worker(cli, "--lease-seconds", f"{longest_s:.0f}")
    until(lambda: row(job_id)["status"] == "completed")
    stopped(running)


@pytest.mark.parametrize("limit_s", ["5e-324", "1e-9", "0.0009"])
def test_a_time_limit_that_no_worker_can_measure_ends_its_job_and_not_the_worker(
    cli: Commands, conn: db.Connection, tmp_path: Path, limit_s: str
) -> None:
    late, beside = in_folder("starts", tmp_path / "job"), enqueued("quick", number=2)
    conn.execute(f"UPDATE ingest_jobs SET timeout_s = {limit_s} WHERE id = %s", (late,))
    running = worker(cli)
    until(lambda: row(beside)["status"] == "completed")
    assert (row(late)["status"], row(late)["claim_no"]) == ("failed", 1)
    assert f"its time limit of {float(limit_s):g} s is over" in row(late)["error"]
    assert not slot_app.starts_of(tmp_path / "job")
    stopped(running)


def test_off_hard_hands_its_job_back_and_ends_the_worker(cli: Commands, tmp_path: Path) -> None:
    held = in_folder("waits", tmp_path / "job")
    running = worker(cli)
    until(lambda: slot_app.starts_of(tmp_path / "job"))
    workers.disable("box", slot_app.QUEUE, stop_policy="hard")
    assert running.wait() == 79, running.err
    assert (row(held)["status"], row(held)["attempts"], row(held)["crash_count"]) == (
        "queued", 0, 0,
    )  # fmt: skip


def test_an_idle_worker_that_is_off_parks_and_goes_on(cli: Commands) -> None:
    running = worker(cli)
    first = enqueued("quick", number=1)
    until(lambda: row(first)["status"] == "completed")
    workers.disable("box", slot_app.QUEUE, stop_policy="hard")
    until(lambda: [each["state"] for each in workers.list()] == ["parked"])
    second = enqueued("quick", number=2)
    workers.enable("box", slot_app.QUEUE)
    until(lambda: row(second)["status"] == "completed")
    stopped(running)


@pytest.mark.parametrize("how", [(), ("--inline",)], ids=["executor", "inline"])
def test_off_hard_ends_a_gpu_worker_that_holds_a_model_and_no_job(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    monkeypatch.setenv(card_app.FOLDER, str(tmp_path))
    card_app.install_nvidia_smi(tmp_path / "tools")
    path = f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}"
    drawn = gpu_node("draws")
    running = cli.start(
        SCRIPT, "--queue", "gpu", "--app", "tests.support.card_app:setup", *how,
        PATH=path, QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC="0.5",
    )  # fmt: skip
    until(lambda: (node_queue.get_node_job(drawn) or {})["status"] == "completed")
    until(lambda: any(each["current_model"] for each in workers.list()))
    workers.disable("box", "gpu", stop_policy="hard")
    assert running.wait() == 79, running.err
    assert not any(each["current_model"] for each in workers.list())


def test_its_process_is_replaced_and_it_ends_when_nothing_is_left(cli: Commands) -> None:
    ids = [enqueued("quick", number=number) for number in range(6)]
    running = worker(cli, "--max-jobs", "2", "--burst")
    assert running.wait() == 0, running.err
    assert len({row(each)["result"]["pid"] for each in ids}) == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--inline", "--slots", "2"), "--inline is for one queue"),
        (("--inline", "--async"), "--inline is for one queue"),
        (("--inline", "--burst"), "exclude --inline"),
    ],
)
def test_what_cannot_be_inline_is_refused(cli: Commands, more: tuple[str, ...], words: str) -> None:
    refused = worker(cli, *more)
    assert refused.wait() == 2
    assert words in refused.err


@pytest.mark.parametrize("more", [(), ("--supervise",)], ids=["alone", "below a parent"])
def test_inline_a_handler_runs_in_the_process_of_the_worker(
    cli: Commands, more: tuple[str, ...]
) -> None:
    job_id = enqueued("quick", number=1)
    running = worker(cli, "--inline", *more)
    until(lambda: row(job_id)["status"] == "completed")
    pid = row(job_id)["result"]["pid"]
    assert [each["pid"] for each in workers.list()] == [pid]
    assert (pid == running.process.pid) is not bool(more)
    stopped(running)


IN_PROCESS = """
import os, sys, threading
import queue_workflows
from queue_workflows.claim_worker import ClaimWorker, main

queue_workflows.configure(ingest_queues=("work",))
seen = []
def mine(*, number):
    seen.append(number)
    worker.stop()
    return {"pid": os.getpid()}
queue_workflows.register_ingest_task("mine", mine)
more = {"inline": True} if sys.argv[1] == "inline" else {"on_exit": print}
worker = ClaimWorker(queue="work", **more)
worker.run_forever()
assert seen == [1], seen
"""


@pytest.mark.parametrize("way", ["inline", "on_exit"])
def test_an_app_can_keep_its_handlers_in_its_own_process(
    cli: Commands, tmp_path: Path, way: str
) -> None:
    (tmp_path / "own.py").write_text(IN_PROCESS)
    config.register_ingest_task("mine", print)
    job_id = enqueued("mine", number=1)
    running = cli.start("python", str(tmp_path / "own.py"), way)
    assert running.wait() == 0, running.err
    assert row(job_id)["result"]["pid"] == running.process.pid


IN_THREADS = """
import sys, threading
from queue_workflows.claim_worker import main
threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.exit(main(["--queue", "work", "--burst", "--app", "tests.support.slot_app:setup"]))
"""


def test_what_needs_executors_is_refused_where_nothing_can_be_forked(
    cli: Commands, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(IN_THREADS)
    refused = cli.start("python", str(tmp_path / "own.py"))
    assert refused.wait() == 2
    assert "--burst need a process that can fork" in refused.err


OWN_GPU = """
from queue_workflows import config, gpu_model_cache
from queue_workflows.claim_worker import ClaimWorker
from tests.support import card_app

card_app.setup()
config.get_config().builtin_model_registrar()
def looks(model_handle):
    return {"same": gpu_model_cache.gpu_model_cache().current_model == "sketch"}
config.register_node("looks", looks)
ClaimWorker(queue="gpu").run_forever()
"""


def test_the_model_cache_of_a_handler_is_that_of_its_worker(
    cli: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(card_app.FOLDER, str(tmp_path))
    card_app.install_nvidia_smi(tmp_path / "tools")
    (tmp_path / "own.py").write_text(OWN_GPU)
    path = f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}"
    looked = gpu_node("looks")
    cli.start(
        "python", str(tmp_path / "own.py"),
        PATH=path, PYTHONPATH=str(Path.cwd()),
    )  # fmt: skip
    until(lambda: (node_queue.get_node_job(looked) or {})["status"] == "completed")
    assert (node_queue.get_node_job(looked) or {})["context_delta"] == {"same": True}


OWN_LAUNCHER = """
import logging, os, sys, threading, time
import queue_workflows
from queue_workflows.claim_worker import ClaimWorker, main

def too_long(*, number):
    time.sleep(60)

logging.basicConfig(level="INFO")
queue_workflows.configure(ingest_queues=("work",))
queue_workflows.register_ingest_task("mine", lambda *, number: {"word": WORD, "pid": os.getpid()})
queue_workflows.register_ingest_task("too_long", too_long)
WORD = sys.argv[2]
print("pid", os.getpid(), flush=True)
if "threads" in sys.argv[1]:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if "main" in sys.argv[1]:
    sys.exit(main(["--queue", "work"]))
ClaimWorker(queue="work").run_forever()
print("went on")
"""


@pytest.mark.parametrize("way", ["main", "class", "main, threads", "class, threads"])
def test_an_app_with_a_launcher_of_its_own_keeps_its_configuration_and_exit_codes(
    cli: Commands, tmp_path: Path, way: str
) -> None:
    (tmp_path / "own.py").write_text(OWN_LAUNCHER)
    for task in ("mine", "too_long"):
        config.register_ingest_task(task, print)
    first = enqueued("mine", number=1)
    running = cli.start("python", str(tmp_path / "own.py"), way, "hello")
    until(lambda: row(first)["status"] == "completed")
    assert row(first)["result"]["word"] == "hello"
    inline = row(first)["result"]["pid"] == running.process.pid
    assert inline == ("threads" in way)
    assert running.err.count("cannot fork executors") == int(inline)
    late = jobs.enqueue(task_name="too_long", queue="work", args={"number": 1}, timeout_s=1)
    assert running.wait() == 75, running.err
    assert row(late)["status"] == "failed"
    assert "went on" not in running.out


KINDS = {"plain": (), "inline": ("--inline",), "batch": ("--batch", "4"), "slots": ("--slots", "2")}


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_is_recorded_whatever_encoding_the_environment_names(
    cli: Commands, kind: str
) -> None:
    text = "price in \N{EURO SIGN}"
    failed, completed = enqueued("refuses", text="price"), enqueued("answers", text=text)
    environment = {"PGCLIENTENCODING": "LATIN1", "PGOPTIONS": "-c client_encoding=LATIN1"}
    running = cli.start(SCRIPT, "--queue", slot_app.QUEUE, *APP, *KINDS[kind], **environment)
    until(lambda: row(completed)["status"] == "completed" and row(failed)["status"] == "failed")
    assert row(completed)["result"] == {"text": text}
    assert (row(failed)["error"], row(failed)["attempts"]) == (f"ValueError: {text}", 1)
    stopped(running)


LEAVES_LATIN1 = """
CREATE FUNCTION leaves_latin1() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM set_config('client_encoding', 'LATIN1', false);
    RETURN NEW;
END $$;
CREATE TRIGGER leaves_latin1 BEFORE UPDATE ON ingest_jobs FOR EACH ROW WHEN (NEW.status = 'running')
    EXECUTE FUNCTION leaves_latin1();
"""


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_driver_costs_a_worker_its_connection_alone(
    cli: Commands, kind: str
) -> None:
    with db.connect() as conn:
        conn.execute(LEAVES_LATIN1.encode())
        try:
            failed, after = enqueued("refuses", text="price"), enqueued("quick", number=1)
            running = cli.start(SCRIPT, "--queue", slot_app.QUEUE, *APP, *KINDS[kind])
            until(lambda: row(failed)["status"] == "failed" and row(after)["status"] == "completed")
            assert row(failed)["error"] == "ValueError: price in \N{EURO SIGN}"
            assert row(failed)["claim_no"] == 1
            stopped(running)
        finally:
            conn.execute("DROP FUNCTION leaves_latin1 CASCADE")


def test_adapters_of_the_app_do_not_matter_to_its_worker(cli: Commands) -> None:
    refused, answered = (enqueued(task, text="unstorable") for task in ("refuses", "answers"))
    app = ("--app", "tests.support.slot_app:setup_dumper")
    running = cli.start(SCRIPT, "--queue", slot_app.QUEUE, *app, "--inline")
    until(lambda: row(answered)["status"] == "completed")
    assert row(answered)["result"] == {"text": "unstorable"}
    assert (row(refused)["status"], row(refused)["error"]) == (
        "failed",
        "ValueError: unstorable in \N{EURO SIGN}",
    )
    stopped(running)
