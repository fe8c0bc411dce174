"""Planning: what is queued, skipped, failed or complete, by whom, and at which cost."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows import refs
from queue_workflows.dag import graph, plan
from tests.support.cpu import cpu_seconds
from tests.support.examples import examples
from tests.support.planning import FakeRun, built, ids, node
from tests.support.wait import patience

DIAMOND = (node("a"), node("b", "a"), node("c", "a"), node("d", "b", "c"))


def test_a_diamond_walks_through() -> None:
    run = FakeRun(built(*DIAMOND))
    assert ids(run.start()) == ["a"]
    run.finish("a")
    assert ids(run.after("a"), "queued") == ["b", "c"]
    run.finish("c")
    assert run.after("c") == plan.Plan([])
    run.finish("b")
    assert ids(run.after("b")) == ["d"]
    run.finish("d")
    assert run.after("d") == plan.Plan([], complete=True)


def test_the_last_event_finds_the_join_ready_even_if_others_dispatched_the_rest() -> None:
    run = FakeRun(built(*DIAMOND))
    run.finish("a", "b", "c")
    mine, theirs = plan.Progress(run.graph), plan.Progress(run.graph)
    assert ids(run.after("b", progress=mine)) == ["d"]
    assert ids(run.after("c", progress=theirs)) == ["d"]
    assert [row.node.id for row in run.rows] == ["d"]


def test_a_run_is_complete_even_when_the_last_event_also_plans_an_existing_row_again() -> None:
    run = FakeRun(built(node("x"), node("y"), node("w", "x", "y"), node("leaf")))
    run.finish("x", "y", "w", "leaf")
    made = run.after("y", "leaf")
    assert ids(made) == ["w"] and made.complete


def test_unknown_nodes_of_an_app_are_ignored() -> None:
    run = FakeRun(built(*DIAMOND))
    run.finish("hosts-own")
    assert run.after("hosts-own") == plan.Plan([])
    assert run.calls == 0


def test_ready_together_means_grouped_by_model_and_the_modelless_last() -> None:
    run = FakeRun(
        built(
            node("s"),
            node("cpu1", "s"),
            node("m1", "s", queue="gpu", model="m"),
            node("k1", "s", queue="gpu", model="k"),
            node("bare", "s", queue="gpu"),
            node("m2", "s", queue="gpu", model="m"),
            node("cpu2", "s"),
            node("k2", "s", queue="gpu", model="k"),
        )
    )
    run.finish("s")
    assert ids(run.after("s")) == ["m1", "m2", "k1", "k2", "cpu1", "bare", "cpu2"]


def test_order_within_a_model_is_that_of_the_definition_whatever_finished_first() -> None:
    run = FakeRun(built(node("x"), node("y"), node("n1", "y"), node("n2", "x"), node("n3", "y")))
    run.finish("x", "y")
    assert ids(run.after("x", "y")) == ["n1", "n2", "n3"]
    run = FakeRun(built(node("n1", "s"), node("a"), node("n2", "a"), node("s", "a", skip_if=True)))
    run.finish("a")
    assert ids(run.after("a"), "queued") == ["n1", "n2"]


def test_inputs_are_resolved_once_and_the_template_keeps_the_refs() -> None:
    template = {"v": {"$from": "s.value"}, "p": {"$out": "x/y"}, "k": 1, "own": {"$from": "key"}}
    run = FakeRun(built(node("s"), node("n", "s", inputs=template)), key="ctx")
    run.finish("s", value={"$from": "key"})
    (row,) = run.after("s").rows
    assert row.inputs == {"v": {"$from": "key"}, "p": "/o/x/y", "k": 1, "own": "ctx"}
    assert row.template == {**template, "p": "/o/x/y"}
    assert run.heads_read == [{"s", "key"}]


def test_refs_inside_an_apps_own_out_key_are_resolved() -> None:
    template = {"v": {"$out": {"$value": {"$out": 1, "x": {"$from": "key"}}}}}
    run = FakeRun(built(node("n", inputs=template)), key="ctx")
    (row,) = run.start().rows
    assert row.inputs == {"v": {"$out": 1, "x": "ctx"}}


@pytest.mark.parametrize(
    ("template", "words"),
    [({"$from": "s.gone"}, "s.gone"), ({"$from": "s.v", "$filter": {}}, "list"),
     ({"$from": "s.v", "$x": 1}, r"\$x")],
)  # fmt: skip
def test_an_input_that_does_not_resolve_fails_the_run_by_name(template: Any, words: str) -> None:
    run = FakeRun(built(node("s"), node("ok", "s"), node("n", "s", inputs={"i": template})))
    run.finish("s", v=1)
    made = run.after("s")
    assert made.rows == [] and not made.complete and made.failure is not None
    assert made.failure[0] == "n"
    assert re.search(rf"'n'.*'i'.*{words}", made.failure[1])


def test_a_path_without_a_folder_fails_the_run_unless_the_node_is_skipped() -> None:
    paths = {"p": {"$out": "x/y"}}
    run = FakeRun(built(node("n", inputs=paths)))
    made = run.start(out_dir=None)
    assert made.failure is not None and "'n'" in made.failure[1] and "out_dir" in made.failure[1]
    run = FakeRun(built(node("n", inputs=paths, skip_if=True)))
    assert ids(run.start(out_dir=None), "skipped") == ["n"]


def test_an_input_node_takes_widget_and_target_literally() -> None:
    step = {"id": "ask", "kind": "input", "widget": "w", "target": "t"}
    run = FakeRun(built(node("ask", inputs={"widget": "w", "target": "t"}, step=step)))
    (row,) = run.start(resolver=_explode).rows
    assert row.inputs == row.template == {"widget": "w", "target": "t"}
    assert run.heads_read == []


def _explode(value: Any, context: Any) -> Any:
    raise RuntimeError("host trouble")


@pytest.mark.parametrize(
    ("skip_if", "skipped"),
    [
        (True, True), ("yes", True), (False, False), (None, False), ({}, False),
        ({"$from": "flag"}, True), ({"$from": "flag", "$eq": False}, False),
        ({"$from": "gone"}, False), ({"$from": "flag.x.y"}, False),
        ({"$from": "flag", "$filter": {}}, False), ({"$from": 5}, False),
    ],
)  # fmt: skip
def test_skip_if(skip_if: Any, skipped: bool) -> None:
    run = FakeRun(built(node("n", skip_if=skip_if)), flag=True)
    made = run.start()
    assert ids(made, "skipped") == (["n"] if skipped else [])
    assert made.complete is skipped


def test_a_skipped_node_needs_no_resolvable_inputs() -> None:
    run = FakeRun(built(node("n", skip_if=True, inputs={"i": {"$from": "gone"}})))
    (row,) = run.start().rows
    assert (row.status, row.inputs, row.template) == ("skipped", None, None)


def test_skips_cascade_and_what_they_free_is_queued_in_the_same_plan() -> None:
    run = FakeRun(
        built(
            node("a"),
            node("b", "a", skip_if=True),
            node("c", "b", skip_if={"$from": "a.off"}),
            node("d", "c", "a"),
            node("e", "c", "open"),
            node("open"),
        )
    )
    run.finish("a", off=1)
    made = run.after("a")
    assert (ids(made, "queued"), ids(made, "skipped")) == (["d"], ["b", "c"])


def test_everything_skipped_is_complete_at_once() -> None:
    run = FakeRun(built(*(node(*each, skip_if=True) for each in (("a",), ("b", "a"), ("c", "a")))))
    made = run.start()
    assert ids(made, "skipped") == ["a", "b", "c"] and made.complete


def test_a_row_that_exists_is_neither_skipped_nor_failed_afterwards() -> None:
    run = FakeRun(
        built(
            node("x"), node("y"),
            node("w", "x", "y", skip_if={"$from": "late"}),
            node("v", "x", "y", inputs={"i": {"$from": "early"}}),
            node("after", "w"),
        ),
        early=1,
    )  # fmt: skip
    run.finish("x", "y")
    assert ids(run.after("x"), "queued") == ["w", "v"]
    run.status["w"] = "running"
    run.run_context = {"late": True}
    assert run.after("y") == plan.Plan([])


def test_resume_plans_only_what_is_missing() -> None:
    run = FakeRun(built(*DIAMOND))
    run.finish("a", "b")
    assert ids(run.start()) == ["c"]
    run.finish("c", "d")
    assert run.start() == plan.Plan([], complete=True)


def test_a_rolled_back_plan_leaves_no_false_knowledge() -> None:
    run = FakeRun(built(node("a"), node("b", "a", skip_if=True), node("z"), node("j", "b", "z")))
    run.finish("a")
    progress = plan.Progress(run.graph)
    plan.plan(progress, ["a"], run, out_dir=None)
    run.finish("z")
    assert run.after("z", progress=progress).rows == []
    assert ids(run.after("a", progress=progress)) == ["j", "b"]


def test_nothing_is_read_when_no_template_has_refs() -> None:
    run = FakeRun(built(node("a"), node("b", "a", inputs={"x": 1, "v": {"$value": 2}}, skip_if=0)))
    run.finish("a")
    assert run.after("a").rows[0].inputs == {"x": 1, "v": 2}
    assert run.heads_read == []


def test_one_context_read_a_round_and_none_for_heads_already_read() -> None:
    flag = {"skip_if": {"$from": "flag"}}
    chain = [node(f"n{i}", *([f"n{i - 1}"] if i else []), **flag) for i in range(50)]
    run = FakeRun(built(*chain, node("end", "n49", inputs={"i": {"$from": "other"}})), flag=1)
    run.run_context["other"] = 2
    assert ids(run.start(), "queued") == ["end"]
    assert run.heads_read == [{"flag"}, {"other"}]


class _Racing(FakeRun):
    """`late` completes right after the context was read for the first time."""

    def context(self, heads: set[str] | None) -> dict[str, Any]:
        found = super().context(heads)
        self.finish("late", v=1)
        return found


@pytest.mark.parametrize("custom", [False, True])
def test_a_head_missing_in_one_round_is_read_again_after_more_was_learned(custom: bool) -> None:
    run = _Racing(
        built(
            node("a"), node("late"), node("s", "a", skip_if={"$from": "late", "$ne": None}),
            node("t", "a", skip_if=True, inputs={"i": 1}),
            node("j", "t", "late", inputs={"i": {"$from": "late.v"}}),
        )
    )  # fmt: skip
    run.finish("a")
    resolver = functools.partial(refs.resolve_ref) if custom else refs.resolve_ref
    made = run.after("a", resolver=resolver)
    assert made.failure is None
    assert {row.node.id: row.inputs for row in made.rows} == {"s": {}, "t": None, "j": {"i": 1}}


def test_a_custom_resolver_gets_the_whole_context_once() -> None:
    def shout(value: Any, context: Any) -> Any:
        return context[value[1:]] if isinstance(value, str) and value[:1] == "@" else value

    run = FakeRun(
        built(node("a", inputs={"x": "@key"}), node("b", skip_if="@key"), node("c", "b")), key="K"
    )
    made = run.start(resolver=shout)
    assert {row.node.id: row.inputs for row in made.rows} == {"a": {"x": "K"}, "c": {}, "b": None}
    assert run.heads_read == [None]


def test_any_error_of_a_custom_resolver_is_an_unresolvable_ref_with_its_text() -> None:
    run = FakeRun(built(node("n", inputs={"i": 1})))
    made = run.start(resolver=_explode)
    assert made.failure == ("n", "node 'n': input 'i': RuntimeError: host trouble")
    run = FakeRun(built(node("n", skip_if=True)))
    assert ids(run.start(resolver=_explode), "queued") == ["n"]


def fan(width: int) -> graph.Graph:
    middle = [node(f"n{i}", "a") for i in range(width)]
    return built(node("a"), *middle, node("join", *(f"n{i}" for i in range(width))))


ORDERS = {
    "as queued": lambda names: names,
    "backwards": lambda names: names[::-1],
    "at random": lambda names: random.Random(1).sample(names, len(names)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_join_costs_a_constant_number_of_lookups_an_event(order: str, processes: int) -> None:
    width = 400
    run = FakeRun(fan(width))
    seats = [plan.Progress(run.graph) for _ in range(processes)]
    run.finish("a")
    assert len(run.after("a", progress=seats[0]).rows) == width
    run.calls = run.lookups = 0
    names = ORDERS[order]([f"n{i}" for i in range(width)])
    for index, name in enumerate(names):
        run.finish(name)
        made = run.after(name, progress=seats[index % processes])
        assert ids(made) == (["join"] if index == width - 1 else [])
    assert run.lookups <= 4 * processes * width
    assert run.full_reads == 0


def test_a_process_that_only_sees_the_last_event_catches_up_in_a_few_calls() -> None:
    run = FakeRun(fan(2000))
    run.finish("a", *(f"n{i}" for i in range(2000)))
    assert ids(run.after("n1999")) == ["join"]
    assert run.calls <= 12 and run.lookups <= 2000


def test_a_chain_of_4000_skipped_nodes_is_one_plan() -> None:
    chain = [node(f"n{i}", *([f"n{i - 1}"] if i else []), skip_if=True) for i in range(4000)]
    comb = node("join", *(f"n{i}" for i in range(4000)), "gate")
    run = FakeRun(built(*chain, node("gate"), comb))
    assert cpu_seconds(run.start) < patience(0.5)
    assert len(run.rows) == 4001


def test_an_open_dependency_is_queried_once_a_plan() -> None:
    chain = [node(f"n{i}", f"n{i - 1}" if i else "a", skip_if=True) for i in range(100)]
    first = node("j", *(f"n{i}" for i in range(100)), "z")
    second = node("k", *(f"n{i}" for i in range(50, 100)), "y")
    run = FakeRun(built(node("a"), node("y"), node("z"), *chain, first, second))
    run.finish("a")
    run.after("a")
    assert (run.lookups, run.present_calls) == (2, 1)


@st.composite
def workflows(draw: st.DrawFn) -> tuple[graph.Graph, int, int]:
    count = draw(st.integers(1, 14))
    nodes: list[dict[str, Any]] = []
    for index in range(count):
        earlier = [each["id"] for each in nodes]
        deps = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=5)) if earlier else []
        skip = draw(st.sampled_from([None, None, True, {"$from": "yes"}, {"$from": "gone"},
                                     *({"$from": f"{dep}.flag"} for dep in deps)]))  # fmt: skip
        inputs = {"x": {"$from": "yes"}} if draw(st.booleans()) else {}
        nodes.append(node(f"n{index}", *deps, skip_if=skip, inputs=inputs))
    shuffled = draw(st.permutations(nodes))
    return built(*shuffled), draw(st.integers(1, 3)), draw(st.integers(0, 2**16))


@settings(max_examples=examples(25))
@given(workflows())
def test_every_run_ends_complete_with_each_node_planned_once(
    drawn: tuple[graph.Graph, int, int],
) -> None:
    """Several processes, any order, any batches, some rolled back: invariants 6 and 8."""
    of, processes, seed = drawn
    choose = random.Random(seed)
    run = FakeRun(of, yes=True)
    seats = [plan.Progress(of) for _ in range(processes)]
    made = run.start(seats[0])
    running, events, ends = ids(made, "queued"), [], int(made.complete)
    while running or events:
        if running and (not events or choose.random() < 0.6):
            done = running.pop(choose.randrange(len(running)))
            run.finish(done, flag=choose.random() < 0.5)
            events.append(done)
            continue
        choose.shuffle(events)
        batch = [events.pop() for _ in range(choose.randint(1, len(events)))]
        seat = choose.randrange(processes)
        if choose.random() < 0.2:  # a rollback: nothing written, the cache thrown away
            plan.plan(seats[seat], batch, run, out_dir=None)
            seats[seat] = plan.Progress(of)
        made = plan.plan(seats[seat], batch, run, out_dir=None)
        assert made.failure is None
        new = run.write(made)
        running += [i for i in new if run.status[i] == "queued"]
        if made.complete:
            ends += 1
            assert not running
    assert ends >= 1
    assert set(run.status) == set(of.nodes)
    assert set(run.status.values()) <= {"completed", "skipped"}
    assert len({row.node.id for row in run.rows}) == len(run.rows) == len(of.nodes)
    _assert_skips_are_right(run)


def _assert_skips_are_right(run: FakeRun) -> None:
    for row in run.rows:
        literal = row.node.skip_if in (True, {"$from": "yes"})
        assert (row.status == "skipped") >= literal
        assert row.inputs is None or "x" not in row.inputs or row.inputs["x"] is True


def test_the_default_resolver_is_the_builtin_one() -> None:
    run = FakeRun(built(node("n", inputs={"i": {"$from": "k"}})), k=3)
    assert plan.plan(plan.Progress(run.graph), None, run, out_dir=None).rows[0].inputs == {
        "i": refs.resolve_ref({"$from": "k"}, {"k": 3})
    }
