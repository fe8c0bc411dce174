"""Check a workflow before it runs: its graph against the code, models and names it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from queue_workflows import config, errors
from queue_workflows.check import documents, findings, nodes, references
from queue_workflows.check.findings import Finding
from queue_workflows.dag import definition as definitions
from queue_workflows.dag import graph, hooks

__all__ = ["Finding", "Report", "definition", "document", "workflow"]


class Report(NamedTuple):
    """What was found; `definition` is the expanded graph, None if there is none.

    `needs`: the names of the inputs that a run must have.
    """

    name: str
    definition: dict[str, Any] | None
    findings: tuple[Finding, ...]
    needs: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether nothing but warnings was found."""
        return all(finding.level != "error" for finding in self.findings)


def workflow(name: str) -> Report:
    """Check a workflow that this process's provider knows, or that was declared in Python.

    Raises `UnknownWorkflow`, and `InvalidConfig` where there is no provider.
    """
    load = config.get_config().workflow_loader
    if load is None:
        raise errors.InvalidConfig(
            f"workflow {name!r}: no workflow is declared and no provider is set: check with --app"
        )
    try:
        found = hooks.provided("workflow", load, name)
    except errors.InvalidWorkflow as error:
        return _refused(name, error)
    except hooks.HookFailed as error:
        return Report(name, None, (findings.error(f"workflow {name!r}", str(error), "fix it"),))
    return document(found, name=name)


def document(
    found: Any, *, name: str | None = None, pipelines: Mapping[str, Any] | None = None
) -> Report:
    """Check a workflow's document, its pipelines from `pipelines`, else from the provider."""
    shown = name or _name_of(found)
    used: dict[str, Mapping[str, Any]] = {}

    def load(pipeline: str) -> Mapping[str, Any]:
        used[pipeline] = _pipeline(found, pipeline, pipelines or {})
        return used[pipeline]

    try:
        expanded = definitions.expand(found, load)
    except errors.InvalidWorkflow as error:
        return _refused(shown, error)
    report = definition(expanded)
    return report._replace(findings=(*documents.check(found, used), *report.findings))


def definition(expanded: Any) -> Report:
    """Check an expanded graph, as a run's `definition` holds it."""
    name = _name_of(expanded)
    try:
        made = graph.read(expanded, "this is not an expanded definition that can run")
    except errors.InvalidWorkflow as error:
        return _refused(name, error)
    functions = nodes.NodeFunctions()
    # The rounds of a loop are alike; the second one is the first with a state of a round.
    all_nodes = [
        node._replace(id=name) for name, node in graph.walk(made, "[...]") if (node.round or 1) <= 2
    ]
    models = nodes.known_models() if any(node.model for node in all_nodes) else frozenset[str]()
    found: list[Finding] = []
    for node in all_nodes:
        found += nodes.places(node, models)
        found += functions.check(node) if node.round != 2 else ()
    found += nodes.child_runs(name, all_nodes)
    seen = references.References(made, functions.outputs)
    if config.get_config().resolve_ref is None:
        for node in (each for each in made.nodes.values() if (each.round or 1) <= 2):
            found += seen.check(node)
    return Report(name, expanded, tuple(found), tuple(seen.needs))


def _pipeline(found: Any, name: str, own: Mapping[str, Any]) -> Any:
    if name in own:
        return own[name]
    load: Callable[[str], Any] | None = config.get_config().pipeline_schema_loader
    reason: object = f"pipeline {name!r}: no provider is set that could have it"
    if load is not None:
        try:
            return hooks.provided("pipeline", load, name)
        except (errors.UnknownWorkflow, hooks.HookFailed) as error:
            reason = error
    asking = next(step.get("id") for step in documents.steps(found) if step.get("pipeline") == name)
    raise errors.InvalidWorkflow(f"step {asking!r}: {reason}")


def _name_of(found: Any) -> str:
    record = cast("Mapping[str, Any]", found if isinstance(found, Mapping) else {})
    return str(record.get("workflow") or record.get("name") or "?")


def _refused(name: str, error: errors.InvalidWorkflow) -> Report:
    at = f"workflow {name!r}"
    text = str(error).removeprefix(f"{at}: ")
    return Report(
        name, None, (findings.error(at, text, "correct the definition: none of it can run"),)
    )
