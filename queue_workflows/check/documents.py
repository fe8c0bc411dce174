"""Check a workflow's documents: misspelt keys, and inputs that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from queue_workflows import config, errors, refs
from queue_workflows.check import findings
from queue_workflows.check.findings import Finding
from queue_workflows.dag import answers, definition, policy, widgets

_STEP = {"id", "kind", "depends_on", "skip_if", "inputs", "pipeline"}
_KEYS = {
    "pipeline": _STEP,
    "map": _STEP | {"over", "key", "as", "at_once", "may_fail", "steps", "result"},
    "branch": _STEP | {"on", "arms", "other"},
    "loop": _STEP | {"start", "until", "at_most", "result", "must"},
    "run": _STEP - {"pipeline"} | {"workflow", "wait"},
}
"""The keys of the steps without a question, by their kind."""
_NODE = {"id", "node", "depends_on", "gpu", "model", "inputs", "skip_if"} | set(policy.KEYS)
_PIPELINE = {"name", "nodes", "defaults"}
_INPUT = {
    "id", "kind", "widget", "prompt", "target", "depends_on", "skip_if", "timeout_s", "default",
    answers.TYPE,
    "source", "multiple", "accept", "library", "options", "turnout_options",
}  # fmt: skip
_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]+")
_WIDGETS = ("choose_one", "file_upload", "pick_or_upload", "turnout")
"""The built-in widgets; an app may register more."""
_ANSWERED = {"choose_one": ("source",), "turnout": ("turnout_options", "options")}
"""A widget needs one of these keys, else there are no choices."""
_ATTEMPTS = {"attempts", "max_attempts", "max_tries", "maximum_attempts", "tries"}
"""Keys of other systems that count the first attempt, unlike `retries`."""
_OFFERS = ("source", "turnout_options", "options", "library", "accept")
"""The keys that list the allowed answers."""


def steps(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the steps of a workflow, and the steps inside its maps."""
    for step in cast("list[Mapping[str, Any]]", document["steps"]):
        yield step
        if step.get("kind") == "map" and "steps" in step:
            yield from steps(step)


