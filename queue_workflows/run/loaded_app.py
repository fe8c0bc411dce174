"""Load the app, describe its registrations as JSON, and apply its settings in the worker."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, NoReturn, cast

from queue_workflows import config, errors, model_registry
from queue_workflows.model_cache import RequiresModels
from queue_workflows.tasks import handlers

SETTINGS: Final = (
    "db_url_env", "db_url_env_named", "host_label_env", "host_priority_env", "container_prefix",
    "node_module_package", "ingest_queues_named", "ingest_default_budget_s", "embedded", "app",
    "ingest_task_policies", "ingest_task_queues", "node_versions", "ingest_queues",
    "video_model_ids",
)  # fmt: skip
"""The attributes of `EngineConfig` that a worker needs. They are sent as JSON, sets as arrays."""


class App(NamedTuple):
    """The functions by which a forked process gets the app, its models and stop policies."""

    load: Callable[[], object]
    """Imports the app."""
    model_cache: Callable[[], RequiresModels | None] = lambda: None
    """Returns the model cache, or None if no node needs one."""
    stop_policies: Callable[[], Mapping[str, Callable[..., object]]] = dict
    """Returns the stop policies of the app by name."""


class Registered(NamedTuple):
    """The nodes, tasks, models, hooks and settings of an app."""

    nodes: list[str] | None
    """The names of all nodes; None if a package or a resolver may have more."""
    knows_nodes: bool
    """Whether the app has any nodes, by name, by a resolver or in a package."""
    tasks: list[str]
    async_tasks: list[str]
    isolated_tasks: list[str]
    """Tasks whose jobs each get a new executor."""
    isolated_nodes: list[str]
    models: dict[str, float]
    """The GPU memory in GB that each model needs; 0 if unknown."""
    announces: bool
    """Whether the app has a hook for completed nodes (`set_on_node_completed`)."""
    resolves_refs: bool
    """Whether the app resolves refs itself, so that a node needs the whole context of its run."""
    settings: dict[str, Any]
    stop_policies: list[str]
    """The names of the app's own stop policies."""
    environment: dict[str, str | None]
    """The environment variables that loading the app has set, or has removed (None)."""


def load(app: App) -> dict[str, Any]:
    """Load the app in this process; return its registrations as JSON, or its error."""
    before, own = dict(os.environ), os.getpid()
    try:
        app.load()
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        return {"error": _described(error)}
    finally:
        if os.getpid() != own:
            os._exit(0)  # a child that the app forked has returned
    cfg, now = config.get_config(), dict(os.environ)
    tasks = cfg.ingest_task_map
    found = Registered(
        nodes=config.node_names(),
        knows_nodes=cfg.knows_nodes(),
        tasks=sorted(tasks),
        async_tasks=sorted(name for name, task in tasks.items() if handlers.is_async(task)),
        isolated_tasks=sorted(cfg.isolated_tasks),
        isolated_nodes=sorted(cfg.isolated_nodes),
        models={each: model_registry.get(each).est_vram_gb for each in model_registry.known_ids()},
        announces=cfg.on_node_completed is not None,
        resolves_refs=cfg.resolve_ref is not None,
        settings={name: _plain(getattr(cfg, name)) for name in SETTINGS},
        stop_policies=sorted(app.stop_policies()),
        environment={
            name: now.get(name) for name in {*before, *now} if before.get(name) != now.get(name)
        },
    )
    return {"error": None, "registered": found._asdict()}


def _plain(value: Any) -> Any:
    return sorted(cast("frozenset[str]", value)) if isinstance(value, frozenset) else value


def apply(registered: Registered) -> None:
    """Apply the app's settings and environment variables to this process."""
    cfg = config.get_config()
    for name, value in registered.settings.items():
        is_set = isinstance(getattr(cfg, name), frozenset)
        setattr(cfg, name, frozenset(value) if is_set else value)
    cfg.listed_nodes = registered.nodes
    if registered.resolves_refs and cfg.resolve_ref is None:
        cfg.resolve_ref = _not_here
    for name, size_gb in registered.models.items():
        if name not in model_registry.known_ids():
            model_registry.register(model_registry.ModelSpec(name, _not_here, est_vram_gb=size_gb))
    for name, value in registered.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _not_here(*_: object, **__: object) -> NoReturn:
    """Take the place of an app's function that is not called in this process."""
    raise RuntimeError("this function of the app is not loaded in this process")


class LoadFailed(Exception):
    """The traceback of an app that failed to load, as the cause of the worker's error."""

    def __init__(self, frames: str) -> None:
        super().__init__(frames)
        self.frames = frames


def _described(error: BaseException) -> dict[str, str]:
    """Return an error of loading the app as JSON."""
    cause = error.__cause__ or error
    frames = "".join(traceback.format_tb(cause.__traceback__))
    ours = isinstance(error, errors.QueueWorkflowsError)
    kind = type(error).__name__ if ours else "AppFailed"
    text = str(error) if ours else f"loading the app failed: {type(error).__name__}: {error}"
    return {"kind": kind, "text": text, "frames": frames}


def taken(loaded: Mapping[str, Any]) -> Registered:
    """Return the registrations that `load` has returned, or raise its error."""
    described = loaded["error"]
    if described is None:
        return Registered(**loaded["registered"])
    kind: Any = getattr(errors, described["kind"], errors.AppFailed)
    error: errors.QueueWorkflowsError = kind(described["text"])
    raise error from LoadFailed(described["frames"])
