"""A loop runs its nodes again with what they returned, until a value ends it."""

from __future__ import annotations

import pytest

from queue_workflows import declare, loop, node, runs, workflow
from queue_workflows.__main__ import main
from tests.support import flow

pytestmark = pytest.mark.usefixtures("invariants_hold")

CALLS: list[str] = []
BAD: set[int] = set()


@node
def lower(state: dict[str, int]) -> dict[str, int]:
    CALLS.append(f"lower {state['n']}")
    if state["n"] in BAD:
        raise ValueError("not now")
    return {"n": state["n"] - 1}


@node
def report(n: int) -> str:
    CALLS.append(f"report {n}")
    return f"at {n}"


@workflow
def count_down(start: dict[str, int]) -> None:
    last = loop(lower, start=start, until=lambda r: r["n"] == 0, at_most=4, id="down")
    report(last["n"])


@workflow
def as_far_as_it_goes(start: dict[str, int]) -> None:
    until_zero = loop(
        lower, start=start, until=lambda r: r["n"] == 0, at_most=2, must=False, id="down"
    )
    report(until_zero["n"])


@pytest.fixture(autouse=True)
def known(toy: flow.Flow) -> None:
    del toy
    CALLS.clear()
    BAD.clear()
    declare.install(lower, report, count_down, as_far_as_it_goes)


def submit(name: str, n: int) -> str:
    return runs.submit(name, inputs={"start": {"n": n}})["id"]


def test_it_ends_when_until_holds_and_the_rounds_left_are_skipped(toy: flow.Flow) -> None:
    run_id = submit("count_down", 2)
    toy.go()
    assert flow.status(run_id) == "completed", flow.run(run_id)["error"]
    assert CALLS == ["lower 2", "lower 1", "report 0"]
    assert flow.states(run_id) == {
        "down/lower#1": "completed",
        "down/lower#2": "completed",
        "down/lower#3": "skipped",
        "down/lower#4": "skipped",
        "down": "completed",
        "report/report": "completed",
    }
    row = flow.job(run_id, "down")
    assert (row["context_delta"], row["inputs"]) == ({"n": 0}, {"rounds": 2})


def test_rounds_are_made_as_they_are_reached(toy: flow.Flow) -> None:
    run_id = submit("count_down", 9)
    toy.look()
    assert flow.states(run_id) == {"down/lower#1": "queued"}
    flow.finish(run_id, "down/lower#1", n=8)
    assert flow.states(run_id) == {"down/lower#1": "completed", "down/lower#2": "queued"}


def test_a_loop_that_does_not_end_fails_the_run_at_its_limit(toy: flow.Flow) -> None:
    run_id = submit("count_down", 9)
    toy.go()
    assert (flow.status(run_id), len(CALLS)) == ("failed", 4)
    assert flow.run(run_id)["error"] == (
        "loop 'down': 'until' does not hold after round 4, and at_most is 4: raise it, or take the "
        "last state by must=False"
    )


def test_the_last_state_counts_if_it_need_not_end(toy: flow.Flow) -> None:
    run_id = submit("as_far_as_it_goes", 9)
    toy.go()
    assert (flow.status(run_id), CALLS[-1]) == ("completed", "report 7")


def test_retry_goes_on_in_the_round_that_failed(toy: flow.Flow) -> None:
    BAD.add(2)
    run_id = submit("count_down", 3)
    toy.go()
    assert (flow.status(run_id), CALLS) == ("failed", ["lower 3", "lower 2"])
    BAD.clear()
    CALLS.clear()
    runs.retry(run_id)
    toy.go()
    assert (flow.status(run_id), CALLS) == ("completed", ["lower 2", "lower 1", "report 0"])


def test_retry_from_a_round_repeats_it_and_those_after_it(toy: flow.Flow) -> None:
    run_id = submit("count_down", 3)
    toy.go()
    CALLS.clear()
    runs.retry(run_id, from_node="down/lower#2")
    toy.go()
    assert (flow.status(run_id), CALLS) == ("completed", ["lower 2", "lower 1", "report 0"])
    assert flow.job(run_id, "down")["inputs"] == {"rounds": 3}


def test_show_folds_the_rounds(toy: flow.Flow, capfd: pytest.CaptureFixture[str]) -> None:
    def lines(*argv: str) -> list[str]:
        assert main(["show", *argv]) == 0
        return capfd.readouterr().out.splitlines()

    run_id = submit("count_down", 2)
    assert not [line for line in lines(run_id) if line.startswith("loop")]  # it has not started
    toy.look()
    assert "loop down: 1 round of at most 4, last running" in lines(run_id)
    toy.go()
    shown = lines(run_id)
    assert "loop down: 2 rounds of at most 4, last completed" in shown
    assert not [line for line in shown if line.startswith("down/lower#")]
    assert "and 4 nodes more: --node NODE, --round N, --full or --json" in shown
    opened = [line for line in lines(run_id, "--round", "2") if "lower" in line]
    assert opened[0].startswith("down/lower#2 (after down/lower#1): completed")
    assert not [line for line in opened if line.startswith("down/lower#1")]
    assert len([line for line in lines(run_id, "--full") if line.startswith("down/lower#")]) == 4
    assert main(["show", run_id, "--round", "5"]) == 2
    assert "has no --round 5" in capfd.readouterr().err


def test_show_names_the_round_that_failed(
    toy: flow.Flow, capfd: pytest.CaptureFixture[str]
) -> None:
    BAD.add(2)
    run_id = submit("count_down", 3)
    toy.go()
    assert main(["show", run_id]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert "loop down: 2 rounds of at most 4, last failed" in shown
    assert [line for line in shown if line.startswith("down/lower#")] == [
        "down/lower#2 (after down/lower#1): failed"
    ]
