"""Several models in one cache: capacity, eviction, one load for all, models in use."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from queue_workflows import config, errors, model_registry
from queue_workflows.model_cache import ModelCache
from queue_workflows.model_registry import ModelSpec
from tests.support import timeouts
from tests.support.examples import examples
from tests.support.wait import until


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    timeouts.collect_no_garbage_of_models(monkeypatch)
    model_registry.clear_for_tests()
    config.reset_for_tests()
    yield
    model_registry.clear_for_tests()
    config.reset_for_tests()


class Models:
    """Registered models whose loads and unloads are counted."""

    def __init__(self, *names: str, size_gb: float = 1.0) -> None:
        self.loads: Counter[str] = Counter()
        self.unloaded: list[str] = []
        self.resident: set[str] = set()
        self.most = 0
        self._lock = threading.Lock()
        for name in names:
            self.register(name, size_gb)

    def register(
        self, name: str, size_gb: float = 1.0, during: Callable[[], object] | None = None
    ) -> None:
        def load() -> str:
            if during is not None:
                during()
            with self._lock:
                self.loads[name] += 1
                self.resident.add(name)
                self.most = max(self.most, len(self.resident))
            return name.upper()

        def unload(_: Any) -> None:
            with self._lock:
                self.resident.discard(name)
                self.unloaded.append(name)

        model_registry.register(ModelSpec(name, load, unload, size_gb))


class Threads:
    """Threads that have ended when the block ends, and what they returned or raised."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._started: list[threading.Thread] = []

    def __call__(self, call: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                self.found.append(call())
            except Exception as error:  # compared by the test
                self.found.append(error)

        thread = threading.Thread(target=run)
        self._started.append(thread)
        thread.start()

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._started:
            thread.join(30)
            assert not thread.is_alive()


def ids(cache: ModelCache) -> list[str]:
    return [each.id for each in cache.residents]


def used(cache: ModelCache, name: str) -> Any:
    with cache.using(name) as handle:
        return handle


def test_the_model_that_was_used_least_recently_goes_first() -> None:
    models = Models("a", "b", "c", "d")
    cache = ModelCache(capacity=3)
    for name in "abc":
        assert cache.require_model(name) == name.upper()
    assert cache.require_model("a") == "A"
    cache.require_model("d")
    assert (ids(cache), models.unloaded) == (["c", "a", "d"], ["b"])
    assert (cache.current_model, cache.current_handle) == ("d", "D")
    assert models.loads == dict.fromkeys("abcd", 1)


def test_the_memory_of_all_models_together_is_bounded() -> None:
    models = Models("a", "b", "c", size_gb=4.0)
    models.register("large", 10.0)
    cache = ModelCache(capacity=None, capacity_gb=12.0)
    for name in "abc":
        cache.require_model(name)
    assert models.unloaded == []
    cache.require_model("large")
    assert (models.unloaded, ids(cache)) == (["a", "b", "c"], ["large"])
    models.register("too large", 12.5)
    with pytest.raises(errors.ModelLoadFailed, match=r"needs 12.5 GB: the cache has 12 GB"):
        cache.require_model("too large")
    assert ids(cache) == ["large"]


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"capacity_gb": 0.0}])
def test_a_cache_without_room_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidConfig):
        ModelCache(**wrong)


def test_a_model_in_use_is_not_evicted() -> None:
    models = Models("a", "b", "c")
    cache = ModelCache(capacity=2)
    with cache.using("a") as handle:
        assert handle == "A"
        cache.require_model("b")
        cache.require_model("c")
        assert models.unloaded == ["b"]
    cache.require_model("b")
    assert models.unloaded == ["b", "c"], "a was used after c was loaded"


def test_a_thread_waits_until_a_model_in_use_is_free() -> None:
    models = Models("a", "b")
    cache = ModelCache(capacity=1)
    with Threads() as threads:
        with cache.using("a"):
            threads(lambda: used(cache, "b"))
            until(lambda: cache._changed._waiters)
            assert (models.loads["b"], threads.found) == (0, [])
        until(lambda: threads.found == ["B"])
    assert models.unloaded == ["a"]


