"""Hold the names, hooks and knobs of the process's configuration; import only `errors`.

Its length: it has the table of all knobs, and a function for each hook that an app may set.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from queue_workflows import errors

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from queue_workflows.types import (
        FailureHook,
        JsonDict,
        NodeHook,
        PipelineLoader,
        RefResolver,
        Row,
        WidgetSpec,
        WorkflowDocuments,
        WorkflowLoader,
    )

    InvokeContext = Callable[[Row, Row], AbstractContextManager[Callable[[JsonDict], JsonDict]]]

T = TypeVar("T", int, float, str, bool)

DAG_QUEUES = frozenset({"cpu", "gpu"})
GPU_POLICIES = ("strict", "balanced")
THROTTLES = frozenset({"ram", "swap", "gpu"})
DEFAULT_INGEST_QUEUES = frozenset({"fetch", "load"})
_QUEUE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,62}")
EMBEDDED_DB_ENV = "QUEUE_WORKFLOWS_EMBEDDED_DB"
"""Names a database of the embedded server, like `--db`, but also for child processes."""
MAX_APP_NAME = 200
MAX_VERSION = 1_000_000_000
MAX_LISTED_NODES = 500
"""The most nodes of an app that its workers list in their reports."""
MODULE_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_warned: set[tuple[str, str]] = set()


class Knob(Generic[T]):
    """One environment knob.

    `read()` returns the value of `QUEUE_WORKFLOWS_<name>`, else of `<prefix><name>`, else the
    default. Code calls it on each use. For a value that cannot be parsed it returns the default,
    and logs one warning. A value below `least` counts as `least`.
    """

    __slots__ = ("default", "least", "meaning", "name", "unit", "variables")

    def __init__(
        self, name: str, default: T, unit: str, meaning: str, *, prefix: str = "AI_LEADS_",
        least: T | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.least = least
        self.default = default
        self.unit = unit
        self.meaning = meaning
        self.variables = (f"QUEUE_WORKFLOWS_{name}", f"{prefix}{name}")
        """The environment variables in the order in which they are tried."""
        KNOBS[name] = cast("Knob[Any]", self)

    def read(self) -> T:
        """Return the present value."""
        for variable in self.variables:
            raw = os.environ.get(variable)
            if raw is None:
                continue
            try:
                found = _parse(raw, type(self.default))
            except ValueError:
                warn_once(
                    variable, raw, f"not a {type(self.default).__name__}; using {self.default!r}"
                )
                return self.default
            return found if self.least is None else max(found, self.least)
        return self.default


def _parse(raw: str, kind: type[T]) -> T:
    if kind is bool:
        return cast("T", raw != "")
    if kind is float:
        value = float(raw)
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(raw)
        return cast("T", value)
    return kind(raw)


def warn_once(variable: str, raw: str, reason: str) -> None:
    """Log a warning about the value of a variable, unless it was logged before."""
    if (variable, raw) in _warned:
        return
    _warned.add((variable, raw))
    import logging

    logging.getLogger("queue_workflows").warning("%s=%r: %s", variable, raw, reason)


KNOBS: dict[str, Knob[Any]] = {}
LEAST_POLL_S = 0.01
"""So that a setting of 0 keeps no loop busy; loops of threads have the same bound."""

# fmt: off
DB_POOL_MAX = Knob("DB_POOL_MAX", 10, "connections",
    "size of the pool that `db.connection()` draws from")
POLL_ONLY = Knob("POLL_ONLY", False, "flag",
    "set and non-empty: every process only polls, and leaves nothing in a session of the server, "
    "so that a pooler in transaction mode may be in between")
CLAIM_POLL_S = Knob("CLAIM_POLL_S", 1.0, "s",
    "how often an idle worker or orchestrator polls, in case a notification was lost",
    least=LEAST_POLL_S)
DL_HEARTBEAT_SEC = Knob("DL_HEARTBEAT_SEC", 10.0, "s",
    "how often a worker writes its heartbeat and renews its claims (thrice a lease at "
    "least)", prefix="", least=LEAST_POLL_S)
LEASE_RECLAIM_INTERVAL_S = Knob("LEASE_RECLAIM_INTERVAL_S", 5.0, "s",
    "how often lapsed leases are swept")
STALE_WORKER_AFTER_S = Knob("STALE_WORKER_AFTER_S", 30.0, "s",
    "age of the last heartbeat, or of the last renewal of a worker whose session is gone, at which "
    "it counts as dead")
CANCEL_GRACE_S = Knob("CANCEL_GRACE_S", 30.0, "s",
    "how long a cancelled handler may continue before its worker is stopped")
DEAD_WORKER_SWEEP_INTERVAL_S = Knob("DEAD_WORKER_SWEEP_INTERVAL_S", 5.0, "s",
    "how often dead workers are searched for")
WATCHDOG_MAX_RETRIES = Knob("WATCHDOG_MAX_RETRIES", 3, "failures",
    "watchdog failures before a job fails")
CRASH_BACKOFF_S = Knob("CRASH_BACKOFF_S", 30.0, "s",
    "wait before a job runs again after its second and each later crash, times its crashes")
STALL_CONFIRM_SAMPLES = Knob("STALL_CONFIRM_SAMPLES", 3, "samples",
    "idle samples that confirm a stall")
STALL_CONFIRM_POLL_S = Knob("STALL_CONFIRM_POLL_S", 1.0, "s", "time between those samples")
GPU_HEALTH_INTERVAL_S = Knob("GPU_HEALTH_INTERVAL_S", 300.0, "s", "window of the GPU health guard")
GPU_HEALTH_LOAD_GRACE_S = Knob("GPU_HEALTH_LOAD_GRACE_S", 1200.0, "s",
    "first window, which covers a cold load")
GPU_IDLE_PCT = Knob("GPU_IDLE_PCT", 5.0, "%", "GPU use at or under which it counts as idle")
GPU_HEALTH_RAM_DELTA_MB = Knob("GPU_HEALTH_RAM_DELTA_MB", 5120, "MB",
    "change of RAM that counts as progress")
GPU_MODEL_IDLE_TTL_S = Knob("GPU_MODEL_IDLE_TTL_S", 60.0, "s",
    "idle time after which a model is dropped; <= 0: never")
GPU_CLAIM_POLICY = Knob("GPU_CLAIM_POLICY", "strict", "name",
    "how gpu workers choose: `strict` (the best priority first) or `balanced` (docs/gpu-claims.md)")
WORKER_CONTROL_POLL_S = Knob("WORKER_CONTROL_POLL_S", 5.0, "s",
    "how often a worker reads its ON/OFF row, in case a notification was lost",
    least=LEAST_POLL_S)
RUN_RETENTION_DAYS = Knob("RUN_RETENTION_DAYS", 365.0, "days",
    "time after its end at which a run is deleted, with its nodes; <= 0: never")
JOB_RETENTION_DAYS = Knob("JOB_RETENTION_DAYS", 90.0, "days",
    "the same for ingest jobs whose queue has no `retention_days` of its own; <= 0: never")
NODE_EVENT_RETENTION_DAYS = Knob("NODE_EVENT_RETENTION_DAYS", 30, "days",
    "age at which events of jobs and those that apps sent, acts, logs, processed outbox rows and "
    "schedule fires are deleted; <= 0: never")
NODE_EVENT_PRUNE_INTERVAL_S = Knob("NODE_EVENT_PRUNE_INTERVAL_S", 3600.0, "s",
    "how often rows past their retention are deleted")
NODE_POOL_RECOVERY_RETRIES = Knob("NODE_POOL_RECOVERY_RETRIES", 5, "tries",
    "tries of the orchestrator's recovery at its start")
NODE_POOL_RECOVERY_BACKOFF_S = Knob("NODE_POOL_RECOVERY_BACKOFF_S", 2.0, "s",
    "wait between those tries")
SHUTDOWN_TIMEOUT_S = Knob("SHUTDOWN_TIMEOUT_S", 8.0, "s",
    "time a running job gets to end after SIGTERM")
WORKERS_JSON = Knob("WORKERS_JSON", "", "JSON",
    "queues of `queue-claim-worker --workers`, and of the pool that `up` starts: "
    '`[{"queue": "load", "concurrency": 2}]`', prefix="")
WORKER_MEMORY_THROTTLE = Knob("WORKER_MEMORY_THROTTLE", "ram,swap", "names",
    "memory for which workers wait when it is full: `ram`, `swap`, `gpu`, separated by commas; "
    "`off`: none (docs/worker-memory.md)")
MEMORY_THROTTLE_THRESHOLD = Knob("MEMORY_THROTTLE_THRESHOLD", 90.0, "%",
    "RAM use from which workers and the in-process queue wait; of the container if it "
    "has a limit", prefix="")
MEMORY_RESUME_THRESHOLD = Knob("MEMORY_RESUME_THRESHOLD", 80.0, "%",
    "RAM use below which they continue", prefix="")
GPU_THROTTLE_THRESHOLD = Knob("GPU_THROTTLE_THRESHOLD", 85.0, "%",
    "memory use of one GPU from which they wait", prefix="")
GPU_RESUME_THRESHOLD = Knob("GPU_RESUME_THRESHOLD", 75.0, "%",
    "GPU memory use below which they continue", prefix="")
MEMORY_CHECK_INTERVAL = Knob("MEMORY_CHECK_INTERVAL", 5.0, "s",
    "time between two readings of the memory", prefix="")
WORKER_SINGLE_JOB_MODE = Knob("WORKER_SINGLE_JOB_MODE", "true", "true/false",
    "whether a thread of the in-process queue ends after one job and is replaced", prefix="")
MASTER_GRACE_PERIOD_SECONDS = Knob("MASTER_GRACE_PERIOD_SECONDS", 15.0, "s",
    "time from the start of the in-process queue to its first fetch", prefix="")
WORKER_STAGGER_SECONDS = Knob("WORKER_STAGGER_SECONDS", 1.0, "s",
    "time between the starts of threads of the in-process queue", prefix="")
WORKER_COOLDOWN_SECONDS = Knob("WORKER_COOLDOWN_SECONDS", 10.0, "s",
    "how long a thread of the in-process queue waits after a job", prefix="")
WORKFLOW_CPU_WORKERS = Knob("WORKFLOW_CPU_WORKERS", 5, "jobs", "cpu jobs at once under `up`")
WORKFLOW_GPU_WORKERS = Knob("WORKFLOW_GPU_WORKERS", 1, "workers", "gpu workers that `up` starts")
MAX_PAYLOAD_KB = Knob("MAX_PAYLOAD_KB", 1024, "KiB",
    "largest result, inputs or answer as JSON text")
LOG_CAPTURE_KB = Knob("LOG_CAPTURE_KB", 64, "KiB",
    "stored output of a handler per attempt; <= 0: nothing")
LOG_FORMAT = Knob("LOG_FORMAT", "text", "name", "how processes log: `text` or `json`")
LOG_PATH = Knob("LOG_PATH", "", "path",
    "folder of the application log, or its file (`.log`, `.json`, `.jsonl` or `.txt`); "
    "empty: stderr alone", prefix="")
METRIC_PATH = Knob("METRIC_PATH", "", "path",
    "likewise for the metric log, a line of JSON per attempt; empty: none", prefix="")
AUDIT_LOG_PATH = Knob("AUDIT_LOG_PATH", "", "path",
    "likewise for the audit log, a line of JSON per event of a job; empty: none", prefix="")
SPANS = Knob("SPANS", "", "name",
    "spans for OpenTelemetry: `all`, or `traced` for jobs and runs with a trace; empty: none")
OUT_ROOTS = Knob("OUT_ROOTS", "", "paths",
    "folders, separated by `:`, that a run's `out_dir` must resolve into; empty: anywhere")
OUTPUTS_DIR = Knob("OUTPUTS_DIR", "", "path",
    "folder of the runs that name no `out_dir`, one folder each; empty: `runs` in the first of "
    "OUT_ROOTS, else `outputs` in the user's data folder")
ON_FAILED = Knob("ON_FAILED", "", "command",
    "command that a scheduler runs for a failure; its stdin is the alert as JSON (docs/alerts.md)")
DISABLE_HW_METRICS = Knob("DISABLE_HW_METRICS", False, "flag",
    "set and non-empty: no hardware samples")
DISABLE_WORKER_HEARTBEAT = Knob("DISABLE_WORKER_HEARTBEAT", False, "flag",
    "set and non-empty: no heartbeats")
DISABLE_GPU_IDLE_REAPER = Knob("DISABLE_GPU_IDLE_REAPER", False, "flag",
    "set and non-empty: models stay loaded")
DISABLE_WORKER_CONTROL = Knob("DISABLE_WORKER_CONTROL", False, "flag",
    "set and non-empty: ON/OFF rows are ignored")
EMBEDDED = Knob("EMBEDDED", False, "flag",
    "set and non-empty: use the embedded server when no DSN is set")
EMBEDDED_DIR = Knob("EMBEDDED_DIR", "", "path",
    "the embedded server's folder; empty: the user's data folder")
# fmt: on


class RegisteredNode:
    """A callable that an app registered by name, in the shape of a node module."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


