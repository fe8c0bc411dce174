"""Workers of GPUs as real processes: one for each GPU, whose jobs run in an executor of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import queue_workflows
from queue_workflows import db, jobs, models, node_queue, run_store, workers
from tests.support import card_app, commands, constants, slot_app
from tests.support.commands import Command, Commands
from tests.support.wait import until
from tests.support.worker_views import alive, begun, node_row, stopped

APP = "tests.support.card_app:setup"
SCRIPT = "queue-claim-worker"
Row = dict[str, Any]


@pytest.fixture
def cli(
    db: ModuleType, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[Commands]:
    """Starts workers on the test database, on a machine with two GPUs; none outlives the test."""
    monkeypatch.setenv(card_app.FOLDER, str(tmp_path))
    for name in (card_app.VISIBLE, "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    card_app.install_nvidia_smi(tmp_path / "tools")
    path = f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}"
    env = {"QUEUE_WORKFLOWS_HOST_LABEL": "box", "QUEUE_WORKFLOWS_DL_HEARTBEAT_SEC": "1"}
    with commands.commands(QUEUE_WORKFLOWS_DB_URL=dsn, PATH=path, **env) as made:
        yield made


def worker(cli: Commands, cards: str = "0", *more: str, app: str = APP, **env: str) -> Command:
    return cli.start(SCRIPT, "--queue", "gpu", "--cards", cards, "--app", app, *more, **env)


def queued(node: str, model: str | None = None, **inputs: Any) -> str:
    run_id = run_store.insert_run(workflow_name="single", status="running")["id"]
    return node_queue.enqueue_node_job(
        run_id=run_id, node_id="n", node_module=node, queue="gpu", required_model=model,
        inputs=inputs,
    )  # fmt: skip


def in_folder(tmp_path: Path, node: str, model: str | None = None) -> tuple[str, Path]:
    folder = tmp_path / f"{node}-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    return queued(node, model, folder=str(folder)), folder


def last_starts(made: list[tuple[str, Path]]) -> list[int]:
    """The process in which each of these jobs has begun last."""
    return [pid for _, folder in made for pid in slot_app.starts_of(folder)[-1:]]


def result(job_id: str) -> Row:
    return node_row(job_id)["context_delta"]


def ended(*ids: str, status: str = "completed") -> bool:
    return all(node_row(each)["status"] == status for each in ids)


def shown() -> dict[int, Row]:
    """The rows of living workers by their GPUs."""
    with db.connect() as conn:
        rows = conn.execute(
            "SELECT detail->'card' AS card, current_model, vram_total_mb, worker_id, pid, detail"
            "  FROM workers WHERE state NOT IN ('stopped', 'dead')"
        ).fetchall()
    return {each["card"]: each for each in rows}


def set_timeout(job_id: str, seconds: float) -> None:
    with db.connect() as conn:
        conn.execute(
            "UPDATE workflow_node_jobs SET timeout_s = %s WHERE id = %s", (seconds, job_id)
        )


# --- one process for each GPU ------------------------------------------------------------------


def test_each_gpu_runs_a_job_in_a_process_that_sees_it_alone(cli: Commands, tmp_path: Path) -> None:
    made = [in_folder(tmp_path, "waits") for _ in range(3)]
    running = worker(cli, "0,1")
    # A folder alone does not tell: its job may have begun in a process that is gone.
    until(lambda: len({*filter(alive, last_starts(made))}) == 2)
    until(lambda: {*shown()} == {0, 1} and all(row["vram_total_mb"] for row in shown().values()))
    assert {card: each["vram_total_mb"] for card, each in shown().items()} == {0: 24576, 1: 12288}
    listed = {each["worker_id"]: each["card"] for each in workers.list()}
    assert listed == {each["worker_id"]: card for card, each in shown().items()}
    slot_app.let_go(*(folder for _, folder in made))
    until(lambda: ended(*(job_id for job_id, _ in made)))
    results = [result(job_id) for job_id, _ in made]
    assert {each["card"] for each in results} == {"0", "1"}
    assert len({each["pid"] for each in results}) == 2
    assert all(each["at_load"] == each["hip"] == each["card"] for each in results)
    stopped(running)


def test_a_gpu_that_is_visible_alone_can_be_chosen(cli: Commands) -> None:
    job_id = queued("shows")
    running = worker(cli, "1", CUDA_VISIBLE_DEVICES="1")
    until(lambda: ended(job_id))
    stopped(running)
    assert result(job_id)["card"] == "1"


def test_an_app_whose_import_starts_threads_is_loaded_by_each_executor(cli: Commands) -> None:
    ids = [queued("draws", "sketch") for _ in range(2)]
    running = worker(cli, "1", app=f"{APP}_threads")
    until(lambda: ended(*ids))
    stopped(running)
    assert [result(each)["at_load"] for each in ids] == ["1", "1"]
    assert sorted(result(each)["cold"] for each in ids) == [False, True]


# --- models ------------------------------------------------------------------------------------


def test_a_model_stays_loaded_and_its_jobs_come_first(cli: Commands, tmp_path: Path) -> None:
    first, folder = in_folder(tmp_path, "draws_and_waits", "sketch")
    running = worker(cli)
    until(lambda: begun(folder))
    until(lambda: shown()[0]["current_model"] == "sketch")
    other, same = queued("draws", "photo"), queued("draws", "sketch")
    slot_app.let_go(folder)
    until(lambda: ended(first, other, same))
    assert node_row(same)["started_at"] < node_row(other)["started_at"]
    assert (result(same)["cold"], result(other)["cold"]) == (False, True)
    assert result(first)["pid"] == result(same)["pid"] == result(other)["pid"]
    assert card_app.journal("sketch") == ["load 0", "unload 0"]
    until(lambda: shown()[0]["current_model"] == "photo")
    assert shown()[0]["detail"]["model"]["est_vram_gb"] == 2.5
    with db.connect() as conn:
        learned = conn.execute(
            "SELECT model, loads, runs, est_vram_gb FROM gpu_models ORDER BY model"
        ).fetchall()
    found = {each["model"]: (each["loads"], each["runs"]) for each in learned}
    assert (found["photo"], found["sketch"]) == ((1, 1), (1, 2))
    assert {each["est_vram_gb"] for each in learned} == {2.5}
    with db.connect() as conn:
        noted = conn.execute(
            "SELECT event_type FROM workflow_node_events WHERE job_id = %s ORDER BY id", (other,)
        ).fetchall()
    events = [each["event_type"] for each in noted]
    assert events.index("model_load_start") < events.index("model_load_done")
    assert events.index("model_load_done") < events.index("completed")
    stopped(running)


def test_the_gpu_that_is_free_takes_a_job_of_its_model(cli: Commands, tmp_path: Path) -> None:
    held = {name: in_folder(tmp_path, "draws_and_waits", name) for name in ("sketch", "photo")}
    running = worker(cli, "0,1")
    until(lambda: begun(*(folder for _, folder in held.values())))
    until(lambda: {each["current_model"] for each in shown().values()} == {*held})
    names = ("photo", "sketch")
    following = {name: in_folder(tmp_path, "draws_and_waits", name) for name in names}
    for name in reversed(names):  # for the first GPU, the job of the other model is the older one
        slot_app.let_go(held[name][1])
        until(lambda name=name: begun(following[name][1]))
    slot_app.let_go(*(folder for _, folder in following.values()))
    until(lambda: ended(*(job_id for job_id, _ in following.values())))
    for name in names:
        assert result(following[name][0])["card"] == result(held[name][0])["card"]
        assert len(card_app.journal(name)) == 1
    stopped(running)


def test_a_model_that_does_not_load_fails_its_job_alone(cli: Commands) -> None:
    bad, good = queued("draws", "bad"), queued("draws", "sketch")
    running = worker(cli)
    until(lambda: ended(bad, status="failed") and ended(good))
    assert "no weights" in node_row(bad)["error"]
    stopped(running)


def test_an_idle_model_is_unloaded(cli: Commands) -> None:
    first = queued("draws", "sketch")
    running = worker(cli, QUEUE_WORKFLOWS_GPU_MODEL_IDLE_TTL_S="0.5")
    until(lambda: ended(first) and card_app.journal("sketch") == ["load 0", "unload 0"])
    until(lambda: shown()[0]["current_model"] is None)
    again = queued("draws", "sketch")
    until(lambda: ended(again))
    assert result(again)["cold"]
    assert result(again)["pid"] == result(first)["pid"]
    stopped(running)


def request(action: str, *more: str) -> Row:
    """Request a change of the one worker's model, and return its report once it is over."""
    made = getattr(models, action)("box", *more)
    found: list[Any] = []

    def over() -> bool:
        found[:] = [each["request"] for each in models.list("box")]
        return bool(found[0]) and (found[0]["no"], found[0]["state"] in ("done", "failed")) == (
            made["request_no"], True,
        )  # fmt: skip

    until(over)
    return found[0]


