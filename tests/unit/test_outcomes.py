"""What a failed body leaves: its error and its traceback, without the passwords in them."""

from __future__ import annotations

import sys
import types

import pytest

from queue_workflows.store import outcomes
from queue_workflows.worker import capture

DSN = "postgresql://letters:canary@db/letters"


def failed(error: Exception) -> outcomes.Outcome:
    try:
        raise error
    except type(error) as raised:
        return outcomes.of_error(raised, 0.1, "node s/a")


def test_passwords_are_masked_in_error_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    made = failed(ConnectionError(f"no way to {DSN}"))
    assert made.error == "ConnectionError: no way to postgresql://letters:***@db/letters"
    assert "postgresql://letters:***@db" in (made.detail or "")
    assert "canary" not in f"{made} {caplog.text}"


def test_the_frames_of_the_engine_are_left_out_of_a_traceback() -> None:
    engine = types.ModuleType("engine")
    code = "def call(body): body()"
    exec(compile(code, str(outcomes._PACKAGE / "node_executor.py"), "exec"), engine.__dict__)
    stream = capture._Tee(sys.__stdout__ or sys.stdout)

    def first() -> None:
        raise KeyError("first")

    def body() -> None:
        try:
            first()
        except KeyError:
            stream.write(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError) as caught:
        engine.call(body)
    trace = caught.value.__traceback__
    assert trace is not None
    told = str(outcomes.of_error(caught.value.with_traceback(trace.tb_next), 0.1, "n").detail)
    assert ("in body" in told, "in first" in told) == (True, True)
    assert "capture.py" not in told
    assert "node_executor.py" not in told


def test_an_error_of_the_engines_own_keeps_its_frames() -> None:
    engine = types.ModuleType("engine")
    code = "def call(): raise ValueError"
    exec(compile(code, str(outcomes._PACKAGE / "node_executor.py"), "exec"), engine.__dict__)
    with pytest.raises(ValueError) as caught:
        engine.call()
    trace = caught.value.__traceback__
    assert trace is not None
    assert "node_executor.py" in str(
        outcomes.of_error(caught.value.with_traceback(trace.tb_next), 0.1, "n").detail
    )
