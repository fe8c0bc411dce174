"""Functions of the commands: parse inputs, answers and durations; format graphs and lines."""

from __future__ import annotations

import datetime
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from queue_workflows import errors
from queue_workflows.cli import answer, fleet, run_views, runs, texts, tree
from queue_workflows.cli.run_views import RunSnapshot, Step
from queue_workflows.runtime import signals, supervisor
from tests.support import clocks, tabled

TURNOUT = {
    "widget": "turnout",
    "turnout_options": [{"label": "Left", "value": "l"}, {"label": "Right", "value": ["r"]}],
}


# --- inputs ------------------------------------------------------------------------------------


def test_a_value_is_json_if_it_can_be_and_else_text() -> None:
    cases: list[Any] = [
        ("1", 1),
        ('{"a": [true]}', {"a": [True]}),
        ('"1"', "1"),
        ("word", "word"),
        ("", ""),
        ("a=b", "a=b"),
        ("NaN", "NaN"),
        ("[1", "[1"),
    ]
    for text, value in cases:
        with tabled.case(text, value):
            assert answer.inputs([f"key={text}"]) == {"key": value}


def test_later_inputs_win_over_earlier_ones_and_files(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"a": 1, "b": 2}')
    assert answer.inputs(["a=0", f"@{path}", "b=3"]) == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("content", "said"), [("[1]", "a JSON object"), ("{", "not JSON"), ("[" * 99999, "not JSON")]
)
def test_a_file_that_holds_no_object_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(errors.InvalidConfig, match=said) as refusal:
        answer.inputs([f"@{path}"])
    assert str(path) in str(refusal.value)


def test_a_value_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(errors.InvalidConfig, match="--input k is nested too deeply"):
        answer.inputs(["k=" + "[" * 100_000])


# --- answers -----------------------------------------------------------------------------------


def test_yes_answers_with_defaults() -> None:
    cases: list[Any] = [
        (TURNOUT, "l"),
        (TURNOUT | {"default": "x"}, "x"),
        ({"widget": "choose_one", "options": ["a", "b"]}, "a"),
        ({"widget": "choose_one", "options": [{"name": "n"}], "multiple": True}, [{"name": "n"}]),
        ({"widget": "choose_one", "options": []}, None),
        ({"widget": "file_upload"}, None),
        ({"widget": "confirm"}, True),
        ({"widget": "input", "$answer_type": "boolean"}, True),
        ({"widget": "input", "$answer_type": "integer", "default": 3}, 3),
        ({"widget": "choose_one", "$answer_type": "integer", "options": [4, 5]}, 4),
        ({"widget": "of_the_app"}, True),
    ]
    for spec, value in cases:
        with tabled.case(spec, value):
            assert answer.default(spec) == value
            assert answer.read("", spec) == value


@pytest.mark.parametrize(
    "spec",
    [
        {"widget": "input", "$answer_type": "integer"},
        {"widget": "input", "$answer_type": "string"},
        {"widget": "input", "$answer_type": "array"},
        {"widget": "number"},
        {"widget": "of_the_app", "type": "text"},
    ],
)
def test_yes_makes_no_answer_of_a_type_up(spec: dict[str, Any]) -> None:
    for refused in (lambda: answer.default(spec), lambda: answer.read("", spec)):
        with pytest.raises(errors.InputRefused, match="has no default: its answer is of type"):
            refused()


def test_a_prompt_offers_no_answer_of_another_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"\n7\n")
    os.close(writer)
    spec = {"widget": "input", "$answer_type": "integer", "prompt": "How many?"}
    with os.fdopen(reader) as typed, signals.StopRequest() as stop:
        monkeypatch.setattr(sys, "stdin", typed)
        assert answer.ask({"node_id": "s/q", "input_spec": spec}, stop) == (True, 7)
    shown = capsys.readouterr().err
    assert "How many?\n[integer] > " in shown and "True" not in shown
    assert "the question has no default: its answer is of type integer" in shown


def test_a_prompt_takes_no_file_that_its_question_does_not_accept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"photo.png\nnumbers.csv\n")
    os.close(writer)
    spec = {"widget": "file_upload", "accept": [".csv"]}
    with os.fdopen(reader) as typed, signals.StopRequest() as stop:
        monkeypatch.setattr(sys, "stdin", typed)
        asked = answer.ask({"node_id": "s/q", "input_spec": spec}, stop)
    assert asked == (True, "numbers.csv")
    assert "s/q does not take 'photo.png': it accepts .csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "spec", "value"),
    [
        ("2", TURNOUT, ["r"]),
        ("Left", TURNOUT, "l"),
        ("1, b", {"options": ["a", "b"], "multiple": True}, ["a", "b"]),
        ("a.txt", {"options": [{"rel_path": "a.txt", "n": 1}]}, {"rel_path": "a.txt", "n": 1}),
        ("1", {"widget": "pick_or_upload", "library": ["a.txt"]}, "a.txt"),
        ("own.txt", {"widget": "pick_or_upload", "library": ["a.txt"]}, "own.txt"),
        ("5", {"widget": "number"}, 5),
        ("free text", {"widget": "text"}, "free text"),
    ],
)
def test_what_a_typed_line_means(text: str, spec: dict[str, Any], value: object) -> None:
    assert answer.read(text, spec) == value


