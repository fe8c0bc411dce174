"""Run an executor: a forked process that runs handlers.

The worker's requests about the running job come on a socket of their own, which a thread reads.
Nothing here guards the lease: the launcher and the kernel do (`Launcher.hold_until`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from queue_workflows.executor import (
    channel,
    kernel,
    loaded_app,
    protocol,
    streams,
    title,
)
from queue_workflows.model_cache import RequiresModels, adapted

if TYPE_CHECKING:
    from queue_workflows.executor import async_jobs, job_loop

FDS: Final = 4
"""Descriptors of an executor: jobs, control, stdout, stderr."""


class App(NamedTuple):
    """What an executor needs of the worker's configuration; called in a forked process."""

    load: Callable[[], object]
    """Imports the app."""
    model_cache: Callable[[], RequiresModels | None] = lambda: None
    """Returns the cache of models, for nodes that need one."""
    stop_policies: Callable[[], Iterable[str]] = tuple
    """Returns the names of the stop policies, to which the app may have added some."""


def ignore(_signum: int, _frame: object) -> None:
    """Ignore a signal; other than SIG_IGN it is not inherited by what a handler executes."""


def loops() -> tuple[type[async_jobs.AsyncJobs], type[job_loop.JobLoop]]:
    """Return what runs many jobs at once, and one at a time.

    The launcher imports both, so that each executor has them when it is forked. The worker, which
    imports this module too, needs neither.
    """
    from queue_workflows.executor import async_jobs, job_loop

    return async_jobs.AsyncJobs, job_loop.JobLoop


def main(
    fds: Sequence[int],
    inherited: Sequence[int],
    app: App,
    parent: int,
    late: bool,
    concurrent: bool,
    batched: bool,
) -> NoReturn:
    """Run handlers in this forked process and never return.

    `fds`: the descriptors that the worker sent. `inherited`: those to close. `late`: load the app.
    `concurrent`: run many async handlers at once. `batched`: take several at once.
    """
    code = 1
    try:
        os.setpgid(0, 0)
        kernel.die_with(parent)
        title.set_title(f"queue_workflows executor of launcher {parent}")
        for fd in inherited:
            os.close(fd)
        ends = _prepared(fds)
        message = loaded(app) if late else None
        many, one = loops()
        loop = many(*ends) if concurrent else one(*ends, adapted(app.model_cache()), by_job=batched)
        if message is not None:
            loop.send(message)
        if message is None or message.registered is not None:
            loop.serve()
        code = 0
    except protocol.ChannelLost:
        code = channel.LOST
    except BaseException:  # noqa: BLE001  the main function of a process
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _prepared(fds: Sequence[int]) -> tuple[socket.socket, socket.socket]:
    """Make this process one that handlers may run in; return its ends of `jobs` and `control`."""
    jobs, control = (socket.socket(fileno=channel.high(fd)) for fd in fds[:2])
    streams.redirect(*fds[2:])
    signal.signal(signal.SIGTERM, ignore)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # as `random` does after a fork: each executor has numbers of its own
    _watch_forks([jobs, control])
    return jobs, control


def _watch_forks(ends: Sequence[socket.socket]) -> None:
    """Let a child that a handler forks leave the executor, and die by the first SIGTERM."""
    masks: list[set[int]] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def in_child() -> None:
        _leave(ends)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


def _leave(ends: Sequence[socket.socket]) -> None:
    """Make a child that a handler forks an ordinary process, without the executor's channels."""
    for end in ends:
        end.close()
    if signal.getsignal(signal.SIGTERM) is ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def loaded(app: App) -> protocol.Loaded:
    """Load the app in this process; return what it registered, or its error."""
    before = dict(os.environ)
    try:
        app.load()
    except BaseException as error:  # noqa: BLE001  the boundary around app code: it may exit
        return protocol.Loaded(None, loaded_app.describe_error(error))
    return protocol.Loaded(loaded_app.collect(before, app.stop_policies())._asdict(), None)