def test_models_are_loaded_and_unloaded_on_request(cli: Commands) -> None:
    running = worker(cli)
    until(lambda: 0 in shown())
    assert request("load", "sketch")["state"] == "done"
    (listed,) = models.list("box")
    assert (listed["model"], listed["card"]) == ("sketch", 0)
    warm = queued("draws", "sketch")
    until(lambda: ended(warm))
    assert not result(warm)["cold"]
    with db.connect() as conn:
        learned = conn.execute("SELECT model, loads FROM gpu_models WHERE loads > 0").fetchall()
    assert [(each["model"], each["loads"]) for each in learned] == [("sketch", 1)]
    assert request("unload")["state"] == "done"
    assert card_app.journal("sketch") == ["load 0", "unload 0"]
    failed = request("load", "bad")
    assert failed["state"] == "failed"
    assert "no weights" in failed["error"]
    stopped(running)


def test_a_request_waits_for_the_job_that_runs_and_comes_before_the_next(
    cli: Commands, tmp_path: Path
) -> None:
    first, folder = in_folder(tmp_path, "waits")
    running = worker(cli)
    until(lambda: begun(folder))
    following = queued("draws", "photo")
    models.load("box", "sketch")
    until(lambda: (models.list("box")[0]["request"] or {}).get("state") == "waiting")
    slot_app.let_go(folder)
    until(lambda: ended(first, following))
    assert card_app.journal("sketch") == ["load 0", "unload 0"]
    stopped(running)