def test_a_thread_that_uses_a_model_itself_does_not_wait_for_a_place() -> None:
    Models("a", "b")
    cache = ModelCache(capacity=1)
    with (
        cache.using("a"),
        pytest.raises(errors.ModelLoadFailed, match="raise the capacity"),
        cache.using("b"),
    ):
        pass
    assert used(cache, "b") == "B"


def test_all_who_wait_for_a_model_get_one_load() -> None:
    go = threading.Event()
    models = Models()
    models.register("a", during=lambda: go.wait(30))
    cache = ModelCache(capacity=2)
    with Threads() as threads:
        for _ in range(10):
            threads(lambda: used(cache, "a"))
        until(lambda: cache.loading_model == "a" and len(cache._changed._waiters) == 9)
        assert cache.current_model is None
        go.set()
    assert (threads.found, models.loads["a"]) == (["A"] * 10, 1)


def test_a_failed_load_fails_all_who_wait_and_the_next_one_loads_again() -> None:
    go, fails = threading.Event(), [True]
    models = Models()

    def during() -> None:
        go.wait(30)
        if fails:
            raise RuntimeError(f"out of memory {len(fails)}")

    models.register("a", during=during)
    cache = ModelCache(capacity=2)
    with Threads() as threads:
        for _ in range(5):
            threads(lambda: used(cache, "a"))
        until(lambda: len(cache._changed._waiters) == 4)
        go.set()
    assert all(isinstance(each, errors.ModelLoadFailed) for each in threads.found)
    assert all("out of memory 1" in str(each) for each in threads.found)
    assert len({id(each) for each in threads.found}) == 5
    fails.clear()
    assert used(cache, "a") == "A"
    assert models.loads == {"a": 1}


def test_models_load_side_by_side_and_one_in_use_answers_meanwhile() -> None:
    both = threading.Barrier(2)
    models = Models("ready")
    for name in "ab":
        models.register(name, during=lambda: both.wait(30))
    cache = ModelCache(capacity=3)
    cache.require_model("ready")
    with Threads() as threads:
        threads(lambda: used(cache, "a"))
        until(lambda: cache.loading_model == "a")
        assert used(cache, "ready") == "READY"
        threads(lambda: used(cache, "b"))
    assert sorted(threads.found) == ["A", "B"]


def test_idle_models_are_unloaded_and_those_in_use_stay() -> None:
    now = [0.0]
    models = Models("a", "b", "c")
    cache = ModelCache(capacity=3, idle_ttl_s=60, now_fn=lambda: now[0])
    for name in "ab":
        cache.require_model(name)
    now[0] = 50.0
    cache.require_model("c")
    with cache.using("a"):
        now[0] = 70.0
        assert cache.reap_idle_once() is True
        assert (models.unloaded, ids(cache)) == (["b"], ["c", "a"])
    now[0] = 120.0
    assert cache.reap_idle_once() is True
    assert ids(cache) == ["a"]


def test_dropping_unloads_all() -> None:
    models = Models("a", "b")
    cache = ModelCache(capacity=2)
    cache.require_model("a")
    with cache.using("b") as handle:
        cache.drop_cache()
        assert handle == "B"
    assert (models.unloaded, ids(cache), cache.current_model) == (["a", "b"], [], None)
    assert used(cache, "b") == "B"


def test_a_loader_cannot_load_another_model_whatever_the_capacity() -> None:
    Models("b")
    cache = ModelCache(capacity=5)
    model_registry.register(ModelSpec("a", lambda: cache.require_model("b")))
    with pytest.raises(errors.ModelLoadFailed, match="the loader of 'a' asked for model 'b'"):
        cache.require_model("a")


def test_a_load_evicts_one_model_while_another_eviction_is_not_over() -> None:
    begun, go_on = threading.Event(), threading.Event()
    models = Models("b", "c", "d", "e")

    def unload(_: Any) -> None:
        begun.set()
        assert go_on.wait(30)

    model_registry.register(ModelSpec("a", lambda: "A", unload))
    cache = ModelCache(capacity=3)
    for name in "abc":
        cache.require_model(name)
    with Threads() as threads:
        threads(lambda: used(cache, "d"))
        assert begun.wait(30)
        threads(lambda: used(cache, "e"))
        until(lambda: models.unloaded == ["b"])
        assert "e" not in models.loads  # "c", "a", which is not gone, and the place of "d"
        go_on.set()
    assert sorted(threads.found) == ["D", "E"]
    assert (sorted(ids(cache)), models.unloaded) == (["c", "d", "e"], ["b"])