def _register_no_models() -> None:
    """Register no model, as the default registrar."""


class EngineConfig:
    """The names and hooks that an app sets before anything starts; each has a safe default."""

    def __init__(self) -> None:
        self.db_url_env = "AI_LEADS_DB_URL"
        self.db_url_env_named = False
        self.host_label_env = "AI_LEADS_HOST_LABEL"
        self.host_priority_env = "AI_LEADS_GPU_CONSUMER_PRIORITY"
        self.container_prefix = "ai_leads-"
        self.video_model_ids: frozenset[str] = frozenset()
        self.node_module_package: str | None = None
        self.ingest_queues: frozenset[str] = DEFAULT_INGEST_QUEUES
        self.ingest_queues_named = False
        self.ingest_default_budget_s: float = 3600
        self.embedded = False
        self.embedded_db = ""
        """The embedded server's database that `--db` names; it cannot be combined with a DSN."""
        self.engine_pool_max = 4
        """Size of the pool of the engine's own calls, such as `jobs.enqueue()`; `serve` sets it
        from PG_POOL_SIZE and PG_MAX_OVERFLOW. The threads of an app seldom need more."""
        self.pool_recycle_s = 3600.0
        """Age in seconds at which a pooled connection is replaced (PG_POOL_RECYCLE of `serve`)."""
        self.app: str | None = None
        self.app_name: str | None = None
        self.node_resolver: Callable[[str], Any] | None = None
        self.builtin_model_registrar: Callable[[], None] = _register_no_models
        self.workflow_map: dict[str, WorkflowDocuments] = {}
        self._workflow_loader: WorkflowLoader | None = None
        self._pipeline_schema_loader: PipelineLoader | None = None
        self.resolve_ref: RefResolver | None = None
        self.invoke_context: InvokeContext | None = None
        self.ingest_task_map: dict[str, Callable[..., Any]] = {}
        self.ingest_task_policies: dict[str, dict[str, Any]] = {}
        self.ingest_task_queues: dict[str, str | None] = {}
        self.isolated_tasks: set[str] = set()
        """Tasks whose jobs each get a new process, in a worker with slots."""
        self.isolated_nodes: set[str] = set()
        self.node_versions: dict[str, int] = {}
        """The code versions of nodes that have one."""
        self.ingest_schedule: list[Any] = []
        self.node_map: dict[str, Any] = {}
        self.listed_nodes: list[str] | None = None
        """The result of `node_names` in the process that has loaded the app, if not this one."""
        self.input_widgets: dict[str, WidgetSpec] = {}
        self.on_node_completed: NodeHook | None = None
        self.on_failed: FailureHook | None = None
        self.redactor: Callable[[Any], Any] | None = None
        self.redact_keys: tuple[str, ...] = ()
        """Names of members that the dashboard hides in values (APP_REDACT_KEYS of `serve`)."""

    @property
    def workflow_loader(self) -> WorkflowLoader | None:
        """Return a loader of workflows declared in Python, then the app's; None without either."""
        return self._load_workflow if self.workflow_map else self._workflow_loader

    @workflow_loader.setter
    def workflow_loader(self, load: WorkflowLoader | None) -> None:
        self._workflow_loader = load

    @property
    def pipeline_schema_loader(self) -> PipelineLoader | None:
        """Do as `workflow_loader` does, for pipelines."""
        return self._load_pipeline if self.workflow_map else self._pipeline_schema_loader

    @pipeline_schema_loader.setter
    def pipeline_schema_loader(self, load: PipelineLoader | None) -> None:
        self._pipeline_schema_loader = load

    def _load_workflow(self, name: str) -> Mapping[str, Any]:
        if name in self.workflow_map:
            return self.workflow_map[name].document()
        if self._workflow_loader is not None:
            return self._workflow_loader(name)
        known = ", ".join(sorted(self.workflow_map))
        raise errors.UnknownWorkflow(
            f"no workflow {name!r} is declared; declared are {known}"
            f"{errors.hint(name, self.workflow_map)}"
        )

    def _load_pipeline(self, name: str) -> Mapping[str, Any]:
        # A declared workflow's pipelines are named `<workflow>.<step>`, and ids hold no dot.
        owner = self.workflow_map.get(name.rpartition(".")[0])
        if owner is not None and name in owner.pipelines():
            return owner.pipelines()[name]
        if self._pipeline_schema_loader is not None:
            return self._pipeline_schema_loader(name)
        raise errors.UnknownWorkflow(
            f"no pipeline {name!r} is declared, and no provider is set: set_workflow_provider() "
            "sets one"
        )

    def get_resolve_ref(self) -> RefResolver:
        """Return the app's ref resolver, else `refs.resolve_ref`."""
        if self.resolve_ref is not None:
            return self.resolve_ref
        from queue_workflows import refs

        return refs.resolve_ref

    def has_model_registrar(self) -> bool:
        """Return whether the app set a registrar of models."""
        return self.builtin_model_registrar is not _register_no_models

    def knows_nodes(self) -> bool:
        """Return whether any node module can be resolved."""
        return bool(self.node_map or self.node_resolver or self.node_module_package)

    def node_hint(self, name: str) -> str:
        """Return a hint for a node that is not found or has no `run()`, or an empty text."""
        known: list[Any] = [*self.workflow_map.values(), *self.node_map.values()]
        # A node module of the app may have a `place` of its own.
        own = "queue_workflows.declare."
        places = [each.place[0] for each in known if type(each).__module__.startswith(own)]
        places += [(self.app or "").partition(":")[0], self.node_module_package or ""]
        function = name.rpartition(".")[2]
        for place in dict.fromkeys(places):
            if isinstance(getattr(sys.modules.get(place), function, None), types.FunctionType):
                return f"; {place}.{function}() is not declared by @node"
        return errors.hint(name, self.node_map)

    def resolve_node_module(self, node_module: str) -> Any:
        """Return the object whose `run` is called for a row's `node_module`.

        It tries registered names, then the resolver, then `<package>.<node_module>`; a bare string
        is never imported. Raises `NodeNotFound`; errors of the imported module pass through.
        """
        if node_module in self.node_map:
            return self.node_map[node_module]
        if self.node_resolver is not None:
            try:
                return self.node_resolver(node_module)
            except (LookupError, FileNotFoundError, ModuleNotFoundError, AttributeError) as error:
                if isinstance(error, errors.NodeNotFound) or not _is_unknown(error, node_module):
                    raise
                raise errors.NodeNotFound(
                    f"the resolver does not know node module {node_module!r}: "
                    f"{type(error).__name__}: {error}{self.node_hint(node_module)}"
                ) from error
        if self.node_module_package is None:
            hint = self.node_hint(node_module) or (
                ", and no package or resolver is set: call register_node() or "
                "set_node_module_package(), or start with --app"
            )
            raise errors.NodeNotFound(f"node module {node_module!r} is not registered{hint}")
        if not MODULE_NAME.fullmatch(node_module):
            raise errors.NodeNotFound(f"{node_module!r} is not the name of a module")
        import importlib

        full = f"{self.node_module_package}.{node_module}"
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError as error:
            if error.name is not None and (full == error.name or full.startswith(error.name + ".")):
                raise errors.NodeNotFound(
                    f"no module {full!r} for node module {node_module!r}"
                    f"{self.node_hint(node_module)}"
                ) from error
            raise


