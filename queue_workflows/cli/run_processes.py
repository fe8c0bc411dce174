"""Start the processes that one run needs, unless processes of others serve the database."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import TracebackType

from queue_workflows import db, errors
from queue_workflows.cli import command, fleet, unserved_queues
from queue_workflows.cli.run_snapshot import RunSnapshot
from queue_workflows.runtime import signals
from queue_workflows.types import NowFn

LOOK_EVERY_S = 2.0
PATIENCE_S = 2.0
"""Seconds for others to start a queued run (a new run starts within 2 s)."""


class RunProcesses:
    """Start the processes that a run lacks, now or when others end; stop them at the end.

    `queues`: how many nodes of the run go to each. `wanted` None: no app to start any with.
    `waiting`: what it starts the first of them with.
    """

    def __init__(
        self,
        queues: dict[str, int],
        wanted: fleet.Roles | None,
        *,
        app: str | None,
        stop: signals.StopRequest,
        log: Path | None,
        waiting: fleet.Fleet | None = None,
        now_fn: NowFn = time.monotonic,
    ) -> None:
        self._queues = queues
        self._wanted = wanted
        self._app = app
        self._stop = stop
        self._log = log
        self._waiting = waiting
        self._now = now_fn
        self._stack = contextlib.ExitStack()
        self._own: list[fleet.Fleet] = []
        self._served: frozenset[str] = frozenset()
        self._looked = self._queued_since = now_fn()
        self._reported: set[str] = set()

    def __enter__(self) -> RunProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def started(self) -> bool:
        """Return whether it started processes."""
        return bool(self._own)

    @property
    def served(self) -> frozenset[str]:
        """Return the queues whose workers it started."""
        return self._served

    def begin(self) -> None:
        """Start the workers that are missing.

        Raises `InvalidConfig` if that needs an app, or if there are unfinished runs of another app:
        these processes would not be shared.
        """
        self._refuse_strangers()
        if missing := self._missing():
            self._start(missing)

    def tick(self, seen: RunSnapshot) -> None:
        """Check the processes; raise `InvalidConfig` if they refuse to start."""
        for own in self._own:
            own.check()
        # While the database is away no worker is visible: the next check decides.
        with contextlib.suppress(db.OperationalError):
            self._check(seen.run["status"])

    def _check(self, status: str) -> None:
        now = self._now()
        waiting = status == "queued"
        if not waiting:
            self._queued_since = now
        elif not self._own and now - self._queued_since >= PATIENCE_S:
            self._take_over(self._missing())
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            # The supervisor restarts workers of ours.
            missing = self._missing() - self._served
            if missing and not waiting:
                self._take_over(missing)

    def _missing(self) -> set[str]:
        """Return the queues that nobody serves; report once a switch that may be the reason."""
        missing = unserved_queues.unserved(set(self._queues))
        for row in unserved_queues.switched_off(missing) if missing else ():
            if row["queue"] not in self._reported:
                self._reported.add(row["queue"])
                command.print_message(unserved_queues.switch_text(row))
        return missing

    def _take_over(self, missing: set[str]) -> None:
        self._refuse_strangers()
        self._start(missing)

    def _refuse_strangers(self) -> None:
        if self._wanted is not None and (found := fleet.strangers()):
            raise errors.InvalidConfig(
                "this database has unfinished runs of workflows that this app does not know "
                f"({found}); processes of two apps would fail each other's: let their own app "
                f"finish them, end each by `{command.PROG} cancel RUN`, name another database by "
                "QUEUE_WORKFLOWS_DB_URL, or one of the embedded server by --db NAME, or, "
                "where processes that know both serve it, add --no-up"
            )

    def _start(self, missing: set[str]) -> None:
        if self._wanted is None:
            what = (
                f"no worker serves {', '.join(sorted(missing))}" if missing else "nobody starts it"
            )
            raise errors.InvalidConfig(f"{what}; name the app by --app, so that it can run here")
        roles = self._wanted._replace(
            cpu=min(self._wanted.cpu, self._queues["cpu"]) if "cpu" in missing else 0,
            gpu=max(1, self._wanted.gpu) if "gpu" in missing else 0,
        )
        self._served |= frozenset(
            queue for queue, count in (("cpu", roles.cpu), ("gpu", roles.gpu)) if count
        )
        command.print_message(f"starting {roles.describe()}")
        own, self._waiting = self._waiting or fleet.Fleet(), None
        own.start(fleet.specs(roles, app=self._app, log_level="warning"), self._log)
        self._stack.callback(own.stop, self._stop)
        self._own.append(own)


class StartedProcesses:
    """The processes that a `run` started, if any; its Ctrl-C stops them."""

    def __init__(self) -> None:
        self._made: RunProcesses | None = None
        self.queued = False
        """Whether the run is in the database."""

    def add(self, made: RunProcesses) -> None:
        """Add processes that may be started."""
        self._made = made

    @property
    def started(self) -> bool:
        """Return whether processes were started."""
        return self._made is not None and self._made.started

    def stops(self) -> str:
        """Return what the first Ctrl-C stops."""
        if self.queued and not self.started:
            return command.STOPS_VIEW.format("the run")
        return command.STOPS_WORK
