"""A failed handler leaves its error and its traceback, without passwords."""

from __future__ import annotations

import sys
import types

import pytest

from queue_workflows import errors
from queue_workflows.claim import outcomes
from queue_workflows.run import job_output

DSN = "postgresql://letters:c4nary@db/letters"


def failed(error: Exception) -> outcomes.Outcome:
    try:
        raise error
    except type(error) as raised:
        return outcomes.of_error(raised, 0.1, "node s/a")


def test_passwords_are_masked_in_error_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    made = failed(ConnectionError(f"no way to {DSN}"))
    assert made.error == "ConnectionError: no way to postgresql://letters:***@db/letters"
    assert "postgresql://letters:***@db" in (made.detail or "")
    assert "c4nary" not in f"{made} {caplog.text}"


def test_the_frames_of_the_engine_are_left_out_of_a_traceback() -> None:
    engine = types.ModuleType("engine")
    code = "def call(body): body()"
    exec(compile(code, str(outcomes._PACKAGE / "node_executor.py"), "exec"), engine.__dict__)
    stream = job_output.Stream(sys.__stdout__ or sys.stdout, lambda _: False)

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
    recorded = str(outcomes.of_error(caught.value.with_traceback(trace.tb_next), 0.1, "n").detail)
    assert ("in body" in recorded, "in first" in recorded) == (True, True)
    assert "job_output.py" not in recorded
    assert "node_executor.py" not in recorded


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


def _chained(error: Exception) -> Exception:
    for number in range(3000):
        behind, error = error, ValueError(number)
        error.__cause__ = behind
    return error


def test_an_error_with_thousands_of_causes_is_shortened() -> None:
    made = failed(_chained(KeyError("first")))
    assert (made.kind, made.error) == ("failed", "ValueError: 2999")
    assert "raise error" in (made.detail or "")


def test_an_error_without_a_printable_traceback_is_a_failure_too() -> None:
    class Hostile(Exception):
        @property
        def __notes__(self) -> list[str]:
            raise MemoryError

        @property  # before Python 3.11 no code reads notes
        def __suppress_context__(self) -> bool:
            raise MemoryError

    made = failed(Hostile("no"))
    assert (made.kind, made.error) == ("failed", "Hostile: no")
    assert "in failed" in (made.detail or "") and "Hostile; no further details" in str(made.detail)


class _Later(errors.Snooze):
    def __init__(self) -> None:
        """As apps forget to: the base class's is not called."""


class _Again(errors.Retry):
    def __init__(self) -> None:
        """As apps forget to: the base class's is not called."""


def test_a_signal_of_a_class_of_the_app_counts_as_ours() -> None:
    assert failed(_Later()).kind == "snoozed"
    made = failed(_Again())
    assert (made.kind, made.raised.wish, made.raised.after_s) == ("failed", "retry", None)


@pytest.mark.parametrize(("asked_s", "waits_s"), [(0, 1), (0.25, 1), (1.5, 1.5)])
def test_a_snooze_lasts_a_second_at_the_least(asked_s: float, waits_s: float) -> None:
    assert failed(errors.Snooze(asked_s)).raised.after_s == waits_s


def test_the_reason_of_a_snooze_is_masked() -> None:
    assert "c4nary" not in failed(errors.Snooze(1, f"no answer of {DSN}")).error