def why(job_id: str) -> str:
    """Return what `why` says of the one worker."""
    explained = jobs.explain(job_id)
    assert explained is not None
    (found,) = explained["workers"]
    return f"{found['clause']}: {found['detail']}"


def test_a_worker_that_cannot_see_its_gpu_claims_nothing_and_why_says_so(
    cli: Commands, tmp_path: Path
) -> None:
    error = tmp_path / "error of sketch"
    error.write_text("No CUDA GPUs are available")
    ids = [queued("draws", "sketch") for _ in range(5)]
    running = worker(cli)
    until(lambda: "no gpu job is claimed for 5 s" in running.err)
    until(lambda: why(ids[-1]).startswith("gpu: "))
    assert "No CUDA GPUs are available" in why(ids[-1])
    assert sum(node_row(each)["claim_no"] for each in ids) == 1
    error.unlink()
    until(lambda: ended(*ids))
    rows = [node_row(each) for each in ids]
    assert {(each["attempts"], each["crash_count"], each["watchdog_retries"]) for each in rows} == {
        (0, 0, 0)
    }
    stopped(running)


def test_a_job_that_alone_sees_no_gpu_fails(cli: Commands) -> None:
    alone = queued("sees_none")
    running = worker(cli)
    until(lambda: "no gpu job is claimed for 5 s" in running.err)
    good = queued("shows")
    until(lambda: ended(good))
    assert node_row(alone)["status"] == "queued"
    until(lambda: ended(alone, status="failed"))
    assert "no CUDA-capable device" in node_row(alone)["error"]
    assert node_row(alone)["claim_no"] == 2
    stopped(running)


def test_a_model_that_does_not_fit_is_tried_again_as_after_a_watchdog(
    cli: Commands, tmp_path: Path
) -> None:
    error = tmp_path / "error of sketch"
    error.write_text("CUDA out of memory. Tried to allocate 20.00 GiB")
    job_id = queued("draws", "sketch")
    running = worker(cli)
    until(lambda: node_row(job_id)["watchdog_retries"] == 1)
    until(lambda: "no gpu job is claimed for 5 s" in running.err)
    error.unlink()
    until(lambda: ended(job_id))
    with db.connect() as conn:
        found = conn.execute(
            "SELECT count(*) AS n FROM workflow_node_events"
            " WHERE job_id = %s AND event_type = 'gpu_health_trip'",
            (job_id,),
        ).fetchone()
    assert found == {"n": 1}
    stopped(running)


