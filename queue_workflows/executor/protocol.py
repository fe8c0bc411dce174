"""Define the messages between a worker, its launcher and its executors, and their errors."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

from queue_workflows import errors
from queue_workflows.dag import policy
from queue_workflows.engine import outcomes
from queue_workflows.runtime import clock
from queue_workflows.types import JsonDict, Row


class ProtocolError(errors.QueueWorkflowsError, RuntimeError):
    """The peer sent bytes that are no message, or a message cannot be sent; one line of text."""


class ChannelLost(errors.QueueWorkflowsError, ConnectionError):
    """The peer has closed its end of the channel, or has ended."""


class Run(NamedTuple):
    """Run a job; several wait in the executor, and run in this order.

    `run` is the run's row if the app's hooks take it (`loaded_app.Registered.needs_rows`), else
    None; then `job` is the whole row. `key` names the job in every message about it.
    """

    key: int
    family: str
    job: Row
    run: Row | None


class Announce(NamedTuple):
    """Call `on_node_completed` with the value of the job `key`, which was recorded as completed."""

    key: int
    job: Row
    run: Row


class Answer(NamedTuple):
    """The value that an `Ask` requested, or an error."""

    key: int
    what: str
    value: Any
    error: str | None


class Load(NamedTuple):
    """Load a model for the jobs to come; `ModelDone` tells when it is loaded."""

    model: str


class Unload(NamedTuple):
    """Unload the model; `idle_only`: only if no job has used it for the TTL. See `ModelDone`."""

    idle_only: bool


class Quit(NamedTuple):
    """End the process with exit code 0 after the messages before this one."""


class Cancel(NamedTuple):
    """Interrupt the handler of a job: `cancelled` sets its cancel event, `shutdown` does not."""

    key: int
    reason: str


class Recall(NamedTuple):
    """Send back the jobs up to the key `last` whose handlers have not started."""

    last: int


class Forget(NamedTuple):
    """Drop the value of the job `key`: no `Announce` follows."""

    key: int


class Waits(NamedTuple):
    """The handler of a job that was sent has not started; `Started` tells when it does."""

    key: int


class Started(NamedTuple):
    """The handler of a job that waited has started."""

    key: int


class Progress(NamedTuple):
    """The handler is active; `value` is its progress as JSON text, or None."""

    key: int
    value: str | None


class CursorAt(NamedTuple):
    """So many items of a cursor of the handler are done; see `steps.steps`."""

    key: int
    name: str
    step_key: str
    position: int


class Log(NamedTuple):
    """A log record of the app. `printed`: the worker prints it, as the executor does not.

    `fields`: what the app gave as `extra`, as JSON values. `stream`: the text was printed, on
    `stdout` or `stderr`, and the worker prints it as JSON.
    """

    key: int | None
    level: int
    name: str
    text: str
    printed: bool
    fields: JsonDict | None = None
    stream: str = ""


class Model(NamedTuple):
    """The model that is loaded now, and the one that is being loaded. Times in seconds."""

    current: str | None
    loading: str | None
    load_s: float
    held_s: float
    vram_gb: float


class ModelDone(NamedTuple):
    """A `Load` or `Unload` has ended; the error that it raised, or None. A `Model` came before."""

    error: str | None


class Event(NamedTuple):
    """An event for the history of a node: `model_load_start` or `model_load_done`."""

    key: int
    type: str
    elapsed_s: float | None


class Ask(NamedTuple):
    """The handler needs `rows`, `out_dir` or `context`, and waits for the `Answer`.

    With a `request`, for `engine.job_steps.answer`, it is about a step; `what` then numbers it.
    """

    key: int
    what: str
    request: JsonDict | None = None


class Outcome(NamedTuple):
    """How a handler ended; `outcome_of` makes an `engine.outcomes.Outcome` of it."""

    key: int
    kind: str
    seconds: float
    result: str
    error: str
    detail: str | None
    resolved_inputs: str | None
    rss_mb: int | None
    names: list[str]
    wish: str
    after_s: float | None
    task: dict[str, Any] | None
    cursors: list[Any]
    ended: float = 0.0
    """When the handler ended (`clock.boot_s`); 0.0 if unknown."""


class Recalled(NamedTuple):
    """The jobs that a `Recall` sent back. Their handlers never started."""

    keys: list[int]


class Announced(NamedTuple):
    """The hook of an `Announce` has ended; its errors are logged."""

    key: int


class Loaded(NamedTuple):
    """The app is loaded, and this is what it registered; or the error that it raised."""

    registered: dict[str, Any] | None
    error: dict[str, Any] | None


class Fork(NamedTuple):
    """Fork an executor with the four descriptors that come along.

    `concurrent`: it runs many async handlers at once. `batched`: several jobs wait in it. What
    their handlers print then comes as `Log` messages, since the pipes do not tell whose it is.
    """

    number: int
    concurrent: bool
    batched: bool


class Hold(NamedTuple):
    """Kill all executors at this time (`clock.boot_s`) unless another `Hold` comes before."""

    until: float | None


class Forked(NamedTuple):
    """The reply to `Fork`, with a pidfd where the system has them; or why there is no executor."""

    number: int
    pid: int
    error: str | None


class Died(NamedTuple):
    """The exact end of an executor. `max_rss_mb`: the peak since its last job began.

    `by_deadline`: the launcher killed it since the worker was silent. `oom_kills`: how many of its
    processes the kernel killed for memory, if it had a cgroup of its own.
    """

    pid: int
    code: int | None
    signal: int | None
    core: bool
    max_rss_mb: int
    user_s: float
    system_s: float
    by_deadline: bool
    oom_kills: int | None = None


Message: TypeAlias = (
    Run | Announce | Forget | Answer | Load | Unload | Quit | Cancel | Recall | Waits | Started
    | Progress | CursorAt | Log | Model | ModelDone | Event | Ask | Outcome | Recalled | Announced
    | Loaded | Fork | Hold | Forked | Died
)  # fmt: skip
KINDS: Final[dict[str, type[Message]]] = {
    kind.__name__: kind
    for kind in (
        Run, Announce, Forget, Answer, Load, Unload, Quit, Cancel, Recall, Waits, Started, Progress,
        CursorAt, Log, Model, ModelDone, Event, Ask, Outcome, Recalled, Announced, Loaded, Fork,
        Hold, Forked, Died,
    )
}  # fmt: skip


def message_of(key: int, outcome: outcomes.Outcome) -> Outcome:
    """Return an outcome as a message; its value stays behind."""
    raised = outcome.raised
    return Outcome(
        key, outcome.kind, outcome.seconds, outcome.result, outcome.error, outcome.detail,
        outcome.resolved_inputs, outcome.vm_rss_mb_peak, sorted(raised.names), raised.wish,
        raised.after_s, None if outcome.task is None else dict(outcome.task),
        [list(each) for each in outcome.cursors], clock.boot_s(),
    )  # fmt: skip


def outcome_of(message: Outcome) -> outcomes.Outcome:
    """Return the outcome that a message carries, without its value."""
    return outcomes.Outcome(
        message.kind, message.seconds, message.result, message.error, message.detail,
        resolved_inputs=message.resolved_inputs, vm_rss_mb_peak=message.rss_mb,
        raised=policy.Raised(frozenset(message.names), message.wish, message.after_s),
        task=message.task, cursors=tuple((name, key, at) for name, key, at in message.cursors),
    )  # fmt: skip