def _is_unknown(error: Exception, name: str) -> bool:
    """Return whether a resolver's error means an unknown name, rather than a bug of the module."""
    if isinstance(error, AttributeError):  # `getattr(nodes, name)`
        return error.name == name
    at = error.__traceback__
    # The frame of a module that is being imported has this name.
    while at is not None and at.tb_frame.f_code.co_name != "<module>":
        at = at.tb_next
    return at is None


_config = EngineConfig()


def get_config() -> EngineConfig:
    """Return the process-wide configuration."""
    return _config


def reset_for_tests() -> None:
    """Restore every default and forget every hook."""
    _config.__init__()
    _warned.clear()


def configure(
    *,
    db_url_env: str | None = None,
    video_model_ids: Iterable[str] | None = None,
    node_module_package: str | None = None,
    host_label_env: str | None = None,
    host_priority_env: str | None = None,
    container_prefix: str | None = None,
    ingest_queues: Iterable[str] | None = None,
    ingest_default_budget_s: float | None = None,
    embedded: bool | None = None,
    app_name: str | None = None,
) -> EngineConfig:
    """Change the given names; None leaves a name unchanged.

    It may be called again. `app_name` is the owner of the schedules in the app's code. Its length:
    each name is an argument.

    Raises `InvalidConfig` (a ValueError) before any change for ingest queues with an invalid name,
    `cpu` or `gpu`, and for a budget that is not positive.
    """
    if ingest_default_budget_s is not None and not ingest_default_budget_s > 0:
        raise errors.InvalidConfig("ingest_default_budget_s must be a positive number of seconds")
    if app_name is not None and (not 0 < len(app_name.strip()) <= MAX_APP_NAME or "\0" in app_name):
        raise errors.InvalidConfig(f"app_name must have 1 to {MAX_APP_NAME} characters")
    given = {
        "db_url_env": db_url_env,
        "video_model_ids": None if video_model_ids is None else frozenset(video_model_ids),
        "node_module_package": node_module_package,
        "host_label_env": host_label_env,
        "host_priority_env": host_priority_env,
        "container_prefix": container_prefix,
        "ingest_queues": None if ingest_queues is None else _checked_queues(ingest_queues),
        "ingest_default_budget_s": ingest_default_budget_s,
        "embedded": embedded,
        "app_name": app_name,
    }
    for name, value in given.items():
        if value is not None:
            setattr(_config, name, value)
    _config.db_url_env_named |= db_url_env is not None
    _config.ingest_queues_named |= ingest_queues is not None
    return _config


