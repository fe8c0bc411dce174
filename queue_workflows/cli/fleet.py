"""Choose the processes that an app or a run needs, and run them while a command runs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from queue_workflows import config, db, errors, model_registry, workers
from queue_workflows.alerts import sender
from queue_workflows.cli import command, output, run_views, texts
from queue_workflows.dag import hooks
from queue_workflows.db import statements
from queue_workflows.runtime import (
    entry_point,
    exit_codes,
    forking,
    identity,
    kernel,
    signals,
    supervisor,
)
from queue_workflows.types import NowFn, Row
from queue_workflows.worker import parent, shapes

_log = logging.getLogger(__name__)
_STOP_S = 60.0
"""Seconds that processes get to end, beyond those of their running jobs."""
_HURRY_S = 0.2
_EXECUTED = """
import sys
from queue_workflows.cli import fleet
sys.exit(fleet.serve(*map(int, sys.argv[1:])))
"""
_SETTINGS = ("db_url_env", "db_url_env_named", "host_label_env", "embedded")
"""The settings of the app that a parent needs, since it does not load the app."""
_OFF: Final = frozenset({"0", "false", "no", "off"})
_PAGES_NEED: Final = ("fastapi", "uvicorn", "pydantic_settings", "jinja2", "python_multipart")
"""Imports of the dashboard. This process does without them, as they need 40 MB."""
PAGES_PORT: Final = 8082
"""Where `up` and `demo` serve the dashboard. `serve` has 8081."""
LOOK_EVERY_S = 2.0
PATIENCE_S = 2.0
"""Seconds for others to start a queued run (a new run starts within 2 s)."""


class Roles(NamedTuple):
    """The processes that run besides the orchestrator.

    Each GPU has a worker process of its own. One more worker process serves all other queues.
    """

    cpu: int
    """How many jobs of the queue cpu run at once."""
    gpu: int
    ingest: tuple[shapes.Entry, ...]
    """How many jobs of each ingest queue run at once."""
    scheduler: bool
    cards: tuple[int, ...] = ()
    """The GPUs that get a worker each, besides the `gpu` workers."""

    def describe(self) -> str:
        """Return `orchestrator, 2 cpu, 1 gpu, 1 fetch, 5 mail, scheduler`."""
        named = [f"{n} {queue}" for n, queue in ((self.cpu, "cpu"), (self.gpu, "gpu")) if n]
        named += [f"gpu on card {card}" for card in self.cards]
        named += [f"{entry.concurrency} {entry.queue}" for entry in self.ingest]
        named += ["scheduler"] if self.scheduler else []
        return ", ".join(["orchestrator", *named])


def roles(
    *, cpu: int | None = None, gpu: int | None = None, ingest: bool = True,
    pool: Sequence[shapes.Entry] = (), beside: Collection[str] = (), cards: Sequence[int] = (),
) -> Roles:  # fmt: skip
    """Return the processes that the loaded app needs.

    None takes the settings WORKFLOW_CPU_WORKERS and _GPU_. Node workers need an app with nodes; gpu
    workers also models or declared gpu nodes, unless a number or `cards` is given. Ingest queues
    need tasks; one job of each that is not in the pool runs at once, and of each in `beside` one
    more than in the pool. The scheduler has no needs, as a row of the table `schedules` may come at
    any time. Raises `UnknownQueue`, and `InvalidConfig` for an app that lacks what is to be run,
    and for wrong settings of alerts.
    """
    cfg = config.get_config()
    nodes, tasks = cfg.knows_nodes(), bool(cfg.ingest_task_map)
    if not (nodes or tasks or cfg.workflow_loader):
        raise errors.InvalidConfig(
            "nothing to start: no node, ingest task or workflow provider is registered; name the "
            "app by --app or QUEUE_WORKFLOWS_APP"
        )
    if (cpu or gpu or cards) and not nodes:
        raise errors.InvalidConfig(
            "--cpu, --gpu and --cards need an app that knows nodes: set_node_module_package(), "
            "set_node_resolver() or register_node()"
        )
    if pool and not tasks:
        raise errors.InvalidConfig(
            "--workers and WORKERS_JSON need an app that registers ingest tasks: "
            "register_ingest_task()"
        )
    if ingest:
        sender.read_settings()
    uses_gpu = cfg.has_model_registrar() or bool(model_registry.known_ids())
    uses_gpu |= any(getattr(each, "queue", None) == "gpu" for each in cfg.node_map.values())
    cpu_default = config.WORKFLOW_CPU_WORKERS.read() if nodes else 0
    gpu_default = config.WORKFLOW_GPU_WORKERS.read() if nodes and uses_gpu and not cards else 0
    chosen = Roles(
        cpu=max(0, cpu_default) if cpu is None else cpu,
        gpu=max(0, gpu_default) if gpu is None else gpu,
        ingest=_entries(pool, beside) if ingest and tasks else (),
        scheduler=ingest,
        cards=tuple(cards),
    )
    if chosen.ingest:
        shapes.check([each._asdict() for each in chosen.ingest], "the ingest queues")
    return chosen


def _entries(pool: Sequence[shapes.Entry], beside: Collection[str]) -> tuple[shapes.Entry, ...]:
    """Return how many jobs of each ingest queue run at once, the queues of the pool first."""
    own = config.get_config().ingest_queues
    if wrong := sorted(set(beside) - own):
        raise errors.UnknownQueue(
            f"the app has no ingest queue --ingest {wrong[0]}; it has "
            f"{', '.join(sorted(own))}{errors.hint(wrong[0], own)}"
        )
    counts = Counter({entry.queue: entry.concurrency for entry in pool})
    counts.update(sorted(own.difference(counts).union(beside)))
    return tuple(shapes.Entry(*each) for each in counts.items())


def specs(
    wanted: Roles, *, app: str | None, log_level: str, log_format: str | None = None
) -> list[supervisor.ChildSpec]:
    """Return the child specs of these roles, each `python -m queue_workflows.<role>`."""
    commands = {"orchestrator": [parent.ORCHESTRATOR]}
    if wanted.scheduler:
        commands["orchestrator"] += ["--with-scheduler"]
    served = ["--queue", "cpu", "--slots", str(wanted.cpu)] if wanted.cpu else []
    if wanted.ingest:
        served += ["--workers", shapes.as_json(wanted.ingest)]
    if served:
        commands["worker"] = [parent.WORKER, *served]
    for number in range(1, wanted.gpu + 1):
        commands[f"gpu-{number}"] = [parent.WORKER, "--queue", "gpu", "--slots", "1"]
    for card in wanted.cards:
        commands[f"gpu card {card}"] = [parent.WORKER, "--queue", "gpu", "--cards", str(card)]
    common = ["--log-level", log_level, *(["--app", app] if app else [])]
    common += ["--log-format", log_format] if log_format else []
    return [parent.process(name, *command, *common) for name, command in commands.items()]


def dashboard(
    app: str | None, log_level: str, log_format: str | None = None, *, opens: str = "/",
    shows: str | None = None,
) -> supervisor.ChildSpec | None:  # fmt: skip
    """Return the process of the dashboard on loopback; None if it is off or lacks its extra.

    `opens`: the path of the page that its link opens. `shows`: a folder of runs whose files it may
    show, unless OUT_ROOTS names others.
    """
    chosen = os.environ.get("QUEUE_WORKFLOWS_APP_DASHBOARD", os.environ.get("APP_DASHBOARD", ""))
    if chosen.lower() in _OFF or not all(map(importlib.util.find_spec, _PAGES_NEED)):
        return None
    words = ["queue_workflows", "serve", "--beside-up", opens, "--host", "127.0.0.1"]
    words += ["--port", str(_free_port()), "--workers-json", "[]", "--log-level", log_level]
    words += ["--app", app] if app else []
    words += ["--log-format", log_format] if log_format else []
    made = parent.process("dashboard", *words)
    if shows is None or config.OUT_ROOTS.read():
        return made
    return made._replace(env={**(made.env or {}), config.OUT_ROOTS.variables[0]: shows})


def _free_port() -> int:
    """Return PAGES_PORT, or 0, which stands for any, if another process has it."""
    with contextlib.suppress(OSError), socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(("127.0.0.1", PAGES_PORT))
        return PAGES_PORT
    return 0


class Fleet:
    """A parent in a process of its own, with the processes that it keeps running. All die with us.

    In a `with` block that begins before this process loads the app, the parent is forked then, and
    later forks the processes, so that none has anything of the app. Elsewhere it is executed.
    """

    def __init__(self) -> None:
        self._parent: supervisor.Child | None = None
        self._orders = self._said = -1
        self._order = ""
        self._rule, self._began, self._due = supervisor.RestartRule(), 0.0, math.inf

    def __enter__(self) -> Fleet:
        if forking.is_clean() and forking.unsafe() is None:
            self._begin(forked=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1
            if self._parent is not None:
                self._parent.send(signal.SIGTERM)  # it waits for an order
                self._parent.wait(_STOP_S)
        self._print_said(last=True)

    def _begin(self, *, forked: bool) -> None:
        """Start a parent, which waits for an order."""
        self._print_said(last=True)
        orders, self._orders = os.pipe()
        self._said, said = os.pipe()
        numbers = os.getpid(), orders, said
        self._began, self._due = time.monotonic(), math.inf
        if forked:
            theirs = self._orders, self._said
            self._parent = supervisor.Forked(lambda: serve(*numbers, *theirs))
        else:
            argv = [sys.executable, "-c", _EXECUTED, *map(str, numbers)]
            self._parent = supervisor.Child(argv, inherit=(orders, said))
        os.close(orders)
        os.close(said)

    def start(self, children: Sequence[supervisor.ChildSpec], log: Path | None) -> None:
        """Start these processes, once. What they print goes to `log`, else to stderr."""
        named = {name: getattr(config.get_config(), name) for name in _SETTINGS}
        place = dict(os.environ), str(Path.cwd())
        self._order = json.dumps([*place, children, log and str(log), named])
        if self._orders < 0:
            self._begin(forked=False)
        self._send_order()

    def _send_order(self) -> None:
        with (
            contextlib.suppress(BrokenPipeError),  # it has died, and `check` replaces it
            open(self._orders, "w", encoding="utf-8") as orders,  # noqa: PTH123
        ):
            self._orders = -1
            orders.write(self._order + "\n")

    def _print_said(self, *, last: bool = False) -> None:
        """Print the parent's messages, above a picture; with `last`, stop reading afterwards."""
        if self._said < 0:
            return
        os.set_blocking(self._said, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._said, 1 << 16):
                for line in data.decode(errors="replace").splitlines():
                    output.complain(line)
        if last:
            os.close(self._said)
            self._said = -1

    def check(self, *_: object) -> None:
        """Raise `InvalidConfig` if the processes refuse to start; replace a parent that died."""
        self._print_said()
        if time.monotonic() >= self._due:
            self._begin(forked=False)
            self._send_order()
        death = self._parent.reap() if self._parent is not None else None
        if death is None:
            return
        self._parent = None
        if death.code == exit_codes.REFUSED:
            raise errors.InvalidConfig(
                f"a process refused to start {supervisor.GIVE_UP_AFTER} times; its output has "
                "the reason"
            )
        how = f"signal {death.signal}" if death.signal else f"exit code {death.code}"
        _log.warning("the parent of our processes ended with %s: starting another one", how)
        delay_s = self._rule.after_exit(death.code, time.monotonic() - self._began)
        self._due = time.monotonic() + (delay_s or 0.0)

    def stop(self, again: signals.StopRequest) -> None:
        """Stop them, and wait for it. Each further request in `again` hurries them."""
        running, self._parent = self._parent, None
        if running is None:
            return
        running.send(signal.SIGTERM)
        passed_on = 1
        deadline = time.monotonic() + config.SHUTDOWN_TIMEOUT_S.read() + _STOP_S
        while running.wait(_HURRY_S) is None and time.monotonic() < deadline:
            self._print_said()
            if again.count > passed_on:
                passed_on = again.count
                # Two of one kind may become one.
                running.send(signal.SIGTERM if passed_on % 2 else signal.SIGINT)
        self._print_said(last=True)


