"""The end of an attempt has what it used, if it took long enough to be measured."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from queue_workflows import history, node_queue, run_store
from tests.support import asgi_service, card_app, console, constants, slot_app
from tests.support.commands import Commands
from tests.support.wait import until
from tests.support.worker_views import begun, enqueued, stopped

SHORT: Any = constants.env({"claim.outcomes.USED_S": 0.3, "worker.gpu_models.READ_S": 0.1})
ONE = ("queue-claim-worker", "--app", "tests.support.slot_app:setup", "--queue", slot_app.QUEUE)


@pytest.fixture(autouse=True)
def _app(db: Any) -> None:
    slot_app.setup()


def let_go(folder: Path, after_s: float) -> None:
    """Let the handler of this folder end, once it has run for so long."""
    until(lambda: begun(folder))
    since = time.monotonic()
    until(lambda: time.monotonic() - since > after_s)
    slot_app.let_go(folder)


def attempt(job_id: str) -> dict[str, Any]:
    """The only attempt of a job that has ended; its end says in 100 bytes what it used."""

    def over() -> dict[str, Any] | None:
        job = history.get_job(job_id)
        return job if job and job["status"] in ("completed", "failed") else None

    job: Any = until(over)
    (found,) = job["attempts"]
    assert found["events"][-1]["detail"].get("used") == found["used"]
    assert len(json.dumps({"used": found["used"]})) <= 100
    return found


def test_a_long_attempt_has_the_peak_memory_of_its_process(cli: Commands, tmp_path: Path) -> None:
    quick = enqueued("quick", number=1)
    long = enqueued("holds", folder=str(tmp_path), megabytes=200)
    worker = cli.start(*ONE)
    let_go(tmp_path, 2.0)
    found = attempt(long)
    assert (found["outcome"], {*found["used"]}) == ("completed", {"ram_mb"})
    assert 200 < found["used"]["ram_mb"] < 400
    assert (attempt(quick)["used"], attempt(quick)["events"][-1]["detail"]) == (None, {})
    stopped(worker)
    shown = [" GB RAM" in console.printed("show", long, *more) for more in ((), ("--full",))]
    assert shown == [False, True]
    _, text = asgi_service.streamed(path=f"/api/v1/jobs/{long}", until=bool)
    assert json.loads(text)["attempts"][0]["used"] == found["used"]


def test_an_attempt_that_failed_has_it_beside_its_traceback(cli: Commands, tmp_path: Path) -> None:
    job_id = enqueued("fails_late", folder=str(tmp_path))
    worker = cli.start(*ONE, **SHORT)
    let_go(tmp_path, 0.3)
    found = attempt(job_id)
    assert (found["outcome"], {*found["used"]}) == ("failed", {"ram_mb"})
    assert "as it was asked to" in found["traceback"]
    stopped(worker)


def test_jobs_that_share_a_process_have_no_memory_of_their_own(
    cli: Commands, tmp_path: Path
) -> None:
    job_id = enqueued("async_waits", folder=str(tmp_path))
    worker = cli.start(*ONE, "--slots", "2", "--async", **SHORT)
    let_go(tmp_path, 0.3)
    assert attempt(job_id)["used"] is None
    stopped(worker)


def test_a_gpu_job_has_the_use_of_its_gpu(cli: Commands, tmp_path: Path) -> None:
    tools, folder = tmp_path / "tools", tmp_path / "job"
    folder.mkdir()
    card_app.install_nvidia_smi(tools)
    job_id = node_queue.enqueue_node_job(
        run_id=run_store.insert_run(workflow_name="single", status="running")["id"],
        node_id="n", node_module="waits", queue="gpu", inputs={"folder": str(folder)},
    )  # fmt: skip
    env: Any = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        card_app.FOLDER: str(tmp_path),
        "QUEUE_WORKFLOWS_DISABLE_HW_METRICS": "1",
    }
    app = ("--app", "tests.support.card_app:setup")
    worker = cli.start(ONE[0], "--queue", "gpu", "--cards", "1", *app, **env, **SHORT)
    until(lambda: begun(folder))
    readings = tools / "readings"
    until(lambda: readings.exists() and len(readings.read_text()) > 2)
    let_go(folder, 0.3)
    used = attempt(job_id)["used"]
    assert (used.pop("ram_mb") > 0, used) == (True, {"gpu_pct": 90, "vram_mb": 9000})
    stopped(worker)