def test_lack_of_memory_fails_a_model_beyond_the_cap_and_any_handler(
    cli: Commands, tmp_path: Path
) -> None:
    (tmp_path / "error of sketch").write_text("RESOURCE_EXHAUSTED: out of memory")
    handler = queued("takes_too_much")
    running = worker(cli, QUEUE_WORKFLOWS_WATCHDOG_MAX_RETRIES="0")
    until(lambda: ended(handler, status="failed"))
    model = queued("draws", "sketch")
    until(lambda: ended(model, status="failed"))
    assert "out of memory" in node_row(model)["error"]
    stopped(running)


def test_off_hard_ends_a_load_on_request_and_frees_the_gpu(cli: Commands) -> None:
    running = worker(cli)
    until(lambda: 0 in shown())
    models.load("box", "slow")
    until(lambda: card_app.journal("slow") == ["load 0"])
    before = running.pids("executor of launcher")
    workers.disable("box", "gpu", stop_policy="hard")
    until(lambda: not {*before} & {*running.pids("executor of launcher")})
    until(lambda: (models.list("box")[0]["request"] or {}).get("state") == "failed")
    workers.enable("box", "gpu")
    job_id = queued("shows")
    until(lambda: ended(job_id))
    stopped(running)


def test_a_request_fails_if_its_executor_dies_and_the_worker_continues(cli: Commands) -> None:
    running = worker(cli)
    until(lambda: 0 in shown())
    models.load("box", "slow")
    until(lambda: card_app.journal("slow") == ["load 0"])
    (executor,) = running.pids("executor of launcher")
    os.kill(executor, signal.SIGKILL)
    until(lambda: (models.list("box")[0]["request"] or {}).get("state") == "failed")
    assert models.list("box")[0]["request"]["error"] == "its executor has ended"
    job_id = queued("shows")
    until(lambda: ended(job_id))
    stopped(running)


def test_a_killed_worker_is_charged_to_its_job_and_the_other_gpu_goes_on(
    cli: Commands, tmp_path: Path
) -> None:
    made = [in_folder(tmp_path, "waits") for _ in range(2)]
    running = worker(cli, "0,1")
    until(lambda: begun(*(folder for _, folder in made)) and {*shown()} == {0, 1})
    dead = shown()[0]
    os.kill(dead["pid"], signal.SIGKILL)
    until(lambda: shown().get(0, dead)["pid"] != dead["pid"])
    slot_app.let_go(*(folder for _, folder in made))
    until(lambda: ended(*(job_id for job_id, _ in made)))
    rows = [node_row(job_id) for job_id, _ in made]
    assert sorted((each["claim_no"], each["crash_count"]) for each in rows) == [(1, 0), (2, 1)]
    stopped(running)


def test_sigterm_does_not_wait_for_a_load_on_request(cli: Commands) -> None:
    running = worker(cli)
    until(lambda: 0 in shown())
    models.load("box", "slow")
    until(lambda: card_app.journal("slow") == ["load 0"])
    stopped(running)


# --- handlers that must end --------------------------------------------------------------------


