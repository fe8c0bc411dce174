"""One warm model: loads, swaps, failures, idle unload, threads, forks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from queue_workflows import config, errors, gpu_model_cache, model_registry
from queue_workflows.model_cache import ModelCache, gpu_should_unload
from queue_workflows.model_registry import ModelSpec
from tests.support import tabled, wait
from tests.support.clocks import Clock


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    model_registry.clear_for_tests()
    config.reset_for_tests()
    yield
    gpu_model_cache.reset_for_tests()
    model_registry.clear_for_tests()
    config.reset_for_tests()


class Handle:
    """A loaded model that can be weakly referenced."""


def register(
    model_id: str, log: list[str], *, clock: Clock[float] | None = None, load_s: float = 0.0
):
    def load() -> Handle:
        log.append(f"load {model_id}")
        if clock is not None:
            clock.now += load_s
        return Handle()

    def unload(_: Any) -> None:
        log.append(f"unload {model_id}")

    model_registry.register(ModelSpec(model_id, load, unload))


def failing(message: str):
    def fail(*_: Any) -> Any:
        raise RuntimeError(message)

    return fail


def test_gpu_should_unload():
    cases: list[Any] = [
        (True, False, 60.0, 60.0, True),
        (True, False, 59.9, 60.0, False),
        (False, False, 1e9, 60.0, False),
        (True, True, 1e9, 60.0, False),
        (True, False, 1e9, 0.0, False),
        (True, False, 1e9, -1.0, False),
    ]
    for handle_present, active, idle_s, ttl_s, expected in cases:
        with tabled.case(handle_present, active, idle_s, ttl_s, expected):
            assert gpu_should_unload(handle_present, active, idle_s, ttl_s) is expected


def test_a_warm_hit_gives_the_same_handle_and_no_load_time():
    log: list[str] = []
    clock = Clock(100.0)
    register("a", log, clock=clock, load_s=12.0)
    cache = ModelCache(now_fn=clock)

    handle = cache.require_model("a")
    assert cache.last_load_seconds == 12.0
    assert cache.require_model("a") is handle
    assert cache.last_load_seconds == 0.0
    assert log == ["load a"]
    assert (cache.current_model, cache.current_handle) == ("a", handle)


def test_a_swap_unloads_first_and_announces_none_then_the_id():
    log: list[str] = []
    register("a", log)
    register("b", log)
    cache = ModelCache(publish_current_model=lambda model: log.append(f"say {model}"))

    cache.require_model("a")
    cache.require_model("b")
    assert log == ["say None", "load a", "say a", "say None", "unload a", "load b", "say b"]


def test_a_swap_frees_the_old_handle_before_the_new_one_loads():
    alive: list[bool] = []
    old: list[weakref.ref[Handle]] = []

    def load_a() -> Handle:
        handle = Handle()
        handle.itself = handle  # type: ignore[attr-defined]  a cycle, which only gc frees
        old.append(weakref.ref(handle))
        return handle

    model_registry.register(ModelSpec("a", load_a))
    model_registry.register(ModelSpec("b", lambda: alive.append(old[0]() is not None)))
    cache = ModelCache()
    cache.require_model("a")
    cache.require_model("b")
    assert alive == [False]


def test_nothing_is_current_while_a_model_loads():
    seen: list[Any] = []
    model_registry.register(ModelSpec("a", object))
    cache = ModelCache()
    model_registry.register(
        ModelSpec("b", lambda: seen.append((cache.current_model, cache.current_handle)))
    )
    cache.require_model("a")
    cache.require_model("b")
    assert seen == [(None, None)]


def test_a_loader_that_returns_none_is_a_model_too():
    calls: list[int] = []
    model_registry.register(ModelSpec("a", lambda: calls.append(1)))
    cache = ModelCache()
    cache.require_model("a")
    cache.require_model("a")
    assert len(calls) == 1
    assert cache.current_model == "a"


def test_a_failed_load_names_the_cause_and_leaves_a_usable_empty_cache():
    log: list[str] = []
    said: list[str | None] = []
    register("good", log)
    model_registry.register(ModelSpec("bad", failing("out of memory")))
    cache = ModelCache(publish_current_model=said.append)

    cache.require_model("good")
    with pytest.raises(
        errors.ModelLoadFailed, match=r"'bad'.*RuntimeError: out of memory"
    ) as caught:
        cache.require_model("bad")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (cache.current_model, cache.current_handle) == (None, None)
    assert said[-1] is None
    cache.require_model("good")
    assert cache.current_model == "good"


def test_a_failed_load_does_not_keep_half_a_model_alive():
    halves: list[weakref.ref[Handle]] = []

    def load() -> None:
        half = Handle()
        halves.append(weakref.ref(half))
        raise RuntimeError("out of memory")

    model_registry.register(ModelSpec("bad", load))
    with pytest.raises(errors.ModelLoadFailed) as caught:
        ModelCache().require_model("bad")
    assert caught.value.__cause__ is not None
    assert halves[0]() is None


def test_an_exit_inside_a_loader_passes_and_leaves_a_usable_cache():
    def leave() -> None:
        raise SystemExit(3)

    model_registry.register(ModelSpec("bad", leave))
    model_registry.register(ModelSpec("good", object))
    cache = ModelCache()
    with pytest.raises(SystemExit):
        cache.require_model("bad")
    assert cache.require_model("good") is not None


def test_a_failed_unload_fails_the_swap_and_leaves_a_usable_empty_cache():
    model_registry.register(ModelSpec("a", object, failing("stuck")))
    model_registry.register(ModelSpec("b", object))
    cache = ModelCache()
    cache.require_model("a")

    with pytest.raises(errors.ModelLoadFailed, match=r"unloading model 'a'.*stuck"):
        cache.require_model("b")
    assert cache.current_model is None
    cache.require_model("b")
    assert cache.current_model == "b"


def test_the_spec_that_loaded_a_model_unloads_it():
    log: list[str] = []
    register("a", log)
    cache = ModelCache()
    cache.require_model("a")
    model_registry.register(ModelSpec("a", object, failing("not mine")))
    cache.drop_cache()
    assert log == ["load a", "unload a"]


def test_a_loader_cannot_request_a_second_model():
    log: list[str] = []
    register("b", log)
    cache = ModelCache()
    model_registry.register(ModelSpec("a", lambda: cache.require_model("b")))
    with pytest.raises(errors.ModelLoadFailed, match="one model is resident"):
        cache.require_model("a")
    assert log == []


def test_an_empty_registry_runs_the_registrar_given():
    log: list[str] = []
    cache = ModelCache(register_builtins=lambda: register("a", log))
    cache.require_model("a")
    assert log == ["load a"]


def test_an_unknown_id_runs_the_apps_registrar_once_and_keeps_the_warm_model():
    log: list[str] = []
    register("a", log)
    calls: list[int] = []
    config.set_builtin_model_registrar(lambda: calls.append(1))
    cache = ModelCache()
    cache.require_model("a")
    assert calls == []
    with pytest.raises(errors.UnknownModel, match=r"'nope'.*a"):
        cache.require_model("nope")
    assert calls == [1]
    assert cache.current_model == "a"


def test_a_failing_registrar_is_a_failed_load():
    cache = ModelCache(register_builtins=failing("no weights folder"))
    with pytest.raises(errors.ModelLoadFailed, match="no weights folder"):
        cache.require_model("a")


def test_a_failing_publisher_is_logged_and_harmless(caplog: pytest.LogCaptureFixture):
    log: list[str] = []
    register("a", log)
    cache = ModelCache(publish_current_model=failing("database away"))
    cache.require_model("a")
    assert cache.current_model == "a"
    assert "database away" in caplog.text


def test_dropping_an_empty_cache_announces_nothing():
    said: list[str | None] = []
    ModelCache(publish_current_model=said.append).drop_cache()
    assert said == []


def test_an_idle_model_is_unloaded_after_its_ttl_and_not_before():
    log: list[str] = []
    clock = Clock(100.0)
    register("a", log)
    said: list[str | None] = []
    cache = ModelCache(publish_current_model=said.append, idle_ttl_s=60, now_fn=clock)
    cache.require_model("a")

    clock.now += 59
    assert cache.reap_idle_once() is False
    clock.now += 1
    assert cache.reap_idle_once() is True
    assert log == ["load a", "unload a"]
    assert said[-1] is None
    assert cache.reap_idle_once() is False


def test_a_busy_cache_is_never_reaped_and_jobs_nest(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "queue_workflows.model_cache")
    clock = Clock(100.0)
    model_registry.register(ModelSpec("a", object))
    cache = ModelCache(idle_ttl_s=60, now_fn=clock)
    cache.mark_busy()
    cache.require_model("a")
    cache.mark_busy()
    cache.mark_idle()
    clock.now += 1000
    assert cache.reap_idle_once() is False
    cache.mark_idle()
    assert cache.reap_idle_once() is False, "the idle time starts when the job ends"
    clock.now += 60
    assert cache.reap_idle_once() is True
    assert "model a unloaded after 60 s without a job" in caplog.text


def test_an_extra_mark_idle_does_not_unbalance_the_next_job():
    clock = Clock(100.0)
    model_registry.register(ModelSpec("a", object))
    cache = ModelCache(idle_ttl_s=60, now_fn=clock)
    cache.mark_idle()
    cache.mark_busy()
    cache.require_model("a")
    clock.now += 1000
    assert cache.reap_idle_once() is False


def test_the_ttl_comes_from_its_knob_and_zero_means_never(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(100.0)
    model_registry.register(ModelSpec("a", object))
    cache = ModelCache(now_fn=clock)
    cache.require_model("a")
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_MODEL_IDLE_TTL_S", "0")
    clock.now += 1e6
    assert cache.reap_idle_once() is False
    monkeypatch.setenv("QUEUE_WORKFLOWS_GPU_MODEL_IDLE_TTL_S", "5")
    assert cache.reap_idle_once() is True


def test_a_failing_unloader_does_not_break_the_reaper(caplog: pytest.LogCaptureFixture):
    clock = Clock(100.0)
    model_registry.register(ModelSpec("a", object, failing("stuck")))
    cache = ModelCache(idle_ttl_s=1, now_fn=clock)
    cache.require_model("a")
    clock.now += 100
    assert cache.reap_idle_once() is True
    assert cache.current_model is None
    assert "stuck" in caplog.text


def test_a_load_in_progress_is_never_reaped_and_readers_do_not_wait():
    clock = Clock(100.0)
    loading, go_on = threading.Event(), threading.Event()

    def load() -> str:
        loading.set()
        assert go_on.wait(30)
        return "handle"

    model_registry.register(ModelSpec("slow", load))
    cache = ModelCache(idle_ttl_s=0.001, now_fn=clock)
    worker = threading.Thread(target=cache.require_model, args=("slow",))
    worker.start()
    try:
        assert loading.wait(30)
        clock.now += 1e6
        assert cache.reap_idle_once() is False
        assert cache.current_model is None
    finally:
        go_on.set()
        worker.join(30)
    assert cache.current_model == "slow"


def test_a_job_that_starts_during_an_idle_unload_waits_for_its_end():
    unloading, busy = threading.Event(), threading.Event()
    early: list[bool] = []

    def unload(_: Any) -> None:
        unloading.set()
        early.append(busy.wait(0.1))

    model_registry.register(ModelSpec("a", object, unload))
    cache = ModelCache(idle_ttl_s=1e-9)
    cache.require_model("a")
    reaper = threading.Thread(target=cache.reap_idle_once)
    reaper.start()
    assert unloading.wait(30)
    cache.mark_busy()
    busy.set()
    reaper.join(30)
    assert early == [False]


def test_a_reaper_beside_a_worker_never_takes_a_model_from_a_job():
    model_registry.register(ModelSpec("a", Handle, lambda handle: setattr(handle, "dead", True)))
    cache = ModelCache(idle_ttl_s=1e-9)
    done = threading.Event()
    reaped: list[bool] = []

    def reap() -> None:
        while not done.is_set():
            reaped.append(cache.reap_idle_once())

    reaper = threading.Thread(target=reap)
    reaper.start()
    broken = 0
    rounds = 0

    def enough() -> bool:
        nonlocal broken, rounds
        cache.mark_busy()
        handle = cache.require_model("a")
        broken += hasattr(handle, "dead")
        cache.mark_idle()
        rounds += 1
        return rounds >= 8 and any(reaped)

    try:
        wait.until(enough)
    finally:
        done.set()
        reaper.join(30)
    assert broken == 0


@pytest.mark.parametrize("works", [True, False])
def test_torchs_cache_is_emptied_when_torch_is_loaded(monkeypatch: pytest.MonkeyPatch, works: bool):
    emptied: list[bool] = []

    def empty_cache() -> None:
        emptied.append(True)
        if not works:
            raise RuntimeError("CUDA error")

    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(empty_cache=empty_cache))
    monkeypatch.setitem(sys.modules, "torch", fake)
    model_registry.register(ModelSpec("a", object))
    cache = ModelCache()
    cache.require_model("a")
    assert emptied == []
    cache.drop_cache()
    assert emptied == [True]


def test_torch_is_never_imported_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    model_registry.register(ModelSpec("a", object))
    cache = ModelCache()
    cache.require_model("a")
    cache.drop_cache()
    assert "torch" not in sys.modules


def test_the_process_has_one_cache_and_its_publisher_comes_later():
    said: list[str | None] = []
    model_registry.register(ModelSpec("a", object))
    cache = gpu_model_cache.gpu_model_cache()
    gpu_model_cache.set_publisher(said.append)
    gpu_model_cache.gpu_model_cache().require_model("a")
    assert said == [None, "a"]
    gpu_model_cache.reset_for_tests()
    assert gpu_model_cache.gpu_model_cache() is not cache
    assert cache.current_model is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_gets_an_empty_cache_of_its_own_and_unloads_nothing():
    read, write = os.pipe()

    def unload(_: object) -> None:
        with contextlib.suppress(OSError):  # at the end of the test the pipe is closed
            os.write(write, b"unloaded ")

    model_registry.register(ModelSpec("a", object, unload))
    parents = gpu_model_cache.gpu_model_cache()
    parents.require_model("a")
    gpu_model_cache._lock.acquire()  # as another thread of the parent might hold it
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            cache = gpu_model_cache.gpu_model_cache()
            os.write(write, b"own" if cache is not parents else b"shared")
            os.write(write, f" {cache.current_model}".encode())
            gpu_model_cache.reset_for_tests()
        finally:
            os._exit(0)
    gpu_model_cache._lock.release()
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"own None"
    assert parents.current_model == "a"