def check(
    document: Mapping[str, Any], pipelines: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    """Yield a finding for each part that expanding ignores; it must accept the documents."""
    seen: set[str] = set()
    outer = {id(step) for step in document["steps"]}
    for step in steps(document):
        at = f"step {step['id']!r}"
        kind = step.get("kind")
        if kind == "node" and id(step) not in outer:
            yield from _node(step, at)
            continue
        yield from _id(step, at)
        yield from _depends_on(step, at)
        if kind == "input":
            yield from _question(step, at)
        elif isinstance(kind, str) and kind in _KEYS:
            yield from _unread_keys(step, _KEYS[kind], at)
            if "pipeline" in step and kind != "run":
                yield from _pipeline(step, pipelines[step["pipeline"]], seen, at)
        else:
            meant = errors.closest(kind, ("input", *_KEYS)) if isinstance(kind, str) else None
            yield findings.error(
                at,
                f"a step of kind {kind!r:.120} makes no nodes, and is left out",
                f"did you mean {meant!r}?" if meant else definition.KINDS,
            )


def _pipeline(
    step: Mapping[str, Any], schema: Mapping[str, Any], seen: set[str], at: str
) -> Iterator[Finding]:
    """Check the inputs of a pipeline step, and its pipeline unless an earlier step has it, too."""
    yield from _unread_inputs(step, schema, at)
    if step["pipeline"] not in seen:
        seen.add(step["pipeline"])
        yield from _unread_keys(schema, _PIPELINE, f"pipeline {step['pipeline']!r}")
        for node in schema["nodes"]:
            yield from _node(node, f"pipeline {step['pipeline']!r}: node {node['id']!r}")
    for node in schema["nodes"]:
        if step.get("skip_if") and "skip_if" in node and not node["skip_if"]:
            yield findings.warning(
                at,
                f"node {node['id']!r} has an empty 'skip_if', so that the one of the step counts",
                "remove the empty one, or give the node a condition that never holds",
            )


def _question(step: Mapping[str, Any], at: str) -> Iterator[Finding]:
    widget, own = step["widget"], config.get_config().input_widgets
    needed = _ANSWERED.get(widget)
    if needed is not None and not any(step.get(key) for key in needed):
        yield findings.warning(at, f"widget {widget!r} offers nothing", f"give it {needed[0]!r}")
    if widget in _WIDGETS:
        yield from _unread_keys(step, _INPUT, at)
    elif widget not in own:
        meant = errors.closest(widget, (*_WIDGETS, *own))
        remedy = "register_input_widget() defines its input_spec"
        remedy = f"did you mean {meant!r}?" if meant else remedy
        yield findings.warning(at, f"unknown widget {widget!r}", remedy)
    yield from _default(step, at)


def _default(step: Mapping[str, Any], at: str) -> Iterator[Finding]:
    """Report a timeout's answer that no person may give.

    Values that depend on a run are skipped.
    """
    asked = policy.read_input(step, at) or {}
    if "default" not in asked:
        return
    own = step["widget"] in config.get_config().input_widgets
    value = answers.decoded(step, asked["default"])
    try:
        answers.check_type(step, value, "'default'")
        if own or refs.heads([step.get(key) for key in _OFFERS]):
            return
        spec = widgets.build_spec(step, context={}, out_dir=None)
        answers.check(spec, value, "'default'")
    except errors.InputRefused as refused:
        yield findings.error(at, str(refused), "give it an answer that a person could give")


def _id(entry: Mapping[str, Any], at: str) -> Iterator[Finding]:
    """Report an id that refs, commands and folders carry badly, or that is a number."""
    given = entry["id"]
    if not isinstance(given, str):
        yield findings.warning(at, f"the id is a number, read as {str(given)!r}", "write a text")
    elif "." in given:
        yield findings.warning(
            at,
            f"no ref can name {given!r}, since dots separate the parts of a ref",
            "leave them out",
        )
    elif not _PLAIN_ID.fullmatch(given):
        yield findings.warning(
            at, f"the id {given!r} is hard to write in commands", "use letters, digits, '_' and '-'"
        )


def _depends_on(entry: Mapping[str, Any], at: str) -> Iterator[Finding]:
    given = entry.get("depends_on")
    if given is not None and not isinstance(given, (list, tuple)):
        yield findings.warning(at, f"'depends_on' is {given!r}, read as a list of one", "list ids")


def _inputs(node: Mapping[str, Any], at: str) -> Iterator[Finding]:
    """Report inputs without a name, and names that stand twice."""
    seen: set[str] = set()
    for given in node.get("inputs") or ():
        name = given.get("name")
        if not name:
            yield findings.error(at, "an input without a 'name' is not passed", "name it")
        elif name in seen:
            yield findings.error(
                at, f"two inputs have the name {name!r}, and the last one counts", "rename one"
            )
        else:
            seen.add(name)


def _node(node: Mapping[str, Any], at: str) -> Iterator[Finding]:
    yield from _unread_keys(node, _NODE, at)
    yield from _id(node, at)
    yield from _depends_on(node, at)
    yield from _inputs(node, at) if node.get("kind") != "node" else ()
    gpu = node.get("gpu")
    if gpu is not None and not isinstance(gpu, bool):
        yield findings.warning(
            at, f"'gpu' is {gpu!r:.80}, read as {bool(gpu)}", "write true or false"
        )
    if node.get("model") is not None and not gpu:
        yield findings.error(
            at,
            f"model {node['model']!r:.120} is not loaded, since the node runs on cpu",
            "add gpu: true",
        )
    queue = node.get("queue")
    if queue is not None and queue != ("gpu" if gpu else "cpu"):
        what, remedy = f"unknown queue {queue!r}", "a node runs on cpu, or with gpu: true on gpu"
        if queue in ("cpu", "gpu"):
            what = f"'queue': {queue!r} is not read"
            remedy = "gpu: true puts a node on gpu; without it the node runs on cpu"
        yield findings.error(at, what, remedy)


def _unread_keys(entry: Mapping[str, Any], known: set[str], at: str) -> Iterator[Finding]:
    """Report keys that are close to a known one, and a policy; others may belong to the app."""
    # Steps and pipelines have no policy; the author meant the pipeline's nodes.
    is_group, in_node = "widget" not in known, " in a node, or in 'defaults'"
    for key in entry:
        if key in known:
            continue
        if key in policy.KEYS:
            if is_group:
                yield findings.warning(
                    at, f"nothing reads the key {key!r} here", f"write it{in_node}"
                )
            continue
        meant, where = policy.right_name(key, known), ""
        if meant is None and is_group:
            meant, where = policy.right_name(key, policy.KEYS), in_node
        if meant is not None:
            less = " (one less: the first attempt is none)" if key in _ATTEMPTS else ""
            yield findings.warning(
                at, f"nothing reads the key {key!r}", f"write {meant!r}{where}{less}"
            )


def _unread_inputs(
    step: Mapping[str, Any], schema: Mapping[str, Any], at: str
) -> Iterator[Finding]:
    read = {
        given["from"].strip().removeprefix("pipeline.")
        for node in schema["nodes"]
        for given in node.get("inputs") or ()
        if given.get("name") and given["from"].strip().startswith("pipeline.")
    }
    read = {key for key in read if not key.startswith(("_implicit(", "_siblings("))}
    given: Mapping[str, Any] = step.get("inputs") or {}
    for key in given:
        if key not in read:
            yield findings.warning(
                at,
                f"no node of pipeline {step['pipeline']!r} reads the input {key!r}",
                f"it reads {findings.listed(sorted(read))}",
            )
