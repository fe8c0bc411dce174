"""Start a launcher and executors for tests without a database, as a worker does."""

from __future__ import annotations

import contextlib
import os
import select
import time
import warnings
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from queue_workflows.executor import launcher_client, process, protocol
from tests.support.wait import until

M = TypeVar("M")
LIMIT_S = 30.0


@contextlib.contextmanager
def launched(
    load: Callable[[], object],
    *,
    model_cache: Any = None,
    late: bool = False,
    alone: bool = True,
) -> Generator[launcher_client.Launcher]:
    """A launcher that loads by this function; it and its executors have ended afterwards.

    `alone`: it closes the descriptors that it inherited from pytest.
    """
    # A hostile handler must not write into the channel of pytest-xdist.
    inherited = _descriptors() if alone else []

    def load_alone() -> None:
        for fd in inherited:
            with contextlib.suppress(OSError):  # a thread has closed it since
                os.close(fd)
        load()

    app = process.App(load_alone) if model_cache is None else process.App(load_alone, model_cache)
    with warnings.catch_warnings():
        # From Python 3.12 on: pytest's own threads run here.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = launcher_client.Launcher.start(app, late=late)
    try:
        yield found
    finally:
        found.close()


def _descriptors() -> list[int]:
    """The open descriptors of this process but stdin, stdout and stderr."""
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  a Path per name is no number
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.fstat(int(name))
            found.append(int(name))
    return [fd for fd in found if fd > 2]


def task_row(name: str, args: dict[str, Any] | None = None, **columns: Any) -> dict[str, Any]:
    """The row of a claimed ingest job."""
    return {
        "id": f"job-of-{name}", "task_name": name, "queue": "load", "reason": "tick",
        "args": args or {}, "claim_no": 1, "attempts": 0, "worker_id": "w",
    } | columns  # fmt: skip


def node_row(module: str, inputs: dict[str, Any] | None = None, **columns: Any) -> dict[str, Any]:
    """The row of a claimed node job."""
    return {
        "id": f"job-of-{module}", "run_id": "run", "node_id": f"step/{module}",
        "node_module": module, "queue": "cpu", "inputs": inputs or {}, "input_template": None,
        "ref_heads": [], "required_model": None, "claim_no": 1, "attempts": 0, "worker_id": "w",
        "claimed_by": "h", "run": {"id": "run", "out_dir": None},
    } | columns  # fmt: skip


class Worker:
    """One executor as its worker sees it: what it sent, printed, and how it died."""

    def __init__(self, launcher: launcher_client.Launcher, *, concurrent: bool = False) -> None:
        self.launcher = launcher
        self.executor = launcher.fork(concurrent=concurrent)
        self.key = 0
        self.messages: list[protocol.Message] = []
        self.printed = bytearray()
        self.keep_printed = True
        self.printed_bytes = 0
        self.lost: Exception | None = None
        self.died: protocol.Died | None = None
        self.answers: dict[str, Any] | None = {}
        """What it answers; None: nothing, ever."""

    def send_task(self, name: str, args: dict[str, Any] | None = None, **columns: Any) -> int:
        """Send an ingest job; return its key."""
        self.key += 1
        self.send(protocol.Run(self.key, "ingest", task_row(name, args, **columns), None))
        return self.key

    def send_node(self, module: str, inputs: dict[str, Any] | None = None, **columns: Any) -> int:
        """Send a node; return its key."""
        self.key += 1
        run = columns.pop("run_row", None)
        self.send(protocol.Run(self.key, "node", node_row(module, inputs, **columns), run))
        return self.key

    def send(self, message: protocol.Message) -> None:
        """Send a message to the main thread of the executor."""
        self.executor.jobs.send(message)

    def request(self, message: protocol.Message) -> None:
        """Send a message to the control thread."""
        self.executor.control.send(message)

    def task(self, name: str, args: dict[str, Any] | None = None) -> protocol.Outcome:
        """Run an ingest job; return its outcome."""
        return self.outcome(self.send_task(name, args))

    def node(self, module: str, inputs: Any = None, **columns: Any) -> protocol.Outcome:
        """Run a node; return its outcome."""
        return self.outcome(self.send_node(module, inputs, **columns))

    def outcome(self, key: int) -> protocol.Outcome:
        """Wait for the outcome of this job."""
        return self.wait(protocol.Outcome, lambda message: message.key == key)

    def wait(self, kind: type[M], matches: Callable[[Any], bool] = lambda _: True) -> M:
        """Wait for a message of this kind; it stays in `messages`."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            for message in self.messages:
                if isinstance(message, kind) and matches(message):
                    return message
            assert self.lost is None, f"no {kind.__name__}: {self.lost}; printed: {self.text}"
            assert time.monotonic() < deadline, f"no {kind.__name__} in {self.messages[-5:]}"
            self.turn()

    def of(self, kind: type[M]) -> list[M]:
        """The messages of a kind so far."""
        return [each for each in self.messages if isinstance(each, kind)]

    def turn(self, timeout_s: float = 1.0) -> None:
        """Take what is there, after a wait of at most `timeout_s` for anything."""
        poll = select.poll()
        if self.lost is None:
            poll.register(self.executor.jobs.fileno(), select.POLLIN)
        for fd in self.executor.out.fds:
            poll.register(fd, select.POLLIN)
        poll.register(self.executor.pidfd, select.POLLIN)
        poll.register(self.launcher.fileno(), select.POLLIN)
        poll.poll(timeout_s * 1000)
        if self.lost is None:
            try:
                self.take(self.executor.jobs.receive())
            except (protocol.ChannelLost, protocol.ProtocolError) as error:
                self.lost = error
        for _, data in self.executor.out.drain():
            self.printed_bytes += len(data)
            if self.keep_printed:
                self.printed += data

    def take(self, messages: list[protocol.Message]) -> None:
        self.messages += messages
        for message in messages:
            if isinstance(message, protocol.Ask) and self.answers is not None:
                found = self.answers.get(message.what)
                error = None if message.what in self.answers else "nothing is known of it"
                self.send(protocol.Answer(message.key, message.what, found, error))

    @property
    def text(self) -> str:
        """What it printed."""
        return self.printed.decode(errors="replace")

    def death(self) -> protocol.Died:
        """Wait for the end of the process; return it as the launcher reported it."""

        def found() -> bool:
            self.turn(0.05)
            mine = [each for each in self.launcher.receive() if each.pid == self.executor.pid]
            self.died = mine[0] if mine else None
            return self.died is not None

        until(found, timeout_s=LIMIT_S)
        assert self.died is not None
        return self.died

    def close(self) -> None:
        """Kill it if it lives."""
        if self.died is None:
            self.executor.kill()
        self.executor.close()


@contextlib.contextmanager
def forked(launcher: launcher_client.Launcher, *, concurrent: bool = False) -> Generator[Worker]:
    """An executor of this launcher, dead afterwards."""
    found = Worker(launcher, concurrent=concurrent)
    try:
        yield found
    finally:
        found.close()
