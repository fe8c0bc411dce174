"""Choose the processes that an app needs, and run them beside a command."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from queue_workflows import config, db, errors, model_registry
from queue_workflows.admin import overview
from queue_workflows.alerts import settings as alert_settings
from queue_workflows.cli import output
from queue_workflows.dispatch import hooks
from queue_workflows.runtime import restart_rule, service, signals, supervisor
from queue_workflows.worker import parent, pool_config

_STOP_S = 60.0
_HURRY_S = 0.2


class Roles(NamedTuple):
    """What runs beside the orchestrator.

    One worker process has all jobs but those of GPUs, each of which has a worker of its own.
    """

    cpu: int
    """How many jobs of the queue cpu run at once."""
    gpu: int
    ingest: tuple[str, ...]
    """Queues with one job at once, beside those of the pool."""
    scheduler: bool
    pool: tuple[pool_config.Entry, ...] = ()
    cards: tuple[int, ...] = ()
    """The GPUs that get a worker each, beside those that `gpu` counts."""

    def entries(self) -> list[pool_config.Entry]:
        """Return how many jobs of each ingest queue run at once."""
        counts = Counter(self.ingest)
        counts.update({entry.queue: entry.concurrency for entry in self.pool})
        return [pool_config.Entry(*each) for each in counts.items()]

    def describe(self) -> str:
        """Return `orchestrator, 2 cpu, 1 gpu, fetch, a pool (2 load, 5 mail), scheduler`."""
        named = [f"{n} {queue}" for n, queue in ((self.cpu, "cpu"), (self.gpu, "gpu")) if n]
        named += [f"gpu on card {card}" for card in self.cards]
        served = ", ".join(f"{entry.concurrency} {entry.queue}" for entry in self.pool)
        pool = [f"a pool ({served})"] if served else []
        scheduler = ["scheduler"] if self.scheduler else []
        return ", ".join(["orchestrator", *named, *self.ingest, *pool, *scheduler])


def roles(
    *,
    cpu: int | None = None,
    gpu: int | None = None,
    ingest: bool = True,
    pool: Sequence[pool_config.Entry] = (),
    beside: Collection[str] = (),
    cards: Sequence[int] = (),
) -> Roles:
    """Return the processes that the loaded app needs.

    None takes the settings WORKFLOW_CPU_WORKERS and _GPU_. Node workers need an app with nodes; gpu
    workers also models or declared gpu nodes, unless a number or `cards` is given. Ingest workers
    need tasks: one per queue that is not in the pool, or is in `beside`. The scheduler needs
    nothing: a row of the table `schedules` may come at any time. Raises `UnknownQueue`, and
    `InvalidConfig` for an app with nothing to run, for workers without nodes or tasks, and for
    wrong settings of alerts.
    """
    cfg = config.get_config()
    nodes, tasks = cfg.knows_nodes(), bool(cfg.ingest_task_map)
    _check_app(cfg, for_nodes=bool(cpu or gpu or cards), for_tasks=bool(pool))
    if ingest:
        alert_settings.read()
    uses_gpu = cfg.has_model_registrar() or bool(model_registry.known_ids())
    uses_gpu |= any(getattr(each, "queue", None) == "gpu" for each in cfg.node_map.values())
    cpu_default = config.WORKFLOW_CPU_WORKERS.read() if nodes else 0
    gpu_default = config.WORKFLOW_GPU_WORKERS.read() if nodes and uses_gpu and not cards else 0
    chosen = Roles(
        cpu=max(0, cpu_default) if cpu is None else cpu,
        gpu=max(0, gpu_default) if gpu is None else gpu,
        ingest=_alone(pool, beside) if ingest and tasks else (),
        scheduler=ingest,
        pool=tuple(pool),
        cards=tuple(cards),
    )
    if entries := chosen.entries():
        pool_config.check([each._asdict() for each in entries], "the ingest queues")
    return chosen


def _check_app(cfg: config.EngineConfig, *, for_nodes: bool, for_tasks: bool) -> None:
    """Raise `InvalidConfig` for an app that lacks what was asked to be run."""
    nodes, tasks = cfg.knows_nodes(), bool(cfg.ingest_task_map)
    if not (nodes or tasks or cfg.workflow_loader):
        raise errors.InvalidConfig(
            "nothing to start: no node, ingest task or workflow provider is registered; name the "
            "app by --app or QUEUE_WORKFLOWS_APP"
        )
    if for_nodes and not nodes:
        raise errors.InvalidConfig(
            "--cpu, --gpu and --cards need an app that knows nodes: set_node_module_package(), "
            "set_node_resolver() or register_node()"
        )
    if for_tasks and not tasks:
        raise errors.InvalidConfig(
            "--workers and WORKERS_JSON need an app that registers ingest tasks: "
            "register_ingest_task()"
        )


def _alone(pool: Sequence[pool_config.Entry], beside: Collection[str]) -> tuple[str, ...]:
    """Return the ingest queues that get a worker of their own."""
    own = config.get_config().ingest_queues
    if wrong := sorted(set(beside) - own):
        raise errors.UnknownQueue(
            f"the app has no ingest queue --ingest {wrong[0]}; it has "
            f"{', '.join(sorted(own))}{errors.hint(wrong[0], own)}"
        )
    return tuple(sorted(own - {entry.queue for entry in pool} | set(beside)))


def specs(
    wanted: Roles,
    *,
    app: str | None,
    log_level: str,
    log_format: str | None = None,
) -> list[supervisor.ChildSpec]:
    """Return the child specs of these roles, each `python -m queue_workflows.<role>`."""
    commands = {"orchestrator": [parent.ORCHESTRATOR]}
    if wanted.scheduler:
        commands["orchestrator"] += ["--with-scheduler"]
    served = ["--queue", "cpu", "--slots", str(wanted.cpu)] if wanted.cpu else []
    if entries := wanted.entries():
        served += ["--workers", pool_config.as_json(entries)]
    if served:
        commands["worker"] = [parent.WORKER, *served]
    for number in range(1, wanted.gpu + 1):
        commands[f"gpu-{number}"] = [parent.WORKER, "--queue", "gpu", "--slots", "1"]
    for card in wanted.cards:
        commands[f"gpu card {card}"] = [parent.WORKER, "--queue", "gpu", "--cards", str(card)]
    common = ["--log-level", log_level, *(["--app", app] if app else [])]
    common += ["--log-format", log_format] if log_format else []
    return [parent.process(name, *command, *common) for name, command in commands.items()]


class Fleet:
    """Processes under a parent on a thread of its own.

    They run inside the `with` block and stop at its end. A further request in `stop` shortens their
    shutdown. They die with this process. What they print goes to `log`; None: to stderr.
    """

    def __init__(
        self, children: list[supervisor.ChildSpec], stop: signals.StopRequest, log: Path | None
    ) -> None:
        self._outer = stop
        self._log = -1 if log is None else os.open(log, os.O_WRONLY | os.O_APPEND)
        self._stop = signals.StopRequest()
        output = 2 if log is None else self._log
        self._parent = parent.Parent(children, fail_fast=True, output=output)
        self._pool = service.Pool("parent", 1, lambda _: self._parent.run(self._stop))

    def __enter__(self) -> Fleet:
        self._parent.begin()
        self._pool.start()
        return self

    def __exit__(self, *_: object) -> None:
        passed_on = 1
        self._stop.request()
        deadline = time.monotonic() + _STOP_S
        while not self._pool.stop(_HURRY_S) and time.monotonic() < deadline:
            if self._outer.count > passed_on:
                passed_on = self._outer.count
                self._stop.request()
        if self._log >= 0:
            os.close(self._log)

    def check(self, *_: object) -> None:
        """Raise `InvalidConfig` if the processes refuse to start."""
        if names := self._parent.gave_up:
            raise errors.InvalidConfig(
                f"{', '.join(names)} refused to start {restart_rule.GIVE_UP_AFTER} times; "
                "their output has the reason"
            )


def strangers() -> str:
    """Return a text about unfinished runs of workflows that this app does not know; "" for none.

    Without a workflow provider, no workflow counts as unknown.
    """
    if not hooks.has_provider():
        return ""
    with contextlib.closing(db.connect()) as conn:
        rows = [row for row in overview.unfinished(conn) if not _knows(row["name"])]
    return ", ".join(
        f"{output.counted(row['n'], 'run')} of {row['name']!r}: {' '.join(row['ids'])}"
        f"{' ...' if row['n'] > len(row['ids']) else ''}"
        for row in rows[:3]
    )


def _knows(workflow: str) -> bool:
    try:
        hooks.expand({"id": workflow, "workflow_name": workflow})
    except errors.UnknownWorkflow:
        return False
    except errors.QueueWorkflowsError:
        pass
    return True


class ChildLog:
    """A file for the output of children while a live picture is drawn; removed if empty."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="queue-workflows-", suffix=".log")
        os.close(handle)
        self.path = Path(name)

    def __enter__(self) -> ChildLog:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.path.stat().st_size:
            self.path.unlink()

    @property
    def text(self) -> str:
        """Return where the file is, or "" if nothing was printed."""
        return f"what the processes printed: {self.path}" if self.path.stat().st_size else ""
