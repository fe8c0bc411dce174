"""The time limit of a load or unload outside of a job."""

from __future__ import annotations

import threading

import pytest

from queue_workflows import claim_worker, model_cache, model_registry, models
from queue_workflows.worker import guards
from tests.support import constants, wait

pytestmark = pytest.mark.usefixtures("db")


@pytest.mark.parametrize("hangs", ["a load on request", "the unload of an idle model"])
def test_a_change_of_a_model_that_never_ends_ends_its_worker(
    monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """It has the time limit of a gpu job, which no configuration changes."""
    monkeypatch.setattr(guards, "GPU_S", 0.2)
    constants.put(monkeypatch, "worker.gpu_models.REAP_S", 0.05)
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_MODEL_IDLE_TTL_S", "0.001")
    release = threading.Event()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        release.set()

    def load() -> None:
        assert hangs != "a load on request" or release.wait(30)

    def unload(_: object) -> None:
        assert release.wait(30)

    model_registry.register(model_registry.ModelSpec("a", load, unload))
    subject = claim_worker.ClaimWorker(
        queue="gpu", host="box", model_cache=model_cache.ModelCache(), on_exit=leave
    )
    thread = threading.Thread(target=subject.run_forever)
    thread.start()
    wait.until(lambda: models.list("box"))
    models.load("box", "a")
    wait.until(lambda: codes)
    subject.stop()
    thread.join(30)
    assert set(codes) == {75}