def serve(ours: int, orders: int, said: int, *theirs: int) -> int:
    """Run as the parent process of the `Fleet` in process `ours`; return the exit code.

    It waits until the pipe `orders` has a line with its children and settings, and exits if `ours`
    ends before. With a log file for the children, its own messages go to the pipe `said`.
    """
    for each in theirs:
        os.close(each)
    kernel.set_title(f"queue_workflows parent of {ours}")
    with open(orders, encoding="utf-8") as pipe:
        text = pipe.readline()  # a process of the app may hold the pipe open
    if not text.endswith("\n"):
        os._exit(0)
    environment, folder, children, log, named = json.loads(text)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.set_inheritable(said, False)
    printed = 2 if log is None else os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(printed, number)
    for name, value in named.items():
        setattr(config.get_config(), name, value)

    def run() -> int:
        with signals.StopRequest() as stop:
            made = parent.Parent(
                [supervisor.ChildSpec(*each) for each in children],
                fail_fast=True,
                spawn=functools.partial(_spawn, said),
            )
            made.start()  # before the handlers of logs and the threads, which a fork would have too
            if log is not None:
                os.set_blocking(said, False)  # no read while an answer is awaited
                sys.stderr = open(said, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
            entry_point.setup_logging("warning")
            return made.run(stop)

    return entry_point.run_main("queue-workflows", run)


def _spawn(said: int, argv: Sequence[str], env: Mapping[str, str] | None) -> supervisor.Child:
    """Start `python -m MODULE ...`: fork it if that is safe."""
    if forking.unsafe() is not None:
        return supervisor.Child(argv, env)
    module, *arguments = argv[2:]

    def be() -> int:
        os.close(said)
        kernel.set_title(" ".join(argv[2:]))
        sys.argv = [*argv[2:]]
        return importlib.import_module(module).main(arguments)

    return supervisor.Forked(be, env)


@contextlib.contextmanager
def child_log() -> Generator[Path]:
    """Yield a file for the output of children while a live picture is drawn.

    It is reported at the end, or removed if it is empty.
    """
    handle, name = tempfile.mkstemp(prefix="queue-workflows-", suffix=".log")
    os.close(handle)
    path = Path(name)
    try:
        yield path
    finally:
        if path.stat().st_size:
            command.print_message(f"what the processes printed: {path}")
        else:
            path.unlink()


# --- who serves the database already -----------------------------------------------------------


def strangers() -> str:
    """Return a text about unfinished runs of workflows that this app does not know; "" for none.

    Without a workflow provider, no workflow counts as unknown.
    """
    if not hooks.has_provider():
        return ""
    with contextlib.closing(db.connect()) as conn:
        rows = [row for row in statements.overview.unfinished(conn) if not _knows(row["name"])]
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


def unserved(queues: set[str]) -> set[str]:
    """Return which of the queues no live worker serves.

    A worker of this machine whose process has ended counts as dead.
    """
    with contextlib.closing(db.connect()) as conn:
        rows = workers.list(absent=False, conn=conn)
    here = identity.machine()
    return queues - {
        row["queue"]
        for row in rows
        if row["state"] in workers.TAKING
        and row["desired_state"] == "on"
        and (f":{here}:" not in row["worker_id"] or identity.process_exists(row["pid"]))
    }


def switched_off(queues: set[str]) -> list[Row]:
    """Return the OFF rows in force that stop this machine's workers of these queues."""
    if not queues or config.DISABLE_WORKER_CONTROL.read():
        return []
    with contextlib.closing(db.connect()) as conn:
        rows = statements.workers.switched_off(conn)
    here = config.host_label()
    return [row for row in rows if row["host_label"] == here and row["queue"] in {*queues, "all"}]


@dataclass(eq=False)
class RunProcesses(contextlib.ExitStack):
    """Start the processes that a run lacks, now or when others end; stop them at the end."""

    queues: set[str]
    """The queues of the run's nodes."""
    wanted: Roles | None
    """The processes that may be started; None without an app to start."""
    _: KW_ONLY
    app: str | None
    stop: signals.StopRequest
    log: Path | None
    waiting: Fleet | None = None
    """The fleet that starts the first processes."""
    now_fn: NowFn = time.monotonic
    started: list[Fleet] = field(default_factory=list["Fleet"], init=False)
    served: frozenset[str] = field(default=frozenset(), init=False)
    """The queues whose workers it started."""

    def __post_init__(self) -> None:
        super().__init__()
        self._looked = self._queued_since = self.now_fn()
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Start the workers that are missing.

        Raises `InvalidConfig` if that needs an app, or if there are unfinished runs of another app,
        since these processes would not be shared.
        """
        self._refuse_strangers()
        if missing := self._missing():
            self._start(missing)

    def tick(self, seen: run_views.RunSnapshot) -> None:
        """Check the processes; raise `InvalidConfig` if they refuse to start."""
        for own in self.started:
            own.check()
        now = self.now_fn()
        waiting = seen.run["status"] == "queued"
        # While the database is away no worker is visible, and the next check decides.
        with contextlib.suppress(db.OperationalError):
            if not waiting:
                self._queued_since = now
            elif not self.started and now - self._queued_since >= PATIENCE_S:
                self._refuse_strangers()
                self._start(self._missing())
            if now - self._looked >= LOOK_EVERY_S:
                self._looked = now
                # The supervisor restarts workers of ours.
                missing = self._missing() - self.served
                if missing and not waiting:
                    self._refuse_strangers()
                    self._start(missing)

    def _missing(self) -> set[str]:
        """Return the queues without a worker; report once a switch that may be the reason."""
        missing = unserved(self.queues)
        for row in switched_off(missing):
            if row["queue"] not in self._reported:
                self._reported.add(row["queue"])
                command.print_message(texts.switch_text(row))
        return missing

    def _refuse_strangers(self) -> None:
        if self.wanted is not None and (found := strangers()):
            raise errors.InvalidConfig(
                "this database has unfinished runs of workflows that this app does not know "
                f"({found}); processes of two apps would fail each other's: let their own app "
                f"finish them, end each by `{command.PROG} cancel RUN`, name another database by "
                "QUEUE_WORKFLOWS_DB_URL, or one of the embedded server by --db NAME, or, "
                "where processes that know both serve it, add --no-up"
            )

    def _start(self, missing: Iterable[str]) -> None:
        if self.wanted is None:
            queues = ", ".join(sorted(missing))
            what = f"no worker serves {queues}" if queues else "nobody starts it"
            raise errors.InvalidConfig(f"{what}; name the app by --app, so that it can run here")
        chosen = self.wanted._replace(
            cpu=max(1, self.wanted.cpu) if "cpu" in missing else 0,
            gpu=max(1, self.wanted.gpu) if "gpu" in missing else 0,
        )
        self.served |= {name for name in ("cpu", "gpu") if getattr(chosen, name)}
        command.print_message(f"starting {chosen.describe()}")
        own, self.waiting = self.waiting or Fleet(), None
        own.start(specs(chosen, app=self.app, log_level="warning"), self.log)
        self.callback(own.stop, self.stop)
        self.started.append(own)