@pytest.mark.parametrize("text", ["0", "3", "left", "1,9", pytest.param("9" * 5000, id="long")])
def test_a_line_that_names_no_choice_is_refused(text: str) -> None:
    with pytest.raises(errors.InputRefused, match="none of the choices"):
        answer.read(text, TURNOUT | {"multiple": "," in text})


# --- pictures ----------------------------------------------------------------------------------


def test_the_word_for_a_step() -> None:
    cases: list[Any] = [
        ({}, "waiting"),
        ({"queued": 1}, "queued"),
        ({"completed": 1}, "running"),
        ({"completed": 2, "running": 1}, "running"),
        ({"completed": 2, "awaiting_input": 1}, "awaiting_input"),
        ({"completed": 2, "running": 1, "failed": 1}, "failed"),
        ({"completed": 2, "cancelled": 1}, "cancelled"),
        ({"completed": 2, "skipped": 1}, "completed"),
        ({"skipped": 3}, "skipped"),
    ]
    for counts, state in cases:
        with tabled.case(counts, state):
            assert Step("s", 3, counts, None).state == state


def a_node(node_id: str, status: str, **more: Any) -> dict[str, Any]:
    return {
        "node_id": node_id, "status": status, "elapsed_s": 1.5, "progress": None, "error": None,
        "worker_id": "box:12:0a1b2c3d:ff", "crash_count": 0, "lapse_count": 0,
        "attempts": 0, "max_attempts": 3, "blocked_reason": None, "available_at": None,
    } | more  # fmt: skip


def a_picture(steps: list[Step], nodes: list[dict[str, Any]]) -> RunSnapshot:
    run = {"id": "R", "workflow_name": "w", "status": "running", "error": None, "elapsed_s": 2.0}
    return RunSnapshot(run, steps, nodes)


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (0.4, "40 %"),
        ({"files": 3, "of": "x\ny"}, r"files=3 of=x\ny"),
        ("reads\nlear.txt", r"reads\nlear.txt"),
        (None, ""),
        ([1], ""),
        (True, ""),
    ],
)
def test_progress_in_words(progress: object, shown: str) -> None:
    assert texts.progress_text(progress) == shown


def test_a_running_node_shows_its_worker_and_progress() -> None:
    node = a_node("s/n", "running", progress=0.5, crash_count=1)
    assert texts.node_text(node) == (
        "running, 1.5 s, 50 %, on box pid 12, taken back from a dead worker 1 time"
    )


def test_a_node_whose_lease_lapsed_shows_that() -> None:
    node = a_node("s/n", "queued", lapse_count=2)
    assert texts.node_text(node) == "queued, its lease lapsed 2 times"


def test_a_node_whose_attempt_failed_shows_when_it_runs_again() -> None:
    at = datetime.datetime(2026, 1, 31, 9, tzinfo=datetime.timezone.utc)
    node = a_node("s/n", "queued", attempts=1, error="broke", available_at=at)
    again = "queued, attempt 1 of 3 failed, it runs again"
    assert texts.node_text(node) == f"{again} at 2026-01-31 09:00:00 UTC, broke"
    soon = node | {"available_at": None}
    assert texts.node_text(soon) == f"{again} as soon as a worker is free, broke"
    assert texts.again_text(node | {"blocked_reason": "locked"}, 1) == ""


def test_lines_print_changes_once_and_progress_now_and_then() -> None:
    said: list[str] = []
    now = [0.0]
    lines = run_views.Lines(said.append, now_fn=lambda: now[0])

    def show(done: int, status: str = "running", nodes: int = 0) -> list[str]:
        said.clear()
        counts = {"completed": done, status: 3 - done}
        failed = [a_node("s/bad", "failed", error="boom")] * nodes
        lines.show(a_picture([Step("s", 3, counts, 1.0)], failed))
        return list(said)

    assert show(0) == [
        "run R (w): running, 0/3 nodes, 2.0 s",
        "  s: 0/3 completed, 3 running, 1.0 s",
    ]
    assert show(0) == []
    assert show(1) == []
    now[0] += run_views.AGAIN_S
    assert show(1) == ["  s: 1/3 completed, 2 running, 1.0 s"]
    assert show(2, "failed", 1) == [
        "  s: 2/3 completed, 1 failed, 1.0 s",
        "    s/bad: failed, 1.5 s, boom",
    ]
    assert show(2, "failed", 1) == []