def _checked_queues(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise errors.InvalidConfig("ingest_queues takes a collection of names, not one string")
    queues = frozenset(names)
    reserved = sorted(queues & DAG_QUEUES)
    if reserved:
        raise errors.InvalidConfig(
            f"ingest_queues reuses {reserved}: cpu and gpu belong to workflow nodes"
        )
    for name in queues:
        if (fault := queue_name_fault(name)) is not None:
            raise errors.InvalidConfig(fault)
    return queues


def queue_name_fault(name: Any) -> str | None:
    """Return why this cannot be the name of a queue, or None if it can."""
    if isinstance(name, str) and _QUEUE_NAME.fullmatch(name):
        return None
    return (
        f"{name!r:.80} is not a queue name, which has 1 to 63 letters, digits, '_', '-' and '.', "
        "and begins with neither '-' nor '.'"
    )


def set_node_module_package(package: str) -> None:
    """Resolve `node_module` as `<package>.<node_module>`."""
    _config.node_module_package = package


def set_node_resolver(resolver: Callable[[str], Any]) -> None:
    """Set the function that resolves `node_module` to an object with `run`."""
    _config.node_resolver = resolver


def register_node(
    name: str,
    module_or_callable: Any,
    *,
    isolation: str | None = None,
    version: int | None = None,
) -> None:
    """Register a module (with `run`) or a callable under the name that `node_module` uses.

    With `isolation="process"`, each of its jobs gets a new process, in a worker with slots.
    `version` is the version of its code, as other workers leave its jobs alone (docs/versions.md).
    """
    check_version(f"node {name!r}", version)
    _isolate(_config.isolated_nodes, f"node {name!r}", name, isolation)
    if hasattr(module_or_callable, "run"):
        _config.node_map[name] = module_or_callable
    elif callable(module_or_callable):
        _config.node_map[name] = RegisteredNode(module_or_callable)
    else:
        raise errors.InvalidConfig(f"node {name!r}: neither callable nor an object with run()")
    _set_version(name, version)


def set_node_versions(versions: Mapping[str, int]) -> None:
    """Set the code versions of nodes from a package or a resolver, by name."""
    for name, version in versions.items():
        check_version(f"node {name!r}", version)
    for name, version in versions.items():
        _set_version(name, version)


def check_version(what: str, version: Any) -> None:
    """Raise `InvalidConfig` unless a node may have this version; None stands for no version."""
    if version is None:
        return
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= MAX_VERSION:
        is_long = isinstance(version, int) and abs(version) >= 10**40
        shown = "a number of more than 40 digits" if is_long else repr(version)
        raise errors.InvalidConfig(
            f"{what}: version must be a whole number from 1 to {MAX_VERSION}, not {shown:.40}"
        )


def node_version_keys() -> list[str] | None:
    """Return the node versions of this process, as `<module>@<version>`, or None."""
    return [f"{name}@{version}" for name, version in sorted(_config.node_versions.items())] or None


def node_names() -> list[str] | None:
    """Return the names of all nodes that this app has, or None if a package may have more.

    Returns None also if it has no nodes, or more than a worker reports (MAX_LISTED_NODES).
    """
    cfg, names = _config, sorted(_config.node_map)
    if cfg.listed_nodes is not None:
        return cfg.listed_nodes
    is_open = cfg.node_resolver is not None or cfg.node_module_package is not None
    return None if is_open or not 0 < len(names) <= MAX_LISTED_NODES else names


def _set_version(name: str, version: int | None) -> None:
    _config.node_versions.pop(name, None)
    if version is not None:
        _config.node_versions[name] = version


def _isolate(isolated: set[str], what: str, name: str, isolation: str | None) -> None:
    if isolation not in (None, "process"):
        raise errors.InvalidConfig(f"{what}: isolation is 'process' or None, not {isolation!r:.40}")
    isolated.discard(name)
    if isolation is not None:
        isolated.add(name)


def register_input_widget(name: str, build_spec: WidgetSpec) -> None:
    """Let `build_spec(step, run)` make the `input_spec` of input steps that use this widget.

    Its result is merged with `step_id`, `widget`, `prompt` and `target`, and takes precedence.
    """
    _config.input_widgets[name] = build_spec


def set_builtin_model_registrar(registrar: Callable[[], None]) -> None:
    """Set a function that registers models. It may be called repeatedly, while there are none."""
    _config.builtin_model_registrar = registrar


def set_workflow_provider(
    load_workflow: WorkflowLoader,
    pipeline_schema: PipelineLoader,
    *,
    resolve_ref: RefResolver | None = None,
) -> None:
    """Set the source of definitions; `resolve_ref(value, context)` replaces the ref language."""
    _config.workflow_loader = load_workflow
    _config.pipeline_schema_loader = pipeline_schema
    _config.resolve_ref = resolve_ref


def set_invoke_context(factory: InvokeContext) -> None:
    """Call nodes inside the context manager `factory(job, run)`.

    It yields a function that gets the node's result and returns the result to store.
    """
    _config.invoke_context = factory


def set_on_node_completed(hook: NodeHook) -> None:
    """Call `hook(job, run, context_delta)` after a node's commit; its errors are only logged."""
    _config.on_node_completed = hook


def set_on_failed(hook: FailureHook | None) -> None:
    """Let schedulers call `hook(alert)` for failed runs, jobs and schedules.

    `alert` is a dict, see docs/alerts.md. Errors of the hook are only logged. None removes the
    hook. Raises `InvalidConfig` for a hook that cannot be called.
    """
    if hook is not None and not callable(hook):
        raise errors.InvalidConfig(f"set_on_failed() takes a function or None, not {hook!r:.80}")
    _config.on_failed = hook


def set_redactor(redact: Callable[[Any], Any] | None) -> None:
    """Let the dashboard show `redact(value)` for each value and error text of a run or job.

    It gets a JSON value and returns one. If it raises, the value is hidden. None removes it. Raises
    `InvalidConfig` if it cannot be called.
    """
    if redact is not None and not callable(redact):
        raise errors.InvalidConfig(f"set_redactor() takes a function or None, not {redact!r:.80}")
    _config.redactor = redact


def register_ingest_task(
    name: str,
    fn: Callable[..., Any],
    *,
    policy: Mapping[str, Any] | None = None,
    queue: str | None = None,
    isolation: str | None = None,
) -> None:
    """Store a task for `tasks.register_ingest_task`, which has checked its policy."""
    if not callable(fn):
        raise errors.InvalidConfig(f"ingest task {name!r} is not callable")
    _isolate(_config.isolated_tasks, f"ingest task {name!r}", name, isolation)
    _config.ingest_task_map[name] = fn
    _config.ingest_task_policies[name] = dict(policy or {})
    _config.ingest_task_queues[name] = queue


def set_ingest_schedule(schedule: Iterable[Any]) -> None:
    """Set the `schedules.ScheduleEntry`s and `schedules.Schedule`s that the scheduler follows."""
    _config.ingest_schedule = list(schedule)


def data_folder() -> Path:
    """Return the folder for the data of this package; it may not exist.

    `/var/lib/queue_workflows` for root, else below XDG_DATA_HOME or `~/.local/share`. Raises
    RuntimeError for an account without a home.
    """
    from pathlib import Path

    if os.geteuid() == 0:
        return Path("/var/lib/queue_workflows")
    base = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".local" / "share"
    return base / "queue_workflows"


def db_url_variables() -> tuple[str, ...]:
    """Return the environment variables that may hold the DSN, in the order of their use."""
    if _config.db_url_env_named:
        return (_config.db_url_env,)
    return ("QUEUE_WORKFLOWS_DB_URL", _config.db_url_env)


def database_url() -> str | None:
    """Return the DSN that the environment names, or None."""
    for name in db_url_variables():
        if url := os.environ.get(name):
            return url
    return None


def embedded_wanted() -> bool:
    """Return whether the app, an option or the environment requested the embedded server."""
    return _config.embedded or bool(_config.embedded_db) or EMBEDDED.read()


def requested_database() -> str:
    """Return the database of the embedded server that was requested, or an empty text."""
    return _config.embedded_db or os.environ.get(EMBEDDED_DB_ENV, "")


def host_label() -> str:
    """Return the label under which this machine's workers are shown and addressed.

    Raises `InvalidConfig` for one in the environment that no row can hold.
    """
    from queue_workflows import types

    for variable in _variables(_config.host_label_env, "HOST_LABEL"):
        if label := os.environ.get(variable):
            if not types.is_name(label):
                raise errors.InvalidConfig(
                    f"{variable}={label!r:.40}: a host label has 1 to 400 bytes of UTF-8"
                )
            return label
    import socket

    return socket.gethostname()


def host_priority() -> int:
    """Return this machine's claim order; if negative, it takes the newest jobs, as overflow."""
    for variable in _variables(_config.host_priority_env, "GPU_CONSUMER_PRIORITY"):
        raw = os.environ.get(variable)
        if raw is None:
            continue
        try:
            return int(raw)
        except ValueError:
            warn_once(variable, raw, "not an int; using 0")
            return 0
    return 0


def _variables(named: str, default: str) -> tuple[str, ...]:
    """Return the variables to read, the one that the app has named, or else ours and 0.3.0's."""
    return (f"QUEUE_WORKFLOWS_{default}", named) if named == f"AI_LEADS_{default}" else (named,)


def gpu_claim_policy() -> str:
    """Return GPU_CLAIM_POLICY; an unknown name gives the default and one warning."""
    name, default = GPU_CLAIM_POLICY.read(), GPU_CLAIM_POLICY.default
    if name in GPU_POLICIES:
        return name
    warn_once("GPU_CLAIM_POLICY", name, f"neither of {', '.join(GPU_POLICIES)}; using {default}")
    return default


def worker_memory_throttle() -> frozenset[str]:
    """Return the names in WORKER_MEMORY_THROTTLE; an unknown one gives the default and a warning.

    They are `ram`, `swap` and `gpu`; the set is empty if the setting is `off` or empty.
    """
    text = WORKER_MEMORY_THROTTLE.read()
    names = frozenset(text.replace(",", " ").lower().split()) - {"off"}
    if names <= THROTTLES:
        return names
    default, known = WORKER_MEMORY_THROTTLE.default, ", ".join(sorted(THROTTLES))
    warn_once("WORKER_MEMORY_THROTTLE", text, f"names are {known}; using {default}")
    return frozenset(default.split(","))


def queues() -> frozenset[str]:
    """Return every queue for which a worker may be started."""
    return DAG_QUEUES | _config.ingest_queues


def used_queues() -> frozenset[str]:
    """Return the queues that the app uses.

    They are `cpu` and `gpu` if it has nodes, the ingest queues that it named, and the queues of its
    tasks and schedules. A task without a queue of its own may be queued in any ingest queue.
    """
    cfg = _config
    of_tasks = [cfg.ingest_task_queues.get(name) for name in cfg.ingest_task_map]
    used = {queue for queue in of_tasks if queue is not None}
    used |= {entry.queue for entry in cfg.ingest_schedule if entry.queue is not None}
    if cfg.ingest_queues_named or None in of_tasks:
        used |= cfg.ingest_queues
    return frozenset(used | DAG_QUEUES if cfg.knows_nodes() else used)


def check_queue(queue: str, allowed: frozenset[str] | None = None) -> None:
    """Raise `UnknownQueue` (a ValueError) that names the queue and the existing queues."""
    known = queues() if allowed is None else allowed
    if queue not in known:
        remedy = "" if allowed == DAG_QUEUES else "; configure(ingest_queues=...) names more"
        raise errors.UnknownQueue(
            f"unknown queue {queue!r}: known are {', '.join(sorted(known)) or 'none'}{remedy}"
            f"{errors.hint(queue, known)}"
        )
