"""The boundary around host code that the dispatcher calls: never inside an engine transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from queue_workflows import config, errors
from queue_workflows.dag import definition
from queue_workflows.types import Row

NOT_FOUND = (LookupError, FileNotFoundError)
"""What a provider raises for a workflow it does not know: the run fails at once (the contract)."""


class NoProvider(errors.InvalidConfig):
    """This process was given no workflow provider, so it cannot start or continue the run."""


class HookFailed(errors.QueueWorkflowsError, RuntimeError):
    """A hook of the host raised; the text names the hook, the type and what it said."""


def told(error: BaseException) -> str:
    """An error's type and text; its type alone when the text is empty or cannot be had."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  host code: an exception's __str__
        return f"{name} (its text cannot be read)"
    return f"{name}: {text}" if text else name


def host_resolves() -> bool:
    """Whether refs are resolved by the host's own function."""
    return config.get_config().resolve_ref is not None


def has_provider() -> bool:
    """Whether this process can make the definition of a run that has none."""
    cfg = config.get_config()
    return cfg.workflow_loader is not None and cfg.pipeline_schema_loader is not None


def expand(run: Row) -> dict[str, Any]:
    """The definition of a run's workflow as the provider has it now.

    Raises `NoProvider`, `HookFailed` for what the provider raised, and for what can never work
    `UnknownWorkflow` and `InvalidWorkflow`.
    """
    cfg = config.get_config()
    workflows, pipelines = cfg.workflow_loader, cfg.pipeline_schema_loader
    if workflows is None or pipelines is None:
        raise NoProvider(
            f"run {run['id']} waits: this process has no workflow provider; start it with --app, "
            "or call set_workflow_provider()"
        )
    document = _load("workflow", workflows, run["workflow_name"])
    return definition.expand(document, lambda name: _load("pipeline", pipelines, name))


def _load(kind: str, load: Callable[[str], Any], name: str) -> Any:
    try:
        return load(name)
    except errors.InvalidWorkflow:
        raise
    except NOT_FOUND as error:
        raise errors.UnknownWorkflow(
            f"the provider knows no {kind} {name!r} ({told(error)})"
        ) from error
    except (Exception, SystemExit) as error:
        raise HookFailed(f"loading {kind} {name!r}: {told(error)}") from error


def widget_spec(step: dict[str, Any], run: Row) -> dict[str, Any] | None:
    """What the host's builder makes of an input step; None when its widget has none."""
    widget = str(step.get("widget"))
    build = config.get_config().input_widgets.get(widget)
    if build is None:
        return None
    try:
        return dict(build(step, run))
    except (Exception, SystemExit) as error:
        raise HookFailed(f"building widget {widget!r}: {told(error)}") from error