@pytest.mark.parametrize(("encoding", "signs"), [("utf-8", "✔▶·"), ("ascii", "+>.")])
def test_the_tree_shows_steps_and_nodes_in_a_terminals_own_signs(
    encoding: str, signs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "encoding", encoding)
    console = Console(width=80, height=30, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    steps = [
        Step("parse", 2, {"completed": 1, "running": 1}, 1.0),
        Step("[red]", 1, {}, None),
    ]
    nodes = [a_node("parse/a", "completed"), a_node("parse/b", "running", progress=0.25)]
    console.print(tree.Tree(console).render(a_picture(steps, nodes)))
    console.file.close()
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0][:3] == ["run", "R", "(w):"]
    assert lines[1][:2] == [signs[1], "parse"]
    assert lines[2][:3] == [signs[0], "a", "completed,"]
    assert lines[3][:7] == [signs[1], "b", "running,", "1.5", "s,", "25", "%,"]
    assert lines[4] == [signs[2], "[red]", "waiting"]


def test_a_tree_is_no_higher_than_the_terminal() -> None:
    console = Console(width=80, height=16, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    nodes = [a_node(f"s/{n}", "running") for n in range(40)]
    console.print(
        tree.Tree(console).render(a_picture([Step("s", 40, {"running": 40}, 1.0)], nodes))
    )
    console.file.close()
    assert len(console.export_text().splitlines()) < 16


@pytest.fixture
def drawn() -> Callable[..., list[str]]:
    """The lines of a picture as a terminal of this width shows them."""

    def draw(picture: RunSnapshot, width: int, height: int = 30) -> list[str]:
        with Path("/dev/null").open("w") as nowhere:
            console = Console(width=width, height=height, record=True, file=nowhere)
            console.print(tree.Tree(console).render(picture))
            return [line.rstrip() for line in console.export_text().splitlines()]

    return draw


@pytest.mark.parametrize(
    ("running", "first", "last"), [(0, "s00", "s08"), (40, "s40", "s48"), (99, "s91", "s99")]
)
def test_of_more_steps_than_a_terminal_has_lines_the_tree_shows_those_that_go_on(
    drawn: Callable[..., list[str]], running: int, first: str, last: str
) -> None:
    done = [Step(f"s{n:02}", 1, {"completed": 1}, 1.0) for n in range(running)]
    rest = [Step(f"s{n:02}", 1, {}, None) for n in range(running + 1, 100)]
    steps = [*done, Step(f"s{running:02}", 1, {"running": 1}, 1.0), *rest]
    _, *lines = drawn(a_picture(steps, []), width=80, height=15)
    names = [line.split()[1] for line in lines]
    assert (names[0], names[-1], len(names)) == (first, last, 9)


RUN_ID = "6a1f3f6e-6f0c-4d1c-9f43-0f6f5f8d3a11"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_keeps_signs_and_states(
    drawn: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(Console, "encoding", "utf-8")
    steps = [Step("prepare_the_sources", 2, {"completed": 1, "running": 1}, 1.0)]
    steps += [Step("end", 1, {}, None)]
    nodes = [
        a_node("prepare_the_sources/a_node_with_a_name", "running"),
        a_node("prepare_the_sources/b", "completed"),
    ]
    picture = a_picture(steps, nodes)
    picture.run.update(id=RUN_ID, workflow_name="nightly")
    lines = drawn(picture, width)
    head, body = lines[:-4], lines[-4:]
    assert all(len(line) <= width for line in lines)
    assert " ".join(head) == f"run {RUN_ID} (nightly): running, 1/3 nodes, 2.0 s"
    assert [line.split()[0] for line in body] == ["▶", "▶", "✔", "·"]
    states = ("1/2 completed", "running, 1.5 s", "completed, 1.5 s", "waiting")
    assert all(state in line for state, line in zip(states, body, strict=True)), body


def test_a_long_error_is_cut_and_hides_no_node(drawn: Callable[..., list[str]]) -> None:
    picture = a_picture([Step("s", 1, {"failed": 1}, 1.0)], [a_node("s/n", "failed")])
    picture.run["error"] = "x" * 200
    lines = drawn(picture, 50)
    assert len(lines) == 4
    assert "failed" in lines[-1]


@pytest.mark.parametrize(("width", "stacked"), [(None, False), (200, False), (40, True)])
def test_runs_that_fit_no_table_are_shown_below_each_other(
    capsys: pytest.CaptureFixture[str], width: int | None, stacked: bool
) -> None:
    row = {
        "id": RUN_ID, "workflow_name": "w", "status": "failed", "nodes": {"completed": 1},
        "nodes_total": 2, "error": "boom " * 30,
        "created_at": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc),
    }  # fmt: skip
    runs.show([row], width)
    lines = capsys.readouterr().out.splitlines()
    if stacked:
        assert lines[:3] == [RUN_ID, "  w: failed, 1/2 nodes", "  2026-01-02 03:04:05"]
        assert all(len(line) <= 40 for line in lines)
    else:
        assert len(lines) == 2


# --- tracebacks --------------------------------------------------------------------------------

TRACE = """Traceback (most recent call last):
  File "/elsewhere/site-packages/queue_workflows/node_executor.py", line 90, in _call
    return body(**bound)
  File "/srv/queue_workflows/app.py", line 7, in read
    helper()
  File "/elsewhere/site-packages/queue_workflows/node_queue.py", line 1, in helper
    raise ValueError("secret line 7")
ValueError: secret line 7""".splitlines()


def test_a_traceback_starts_with_the_apps_first_frame() -> None:
    assert run_views.app_frames(TRACE) == TRACE[3:]
    assert run_views.app_frames(TRACE[:3] + TRACE[-1:]) == []
    demo = TRACE[1].replace("node_executor", "demo/workflow")
    assert run_views.app_frames([TRACE[0], demo])[0] == demo
    stored = TRACE[1].replace("node_executor", "x" * 5000)
    assert run_views.app_frames([TRACE[0], stored])[0] == stored


def test_tracebacks_go_to_stderr_short_or_whole(capsys: pytest.CaptureFixture[str]) -> None:
    trace = [*TRACE[:4], *("    pad\x1b[31m" for _ in range(40)), *TRACE[4:]]
    failed = [{"node_id": "s/n", "error": "e", "traceback": "\n".join(trace)}]
    failed.append({"node_id": "s/m", "error": "e", "traceback": None})
    run_views.show_traces({"failed": failed}, whole=False)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert said.out == ""
    assert lines[0] == "traceback of s/n (all of it: --debug):"
    assert len(lines) == 1 + run_views.TRACE_LINES
    assert lines[-1] == "ValueError: secret line 7"
    assert "\x1b" not in said.err
    run_views.show_traces({"failed": failed}, whole=True)
    assert TRACE[1] in capsys.readouterr().err.splitlines()


# --- the longest chain -------------------------------------------------------------------------


def test_the_longest_chain_is_by_time_not_by_number() -> None:
    walk = {"a": [], "b": ["a"], "c": ["b"], "slow": ["a"], "end": ["c", "slow"], "other": []}
    seconds = {"a": 1.0, "b": 1.0, "c": 1.0, "slow": 5.0, "end": 1.0, "other": 6.5}
    assert run_views.longest_chain(walk, seconds) == ["a", "slow", "end"]
    assert run_views.longest_chain(walk, seconds | {"slow": 0.5}) == ["other"]
    assert run_views.longest_chain({}, {}) == []
    assert run_views.longest_chain(walk | {"a": ["end"]}, seconds) == []


# --- processes ---------------------------------------------------------------------------------


def test_a_parent_that_dies_again_and_again_is_replaced_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, begun = clocks.Clock(100.0), list[float]()

    class Dying:
        def __init__(self, *_: object, **__: object) -> None:
            begun.append(clock.now)

        def reap(self) -> supervisor.Death:
            return supervisor.Death(1, None, 0)

    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(supervisor, "Child", Dying)
    own = fleet.Fleet()
    own.start([], None)
    for _ in range(600):
        clock.now += 0.1
        own.check()
    own.__exit__()
    pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert pauses == sorted(pauses)
    assert 5 <= len(begun) <= 12


def test_a_stop_waits_as_long_as_running_jobs_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clocks.Clock(0.0)
    parent = Mock(spec=supervisor.Child)

    def wait(seconds: float) -> supervisor.Death | None:
        clock.now += seconds
        return supervisor.Death(0, None, 0) if clock.now > 290 else None

    parent.wait.side_effect = wait
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(supervisor, "Child", lambda *_, **__: parent)
    monkeypatch.setenv("QUEUE_WORKFLOWS_SHUTDOWN_TIMEOUT_S", "300")
    own = fleet.Fleet()
    own.start([], None)
    own.stop(signals.StopRequest())
    assert clock.now > 290
