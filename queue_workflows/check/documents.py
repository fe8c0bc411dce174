"""Check a workflow's documents: misspelt keys, and inputs that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from queue_workflows import config, errors, refs
from queue_workflows.check import findings
from queue_workflows.check.findings import Finding
from queue_workflows.dag import answers, key_names, policy, widgets

_STEP = {"id", "kind", "depends_on", "skip_if", "inputs", "pipeline"}
_BRANCH = _STEP | {"on", "arms", "other"}
_LOOP = _STEP | {"start", "until", "at_most", "result", "must"}
_RUN = _STEP - {"pipeline"} | {"workflow", "wait"}
_MAP = {*_STEP, "over", "key", "as", "at_once", "may_fail", "steps", "result"}
_NODE = {"id", "node", "depends_on", "gpu", "model", "inputs", "skip_if"} | set(policy.KEYS)
_PIPELINE = {"name", "nodes", "defaults"}
_INPUT = {
    "id", "kind", "widget", "prompt", "target", "depends_on", "skip_if", "timeout_s", "default",
    "source", "multiple", "accept", "library", "options", "turnout_options",
}  # fmt: skip
_WIDGETS = ("choose_one", "file_upload", "pick_or_upload", "turnout")
"""The built-in widgets; an app may register more."""
_ANSWERED = {"choose_one": ("source",), "turnout": ("turnout_options", "options")}
"""The keys of which a widget needs one, or it has nothing to choose from."""
_ATTEMPTS = {"attempts", "max_attempts", "max_tries", "maximum_attempts", "tries"}
"""Keys of other systems that count the first attempt, unlike `retries`."""
_OFFERS = ("source", "turnout_options", "options", "library", "accept")
"""The keys that list the allowed answers."""


def steps(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the steps of a workflow, and those inside its maps."""
    for step in cast("list[Mapping[str, Any]]", document["steps"]):
        yield step
        if step.get("kind") == "map" and "steps" in step:
            yield from steps(step)


def check(
    document: Mapping[str, Any], pipelines: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    """Yield what expanding ignores; the documents must be accepted by it."""
    seen: set[str] = set()
    for step in steps(document):
        at = f"step {step['id']!r}"
        if step["kind"] == "input":
            needed = _ANSWERED.get(step["widget"])
            if needed is not None and not any(step.get(key) for key in needed):
                yield findings.warning(
                    at, f"widget {step['widget']!r} offers nothing", f"give it {needed[0]!r}"
                )
            yield from _widget(step, at)
            yield from _default(step, at)
            continue
        if step["kind"] == "run":
            yield from _unread_keys(step, _RUN, at)
            yield from _unread_policy(step, at)
            continue
        if step["kind"] == "node":
            yield from _node(step, at)
            continue
        known = {"branch": _BRANCH, "loop": _LOOP, "map": _MAP}.get(step["kind"], _STEP)
        yield from _unread_keys(step, known, at)
        yield from _unread_policy(step, at)
        if "pipeline" not in step:
            continue
        schema = pipelines[step["pipeline"]]
        yield from _unread_inputs(step, schema, at)
        if step["pipeline"] not in seen:
            seen.add(step["pipeline"])
            yield from _unread_keys(schema, _PIPELINE, f"pipeline {step['pipeline']!r}")
            yield from _unread_policy(schema, f"pipeline {step['pipeline']!r}")
            for node in schema["nodes"]:
                yield from _node(node, f"pipeline {step['pipeline']!r}: node {node['id']!r}")


def _widget(step: Mapping[str, Any], at: str) -> Iterator[Finding]:
    """Report unknown widgets, and misspelt keys of a built-in one."""
    widget = step["widget"]
    if widget in _WIDGETS:
        yield from _unread_keys(step, _INPUT, at)
        return
    own = config.get_config().input_widgets
    if widget in own:
        return
    meant = key_names.closest(widget, (*_WIDGETS, *own))
    yield findings.warning(
        at,
        f"unknown widget {widget!r}",
        f"did you mean {meant!r}?" if meant else "register_input_widget() defines its input_spec",
    )


def _default(step: Mapping[str, Any], at: str) -> Iterator[Finding]:
    """Report a timeout's answer that no person may give.

    Values that depend on a run are skipped.
    """
    asked = policy.read_input(step, at) or {}
    own = step["widget"] in config.get_config().input_widgets
    if "default" not in asked or own or refs.heads([step.get(key) for key in _OFFERS]):
        return
    spec = widgets.build_spec(step, context={}, out_dir=None)
    try:
        answers.check(spec, asked["default"], "'default'")
    except errors.InputRefused as refused:
        yield findings.error(at, str(refused), "give it an answer that a person could give")


def _node(node: Mapping[str, Any], at: str) -> Iterator[Finding]:
    yield from _unread_keys(node, _NODE, at)
    queue = node.get("queue")
    if queue is None or queue == ("gpu" if node.get("gpu") else "cpu"):
        return
    if queue in ("cpu", "gpu"):
        yield findings.error(
            at, f"'queue': {queue!r} is not read", "gpu: true puts a node on gpu; cpu is the other"
        )
    else:
        yield findings.error(
            at, f"unknown queue {queue!r}", "a node runs on cpu, or with gpu: true on gpu"
        )


def _unread_policy(entry: Mapping[str, Any], at: str) -> Iterator[Finding]:
    """Report a policy of a step or a pipeline, which was meant for the pipeline's nodes."""
    for key in entry:
        if key in policy.KEYS:
            yield findings.warning(
                at, f"nothing reads the key {key!r} here", "write it in a node, or in 'defaults'"
            )


def _unread_keys(entry: Mapping[str, Any], known: set[str], at: str) -> Iterator[Finding]:
    """Report keys that are close to a known one; others may belong to the app."""
    for key in entry:
        if key in known or key in policy.KEYS:
            continue
        meant = key_names.right_name(key, known)
        where = ""
        if meant is None and "widget" not in known:
            # Steps and pipelines have no policy; the author meant the pipeline's nodes.
            meant = key_names.right_name(key, policy.KEYS)
            where = " in a node, or in 'defaults'"
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
        if given["from"].strip().startswith("pipeline.")
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