def test_no_model_of_an_eviction_is_used_until_its_unload_is_over() -> None:
    begun, go_on = threading.Event(), threading.Event()
    models = Models("b", size_gb=4.0)
    models.register("large", 8.0)

    def unload(_: Any) -> None:
        begun.set()
        assert go_on.wait(30)

    model_registry.register(ModelSpec("a", lambda: "A", unload, 4.0))
    cache = ModelCache(capacity=None, capacity_gb=8.0)
    cache.require_model("a")
    cache.require_model("b")

    def use() -> str:
        with cache.using("b") as handle:
            assert "b" in models.resident
            return handle

    with Threads() as threads:
        threads(lambda: used(cache, "large"))
        assert begun.wait(30)
        threads(use)
        go_on.set()
    assert sorted(threads.found) == ["B", "LARGE"]
    assert models.loads["b"] == 2


def test_many_threads_share_few_places() -> None:
    names = [f"m{number}" for number in range(6)]
    models = Models(*names)
    cache = ModelCache(capacity=3)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for step in range(60):
            name = names[(seed * 7 + step * step) % len(names)]
            with cache.using(name) as handle:
                if handle != name.upper() or name not in models.resident:
                    wrong.append(name)

    with Threads() as threads:
        for seed in range(10):
            threads(lambda seed=seed: work(seed))
    assert (wrong, threads.found) == ([], [None] * 10)
    assert models.most <= 3
    assert models.resident == set(ids(cache))


class CacheMachine(RuleBasedStateMachine):
    """A cache beside what it should hold, step by step."""

    def __init__(self) -> None:
        super().__init__()
        model_registry.clear_for_tests()
        self.models = Models(*"abcde")
        self.cache = ModelCache(capacity=3)
        self.order: list[str] = []
        self.uses: list[tuple[str, ExitStack]] = []

    def _expected(self, name: str) -> bool:
        """Do in the model what a request does; return whether there is a place."""
        if name not in self.order and len(self.order) == 3:
            free = [each for each in self.order if each not in {use for use, _ in self.uses}]
            if not free:
                return False
            self.order.remove(free[0])
        if name in self.order:
            self.order.remove(name)
        self.order.append(name)
        return True

    @rule(name=st.sampled_from("abcde"))
    def require(self, name: str) -> None:
        if self._expected(name):
            assert self.cache.require_model(name) == name.upper()
        else:
            with pytest.raises(errors.ModelLoadFailed, match="in use"):
                self.cache.require_model(name)

    @rule(name=st.sampled_from("abcde"))
    def use(self, name: str) -> None:
        if not self._expected(name):
            return
        stack = ExitStack()
        assert stack.enter_context(self.cache.using(name)) == name.upper()
        self.uses.append((name, stack))

    @rule(place=st.integers(0, 9))
    def release(self, place: int) -> None:
        if self.uses:
            name, stack = self.uses.pop(place % len(self.uses))
            stack.close()
            self.order.remove(name)
            self.order.append(name)

    @invariant()
    def holds_what_it_should(self) -> None:
        assert ids(self.cache) == self.order
        assert self.models.resident == set(self.order)

    def teardown(self) -> None:
        for _, stack in self.uses:
            stack.close()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = hypothesis_settings(
    max_examples=examples(40),
    stateful_step_count=30,
)


def test_an_unloader_that_exits_leaves_the_other_evicted_models_usable() -> None:
    def leave(_: Any) -> None:
        raise SystemExit(3)

    for name, size_gb in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        model_registry.register(ModelSpec(name, name.upper, leave, size_gb))
    cache = ModelCache(capacity=None, capacity_gb=2.0)
    assert [cache.require_model(each) for each in "ab"] == ["A", "B"]
    with pytest.raises(SystemExit):
        cache.require_model("c")
    assert cache.residents == []
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(cache.require_model("b")), daemon=True)
    asking.start()
    asking.join(30)
    assert found == ["B"]
