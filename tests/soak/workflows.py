"""Define the workflows of the soak: chains, joins, diamonds, skips, questions, models, poison."""

from __future__ import annotations

import random
from typing import Any

from tests.soak import growing_workflows, step_tasks

Spec = dict[str, Any]
MODELS = ("tiny", "small")
CHAIN = 5
KILLS_WORKER, KILLS_LAUNCHER = "kills_worker", "kills_launcher"
KILLERS = ("killed", KILLS_WORKER, KILLS_LAUNCHER)
"""Handlers that kill the process in which they run, its worker, or its launcher."""
SLOW = (KILLS_WORKER, KILLS_LAUNCHER)
"""They are poison late: if no parent sees the worker die, only a lapse is counted."""
POISON = {"raises": 4, "exits": 4, "killed": 4, KILLS_WORKER: 1, KILLS_LAUNCHER: 1}
"""Workflows whose run must fail, each by a handler of another kind, and their weights."""
CROWD, WRITES = "crowd", "writes"
CROWD_NODES = 300
"""A join of so many; too much for the weights, `rare` submits it. The hostile submitter writes."""
WEIGHTS = {
    "chain": 4, "join": 2, "diamond": 4, "skips": 3, "asks": 6, "models": 3, "long": 1, "wide": 2,
    growing_workflows.MAPS: 3, growing_workflows.GROWS: 3,
}  # fmt: skip


def _node(name: str, body: str, *deps: str, **more: Any) -> Spec:
    return {"id": name, "node": body, "depends_on": list(deps), **more}


def _linked(body: str) -> list[Spec]:
    return [_node("n", body, inputs=[{"name": "before", "from": "pipeline.before"}])]


PIPELINES: dict[str, list[Spec]] = {
    "quick": [_node("n", "quick")],
    "medium": [_node("n", "medium")],
    "link": _linked("link"),
    "hear": [_node("n", "hear", inputs=[{"name": "said", "from": "pipeline.said"}])],
    "long": [_node("n", "long")],
    "diamond": [
        _node("a", "quick"),
        *(_node(name, "medium", "a") for name in ("b", "c", "d")),
        _node("e", "quick", "b", "c", "d"),
    ],
    "join": [
        _node("src", "quick"),
        *(_node(f"p{n}", "quick", "src") for n in range(8)),
        _node("join", "quick", *(f"p{n}" for n in range(8))),
    ],
    "wide": [_node(f"w{n}", "medium") for n in range(10)],
    WRITES: [_node("n", "write")],
    step_tasks.LISTENS: [_node("n", step_tasks.LISTENS)],
    CROWD: [
        *(_node(f"p{n}", "instant") for n in range(CROWD_NODES)),
        _node("join", "instant", *(f"p{n}" for n in range(CROWD_NODES))),
    ],
    "model": [
        _node("first", "predict", gpu=True, model=MODELS[0]),
        _node("second", "predict", "first", gpu=True, model=MODELS[1]),
    ],
    **{name: [_node("n", name), _node("after", "quick", "n")] for name in POISON},
    **growing_workflows.PIPELINES,
}


def _step(step_id: str, pipeline: str, *after: str, **more: Any) -> Spec:
    return {
        "id": step_id, "kind": "pipeline", "pipeline": pipeline, "depends_on": list(after), **more,
    }  # fmt: skip


def _chain() -> list[Spec]:
    steps = [_step("s1", "link", inputs={"before": 0})]
    for number in range(2, CHAIN + 1):
        before = {"before": {"$from": f"s{number - 1}/n.value"}}
        steps.append(_step(f"s{number}", "link", f"s{number - 1}", inputs=before))
    return steps


_ASK: Spec = {
    "id": "ask",
    "kind": "input",
    "widget": "turnout",
    "prompt": "Which way?",
    "turnout_options": [{"label": "Left", "value": "l"}, {"label": "Right", "value": "r"}],
    "target": "way",
    "depends_on": ["work"],
}
WORKFLOWS: dict[str, list[Spec]] = {
    "chain": _chain(),
    "join": [_step("j", "join")],
    "diamond": [_step("d", "diamond")],
    "skips": [
        _step("work", "quick"),
        _step("maybe", "medium", "work", skip_if={"$from": "skip"}),
        _step("end", "quick", "maybe"),
    ],
    "asks": [
        _step("work", "quick"),
        _ASK,
        _step("end", "hear", "ask", inputs={"said": {"$from": "ask.way"}}),
    ],
    "models": [_step("work", "quick"), _step("gpu", "model", "work")],
    "long": [_step("work", "long"), _step("end", "quick", "work")],
    "wide": [_step("w", "wide")],
    WRITES: [_step("w", WRITES)],
    step_tasks.LISTENS: [_step("l", step_tasks.LISTENS)],
    CROWD: [_step("c", CROWD)],
    **{name: [_step("bad", name)] for name in POISON},
    **growing_workflows.WORKFLOWS,
}


def poison(rng: random.Random, *, slow: bool) -> str:
    """Draw a handler that must fail; one of `SLOW` only if `slow`."""
    weights = [weight * (slow or name not in SLOW) for name, weight in POISON.items()]
    return rng.choices([*POISON], weights)[0]


def load_workflow(name: str) -> Spec:
    """Return a workflow by name, as the provider's loader."""
    output = growing_workflows.OUTPUTS.get(name)
    return {"name": name, "steps": WORKFLOWS[name], "output": output}


def load_pipeline(name: str) -> Spec:
    """Return a pipeline by name, as the provider does."""
    return {"name": name, "nodes": PIPELINES[name]}