@pytest.mark.parametrize("why", ["timeout", "cancel", "death", "stall"])
def test_only_the_executor_of_its_gpu_ends_with_a_job(
    cli: Commands, tmp_path: Path, why: str
) -> None:
    neighbour, beside = in_folder(tmp_path, "draws_and_waits", "sketch")
    handler = {"death": "dies", "stall": "stalls"}.get(why, "deaf")
    job_id, folder = in_folder(tmp_path, handler, "photo")
    if why == "timeout":
        set_timeout(job_id, 1.0)
    # The stall is confirmed on whichever GPU it runs: both count as idle, whatever RAM is used.
    knobs = {"CANCEL_GRACE_S": "0.5", "STALL_CONFIRM_POLL_S": "0.2",
             "STALL_CONFIRM_SAMPLES": "2", "GPU_IDLE_PCT": "95"}  # fmt: skip
    env = {f"QUEUE_WORKFLOWS_{name}": value for name, value in knobs.items()}
    env |= constants.env({"worker.guards.STALL_TIMEOUT_S": 1, "worker.guards.STATIC_RAM_MB": 1e6})
    running = worker(cli, "0,1", **env)
    until(lambda: begun(beside) and begun(folder))
    until(lambda: {*shown()} == {0, 1})
    pids = {card: each["pid"] for card, each in shown().items()}
    first = slot_app.starts_of(folder)[0]
    if why == "cancel":
        queue_workflows.cancel_run(node_row(job_id)["run_id"])
    until(lambda: ended(job_id, status="cancelled" if why == "cancel" else "completed"))
    assert node_row(job_id)["claim_no"] == (1 if why == "cancel" else 2)
    assert not Path(f"/proc/{first}").exists()
    assert node_row(job_id)["crash_count"] == (why == "death")
    # Its model is lost with the executor, and known to be.
    assert len(card_app.journal("photo")) == node_row(job_id)["claim_no"]
    left = None if why == "cancel" else "photo"
    until(lambda: {each["current_model"] for each in shown().values()} == {"sketch", left})
    slot_app.let_go(beside)
    until(lambda: ended(neighbour))
    assert node_row(neighbour)["claim_no"] == 1
    assert {card: each["pid"] for card, each in shown().items()} == pids
    warm = queued("draws", "sketch")
    until(lambda: ended(warm))
    assert result(warm)["pid"] == result(neighbour)["pid"] or result(warm)["cold"]
    stopped(running)


def test_a_gpu_gets_another_executor_only_after_the_one_before_has_ended(cli: Commands) -> None:
    ids = [queued("draws", "sketch") for _ in range(3)]
    running = worker(cli, "0", "--max-jobs", "1", **{card_app.UNLOAD_S: "0.5"})
    until(lambda: ended(*ids))
    stopped(running)
    assert len({result(each)["pid"] for each in ids}) == 3
    # Never two models at once: each is unloaded before the next one is loaded.
    assert card_app.journal("sketch")[:5] == ["load 0", "unload 0"] * 2 + ["load 0"]


def test_a_node_with_a_process_of_its_own_shares_the_executor_of_its_gpu(cli: Commands) -> None:
    ids = [queued("alone", "sketch") for _ in range(2)]
    running = worker(cli)
    until(lambda: ended(*ids))
    stopped(running)
    assert len({result(each)["pid"] for each in ids}) == 1


def test_a_worker_that_ends_by_itself_does_so_on_one_gpu(cli: Commands) -> None:
    ids = [queued("draws", "sketch") for _ in range(2)]
    running = worker(cli, "1", "--burst")
    assert running.wait() == 0
    assert ended(*ids)


# --- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--queue", "cpu", "--cards", "0"), "--cards needs --queue gpu"),
        (("--workers", '[{"queue": "load"}]', "--cards", "0"), "--cards needs --queue gpu"),
        (("--queue", "gpu", "--cards", "0", "--slots", "2"), "one job at a time"),
        (("--queue", "gpu", "--cards", "0", "--async"), "one job at a time"),
        (("--queue", "gpu", "--cards", "0", "--batch", "2"), "one job at a time"),
        (("--queue", "gpu", "--cards", ""), "the numbers of GPUs"),
        (("--queue", "gpu", "--cards", "0,"), "the numbers of GPUs"),
        (("--queue", "gpu", "--cards=-1"), "the numbers of GPUs"),
        (("--queue", "gpu", "--cards", "one"), "the numbers of GPUs"),
        (("--queue", "gpu", "--cards", "99999"), "the numbers of GPUs"),
        (("--queue", "gpu", "--cards", "0,00"), "names GPU 0 twice"),
        (("--queue", "gpu", "--cards", "1,2"), "--cards names GPU 2, and this machine has none"),
        (("--queue", "gpu", "--cards", "2"), "nvidia-smi lists 0, 1"),
        (("--queue", "gpu", "--cards", "0,1", "--burst"), "need a single GPU"),
        (
            ("--queue", "gpu", "--cards", "0", "--supervise", "--idle-exit", "5"),
            "exclude --sup",
        ),
        (("--queue", "gpu", "--cards", "0", "--max-jobs", "0"), "must be positive"),
    ],
)
def test_what_cannot_work_is_refused(cli: Commands, more: tuple[str, ...], words: str) -> None:
    refused = cli.start(SCRIPT, *more, "--app", APP)
    assert refused.wait() == 2
    assert words in refused.err


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_gpu_that_is_not_visible_is_refused(cli: Commands, name: str) -> None:
    refused = cli.start(SCRIPT, "--queue", "gpu", "--cards", "0", "--app", APP, **{name: "1"})
    assert refused.wait() == 2
    assert f"{name} is '1'" in refused.err


