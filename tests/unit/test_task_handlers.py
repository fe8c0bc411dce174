"""Tasks of every kind: results, progress, cancellation at yield and await, clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import threading
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows import errors
from tests.support import tabled, task_calls
from tests.support.examples import examples
from tests.support.task_calls import Script, run

Log = list[str]


# --- what they leave


def _plain() -> Any:
    return {"n": 1}


def _generator() -> Generator[Any, None, Any]:
    yield 0.5
    yield "half"
    return {"n": 1}


async def _async() -> Any:
    await asyncio.sleep(0)
    return {"n": 1}


async def _async_generator() -> AsyncGenerator[Any, None]:
    yield 0.5
    await asyncio.sleep(0)
    yield "half"


def test_result_and_progress_of_each_kind_of_task() -> None:
    cases: list[Any] = [
        (_plain, {"n": 1}, []),
        (_generator, {"n": 1}, [0.5, "half"]),
        (_async, {"n": 1}, []),
        (_async_generator, None, [0.5, "half"]),
        (functools.partial(_generator), {"n": 1}, [0.5, "half"]),
        (lambda: _async(), {"n": 1}, []),
        (lambda: [1], [1], []),
    ]
    for task, left, heard in cases:
        with tabled.case(task, left, heard):
            script = Script()
            assert run(task(), script) == left
            assert script.heard == heard


class _Callable:
    async def __call__(self) -> None: ...


def test_a_task_is_async_by_its_definition() -> None:
    cases: list[Any] = [
        (_plain, False),
        (_generator, False),
        (_async, True),
        (_async_generator, True),
        (functools.partial(_async), True),
        (_Callable(), True),
        (print, False),
        (dict, False),
    ]
    for task, is_async in cases:
        with tabled.case(task, is_async):
            assert task_calls.is_async(task) is is_async


@pytest.mark.parametrize("kind", ["generator", "async", "async generator"])
@pytest.mark.parametrize(
    "raised", [ValueError("no"), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_a_handler_raises_passes(kind: str, raised: BaseException) -> None:
    def generator() -> Generator[None]:
        yield
        raise raised

    async def coroutine() -> None:
        await asyncio.sleep(0)
        raise raised

    async def async_generator() -> AsyncGenerator[None, None]:
        yield
        await asyncio.sleep(0)
        raise raised

    made = {"generator": generator, "async": coroutine, "async generator": async_generator}[kind]
    with pytest.raises(type(raised)):
        run(made())


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_a_signal_that_is_yielded_is_raised_behind_the_handler(kind: str) -> None:
    log: Log = []

    def generator() -> Generator[Any]:
        try:
            yield errors.Snooze(5)
        finally:
            yield "tidying"
            log.append("tidied")

    async def async_generator() -> AsyncGenerator[Any, None]:
        try:
            yield errors.Snooze(5)
        finally:
            await asyncio.sleep(0)
            yield "tidying"
            log.append("tidied")

    with task_calls.runner() as runner:
        with pytest.raises(errors.Snooze):
            runner.run(generator() if kind == "generator" else async_generator(), Script())
        assert log == ["tidied"]


def test_a_task_that_the_handler_started_and_that_exits_ends_the_handler_too() -> None:
    log: Log = []

    async def leaves() -> None:
        raise SystemExit(3)

    async def body() -> None:
        child = asyncio.create_task(leaves())
        try:
            await asyncio.sleep(60)
        finally:
            log.append("tidied")
            assert child.done()
            child.exception()

    with pytest.raises(SystemExit):
        run(body())
    assert log == ["tidied"]


def test_the_loop_is_reused_between_handlers_and_tasks_end_with_their_handler() -> None:
    """One that a handler starts in an empty context stays until the loop is closed."""
    loops: list[Any] = []
    left: Log = []

    async def stays(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            left.append(name)

    async def body() -> None:
        loops.append(asyncio.get_running_loop())
        own = asyncio.create_task(stays("own"))
        lasting = contextvars.Context().run(asyncio.create_task, stays("lasting"))
        body.kept = own, lasting  # type: ignore[attr-defined]
        await asyncio.sleep(0)

    with task_calls.runner() as runner:
        runner.run(body(), Script())
        assert left == ["own"]
        runner.run(body(), Script())
        assert left == ["own"] * 2
    assert loops[0] is loops[1]
    assert loops[0].is_closed()
    assert left == ["own"] * 2 + ["lasting"] * 2


def test_an_async_handler_runs_where_a_loop_runs_already() -> None:
    """As in an async test of an app."""

    async def outer() -> Any:
        return run(_async())

    assert asyncio.run(outer()) == {"n": 1}


# --- where they are ended


def _steps(log: Log, count: int) -> Generator[Any, None, str]:
    try:
        for number in range(count):
            log.append(f"step {number}")
            yield number / count
    finally:
        log.append("tidied")
    return "all"


@settings(max_examples=examples(50))
@given(count=st.integers(0, 8), after=st.integers(0, 9))
def test_a_generator_ends_at_any_of_its_yields(count: int, after: int) -> None:
    log: Log = []
    script = Script(after)
    ends = after < count
    with pytest.raises(task_calls.Interrupted) if ends else contextlib.nullcontext():
        assert run(_steps(log, count), script) == "all"
    done = after + 1 if ends else count
    assert log == [*(f"step {number}" for number in range(done)), "tidied"]


class _Gate:
    """An await point that reports when it is reached; the chosen one interrupts."""

    def __init__(self, script: Script, at: int) -> None:
        self._script = script
        self._at = at
        self.reached = 0

    async def wait(self) -> None:
        """Wait; the chosen point ends only by an interruption, which comes from another thread."""
        number, self.reached = self.reached, self.reached + 1
        if number != self._at:
            await asyncio.sleep(0)
            return
        thread = threading.Thread(target=self._script.interrupt)
        thread.start()
        try:
            await asyncio.sleep(60)
        finally:
            thread.join()


async def _awaiting(gate: _Gate, log: Log, plan: list[str]) -> AsyncGenerator[Any, None]:
    """By the plan it awaits, yields, or awaits in a nested task or a shielded cleanup."""
    try:
        for number, step in enumerate(plan):
            log.append(f"{step} {number}")
            if step == "await":
                await gate.wait()
            elif step == "task":
                await asyncio.create_task(gate.wait())
            elif step == "gather":
                await asyncio.gather(gate.wait(), asyncio.sleep(0))
            else:
                yield number
    finally:
        await asyncio.sleep(0)
        log.append("tidied")
        await asyncio.sleep(0.001)
        log.append("tidied up to the end")


@settings(max_examples=examples(60))
@given(
    plan=st.lists(st.sampled_from(["await", "task", "gather", "yield"]), min_size=1, max_size=6),
    data=st.data(),
)
def test_an_async_generator_ends_at_any_of_its_awaits_and_yields(
    plan: list[str], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(plan) - 1))
    before = plan[:place]
    yields = plan[place] == "yield"
    script = Script(before.count("yield") if yields else None)
    gate = _Gate(script, -1 if yields else place - before.count("yield"))
    log: Log = []
    with pytest.raises(task_calls.Interrupted) as raised:
        run(_awaiting(gate, log, plan), script)
    assert raised.value.reason == "cancelled"
    steps = [f"{step} {number}" for number, step in enumerate(plan[: place + 1])]
    assert log == [*steps, "tidied", "tidied up to the end"]


@settings(max_examples=examples(20))
@given(awaits=st.integers(1, 5), data=st.data())
def test_a_coroutine_ends_at_any_of_its_awaits(awaits: int, data: st.DataObject) -> None:
    script, log = Script(), Log()
    gate = _Gate(script, data.draw(st.integers(0, awaits - 1)))

    async def body() -> None:
        try:
            for _ in range(awaits):
                await gate.wait()
        finally:
            await asyncio.sleep(0.001)
            log.append("tidied")

    with pytest.raises(task_calls.Interrupted):
        run(body(), script)
    assert log == ["tidied"]


class _AtTheLastMoment(Script):
    """It is interrupted at the moment at which it reads whether it is."""

    @property
    def interrupted(self) -> str | None:
        if self.heard and self._reason is None:
            self._reason = "cancelled"
            assert self._call is not None
            self._call()
        return self._reason

    @interrupted.setter
    def interrupted(self, reason: str | None) -> None:
        self._reason = reason


def test_a_generator_that_was_interrupted_is_not_cut_off_while_it_cleans_up() -> None:
    log: Log = []

    async def body() -> AsyncGenerator[Any, None]:
        try:
            yield
        finally:
            for _ in range(3):
                await asyncio.sleep(0.001)
                log.append("tidies")

    with pytest.raises(task_calls.Interrupted):
        run(body(), _AtTheLastMoment())
    assert log == ["tidies"] * 3


def test_a_handler_interrupted_before_its_start_ends_at_its_first_await() -> None:
    script = Script()
    script.interrupt("shutdown")
    with pytest.raises(task_calls.Interrupted, match="shutdown"):
        run(asyncio.sleep(60), script)


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_a_handler_that_yields_on_is_interrupted_again_at_each_yield(kind: str) -> None:
    told: Log = []

    def generator() -> Generator[Any]:
        while len(told) < 3:
            try:
                yield
            except GeneratorExit:
                told.append("told")

    async def async_generator() -> AsyncGenerator[Any, None]:
        while len(told) < 3:
            try:
                yield
            except GeneratorExit:
                told.append("told")

    script = Script(0)
    with pytest.raises(task_calls.Interrupted):
        run(generator() if kind == "generator" else async_generator(), script)
    assert len(told) == 3


def test_a_coroutine_that_swallows_the_cancel_may_clean_up_and_is_cancelled_once() -> None:
    script, log = Script(), Log()
    gate = _Gate(script, 0)

    async def body() -> str:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            for _ in range(3):
                await asyncio.sleep(0.001)
                log.append("tidies")
        return "anyway"

    with pytest.raises(task_calls.Interrupted):
        run(body(), script)
    assert log == ["tidies"] * 3


@pytest.mark.parametrize("kind", ["generator", "async", "async generator"])
@pytest.mark.parametrize("raised", [ValueError("in finally"), SystemExit(1)], ids=repr)
def test_what_clean_up_raises_is_logged_and_the_handler_has_ended(
    kind: str, raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(0 if kind != "async" else None)
    gate = _Gate(script, 0)

    def generator() -> Generator[Any]:
        try:
            yield
        finally:
            raise raised

    async def coroutine() -> None:
        try:
            await gate.wait()
        finally:
            raise raised

    async def async_generator() -> AsyncGenerator[Any, None]:
        try:
            yield
        finally:
            raise raised

    made = {"generator": generator, "async": coroutine, "async generator": async_generator}[kind]
    with caplog.at_level(logging.WARNING), pytest.raises(task_calls.Interrupted):
        run(made(), script)
    assert type(raised).__name__ in caplog.text


def test_ctrl_c_while_cleaning_up_is_the_operators() -> None:
    def generator() -> Generator[Any]:
        try:
            yield
        finally:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(generator(), Script(0))


def test_a_handler_that_yields_without_waiting_lets_others_have_the_loop() -> None:
    turns: Log = []

    async def other() -> None:
        for _ in range(3):
            turns.append("other")
            await asyncio.sleep(0)

    async def body() -> AsyncGenerator[Any, None]:
        beside = asyncio.create_task(other())
        for _ in range(4):
            turns.append("body")
            yield
        await beside

    run(body())
    assert turns[:4] == ["body", "other", "body", "other"]
