"""Call the app's provider for definitions and its builders for questions, outside transactions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from queue_workflows import config, errors
from queue_workflows.dag import definition
from queue_workflows.types import Row

NOT_FOUND = (LookupError, FileNotFoundError)
"""Errors by which a provider says that it does not know a workflow, so that the run fails."""


class NoProvider(errors.InvalidConfig):
    """This process has no workflow provider, so it cannot start or continue the run."""


class HookFailed(errors.QueueWorkflowsError, RuntimeError):
    """A hook of the app raised; the text has the hook's name, the error's type and message."""


def describe_error(error: BaseException) -> str:
    """Return an error's type and text, or only its type if the text is empty or unavailable."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  app code: an exception's __str__
        return f"{name} (its text cannot be read)"
    return f"{name}: {text}" if text else name


def app_resolves() -> bool:
    """Return whether an app's own function resolves refs."""
    return config.get_config().resolve_ref is not None


def has_provider() -> bool:
    """Return whether this process can expand the definition of a run that has none."""
    cfg = config.get_config()
    return cfg.workflow_loader is not None and cfg.pipeline_schema_loader is not None


def load(run: Row) -> tuple[Any, Callable[[str], Any]]:
    """Return the provider's present workflow, and a function that returns a pipeline.

    Raises `NoProvider`. Both raise `HookFailed` if the provider raises, and `UnknownWorkflow` and
    `InvalidWorkflow` for a workflow that can never run.
    """
    cfg = config.get_config()
    workflows, pipelines = cfg.workflow_loader, cfg.pipeline_schema_loader
    if workflows is None or pipelines is None:
        raise NoProvider(
            f"run {run['id']} waits: this process has no workflow provider; start it with --app, "
            "or call set_workflow_provider()"
        )
    document = provided("workflow", workflows, run["workflow_name"])
    return document, functools.partial(provided, "pipeline", pipelines)


def expand(run: Row) -> dict[str, Any]:
    """Return the definition of a run's workflow as the provider returns it now; raise as `load`."""
    return definition.expand(*load(run))


def provided(kind: str, provider: Callable[[str], Any], name: str) -> Any:
    """Return the workflow or pipeline of this name.

    Raises `UnknownWorkflow`, `InvalidWorkflow` if the provider does, and `HookFailed` for any other
    error.
    """
    try:
        return provider(name)
    except (errors.InvalidWorkflow, errors.UnknownWorkflow):
        raise
    except NOT_FOUND as error:
        raise errors.UnknownWorkflow(
            f"the provider knows no {kind} {name!r} ({describe_error(error)})"
        ) from error
    except (Exception, SystemExit) as error:
        raise HookFailed(f"loading {kind} {name!r}: {describe_error(error)}") from error


def widget_spec(step: dict[str, Any], run: Row) -> dict[str, Any] | None:
    """Return the spec that the app's builder makes of an input step, or None without a builder."""
    widget = str(step.get("widget"))
    build = config.get_config().input_widgets.get(widget)
    if build is None:
        return None
    try:
        return dict(build(step, run))
    except (Exception, SystemExit) as error:
        raise HookFailed(f"building widget {widget!r}: {describe_error(error)}") from error