def test_up_starts_a_worker_for_each_gpu(cli: Commands) -> None:
    ids = [queued("shows") for _ in range(2)]
    running = cli.start("queue-workflows", "up", "--cards", "0,1", "--cpu", "0", "--app", APP)
    until(lambda: {*shown()} == {0, 1})
    until(lambda: ended(*ids))
    listed = cli.run("queue-workflows", "workers")
    assert "gpu 0" in listed.out
    assert "gpu 1" in listed.out
    stopped(running)


# --- a gpu worker below a parent, without --cards ------------------------------------------------


SUPERVISED = (SCRIPT, "--queue", "gpu", "--supervise", "--app", APP)
BELOW = {
    "--supervise": SUPERVISED,
    "--slots 1": (SCRIPT, "--queue", "gpu", "--slots", "1", "--app", APP),
    "up": ("queue-workflows", "up", "--gpu", "1", "--cpu", "0", "--no-ingest", "--app", APP),
}


def alone() -> Row:
    """The row of the one living worker, which names no GPU."""
    found = shown()
    assert {*found} == {None}
    return found[None]


@pytest.mark.parametrize("way", BELOW)
def test_a_gpu_worker_has_one_executor_that_keeps_the_model(cli: Commands, way: str) -> None:
    first = queued("draws", "sketch")
    running = cli.start(*BELOW[way])
    until(lambda: ended(first))
    until(lambda: alone()["current_model"] == "sketch")
    again = queued("draws", "sketch")
    until(lambda: ended(again))
    assert (result(first)["cold"], result(again)["cold"]) == (True, False)
    assert result(first)["pid"] == result(again)["pid"] != alone()["pid"]
    assert result(first)["card"] is None, "it sees all GPUs that its worker sees"
    assert alone()["vram_total_mb"] == 24576, "it may use the larger one"
    assert request("unload")["state"] == "done"
    assert request("load", "photo")["state"] == "done"
    assert models.list("box")[0]["model"] == "photo"
    assert card_app.journal("sketch") == ["load None", "unload None"]
    stopped(running)


@pytest.mark.parametrize("how", ["dies", "kill", "off"])
def test_a_model_is_lost_only_with_its_executor(cli: Commands, tmp_path: Path, how: str) -> None:
    warm = queued("draws", "sketch")
    running = cli.start(*SUPERVISED)
    until(lambda: ended(warm))
    until(lambda: alone()["current_model"] == "sketch")
    before = alone()
    job_id, folder = in_folder(tmp_path, "dies" if how == "dies" else "waits", None)
    if how != "dies":
        until(lambda: begun(folder))
    if how == "kill":
        os.kill(result(warm)["pid"], signal.SIGKILL)
    elif how == "off":
        workers.disable("box", "gpu", stop_policy="hard")
        until(lambda: node_row(job_id)["status"] == "queued")
        assert not Path(f"/proc/{result(warm)['pid']}").exists()
        workers.enable("box", "gpu")
    until(lambda: begun(folder, times=2))
    slot_app.let_go(folder)
    until(lambda: ended(job_id))
    assert (node_row(job_id)["claim_no"], node_row(job_id)["crash_count"]) == (2, int(how != "off"))
    assert alone()["pid"] == before["pid"], "the worker goes on"
    until(lambda: alone()["current_model"] is None)
    cold = queued("draws", "sketch")
    until(lambda: ended(cold))
    assert result(cold)["cold"]
    stopped(running)


def test_a_killed_gpu_worker_is_charged_to_its_job(cli: Commands, tmp_path: Path) -> None:
    job_id, folder = in_folder(tmp_path, "waits")
    running = cli.start(*SUPERVISED)
    until(lambda: begun(folder))
    until(shown)
    dead, executor = alone()["pid"], slot_app.starts_of(folder)[0]
    os.kill(dead, signal.SIGKILL)
    until(lambda: begun(folder, times=2))
    until(lambda: not alive(executor))
    slot_app.let_go(folder)
    until(lambda: ended(job_id))
    assert (node_row(job_id)["claim_no"], node_row(job_id)["crash_count"]) == (2, 1)
    stopped(running)
