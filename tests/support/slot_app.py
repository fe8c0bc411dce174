"""Define an app for workers with slots: `--app tests.support.slot_app:setup`."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import psycopg.types.string

import queue_workflows
from queue_workflows import worker_control
from tests.support import memory_reports

log = logging.getLogger("some_app")
QUEUE = "work"
LONG_S = 300.0
CHUNK = 1 << 20


def begins(folder: str) -> bool:
    """Add a line to the folder's journal; return whether it is the first one."""
    path = Path(folder, "starts")
    with path.open("a", encoding="ascii") as starts:
        starts.write(f"{os.getpid()}\n")
    return len(starts_of(folder)) == 1


def starts_of(folder: str | Path) -> list[int]:
    """The pids in which the handler of this folder has begun."""
    path = Path(folder, "starts")
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def _until_go(folder: str) -> None:
    ends = time.monotonic() + LONG_S
    while time.monotonic() < ends and not Path(folder, "go").exists():
        time.sleep(0.01)


def quick(*, number: int) -> dict[str, Any]:
    return {"number": number, "pid": os.getpid()}


async def async_quick(*, number: int) -> dict[str, Any]:
    return {"number": number, "pid": os.getpid()}


def waits(*, folder: str) -> dict[str, Any]:
    """Ends when the file `go` is there."""
    begins(folder)
    _until_go(folder)
    return {"pid": os.getpid()}


def starts(*, folder: str) -> dict[str, Any]:
    """Ends at once."""
    begins(folder)
    return {}


def waits_once(*, folder: str) -> dict[str, Any]:
    """Does not end at its first start, and ends at once later."""
    if begins(folder):
        time.sleep(LONG_S)
    return {"pid": os.getpid()}


def ticks_once(*, folder: str) -> dict[str, Any]:
    """Touches the file `tick` for as long as it lives; ends at once when started again."""
    if begins(folder):
        ends = time.monotonic() + LONG_S
        while time.monotonic() < ends:
            Path(folder, "tick").touch()
            time.sleep(0.002)
    return {"pid": os.getpid()}


def says(*, folder: str) -> Generator[float, None, dict[str, Any]]:
    """Prints, reports, and ends at a yield."""
    begins(folder)
    print("hello from the handler", flush=True)
    try:
        while not Path(folder, "go").exists():
            yield 0.5
            time.sleep(0.02)
    finally:
        Path(folder, "tidied").touch()
    return {}


def tidies_late(*, folder: str) -> Generator[float, None, dict[str, Any]]:
    """Ends at a yield when it is cancelled, and not before the file `go` is there."""
    begins(folder)
    try:
        while True:
            yield 0.5
            time.sleep(0.02)
    finally:
        while not Path(folder, "go").exists():
            time.sleep(0.02)


def fails(*, folder: str) -> NoReturn:
    begins(folder)
    raise ValueError("as it was asked to")


def fails_late(*, folder: str) -> NoReturn:
    """Fails when the file `go` is there."""
    waits(folder=folder)
    raise ValueError("as it was asked to")


def answers(*, text: str) -> dict[str, Any]:
    return {"text": text}


def refuses(*, text: str) -> NoReturn:
    """Fail with a text that no argument has."""
    raise ValueError(f"{text} in \N{EURO SIGN}")


def holds_gil(*, folder: str, seconds: float) -> dict[str, Any]:
    begins(folder)
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:  # a signal ends the call
        ctypes.PyDLL(None).usleep(int(left * 1e6))
    return {"pid": os.getpid()}


def segfaults(*, folder: str) -> None:
    begins(folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("last words", flush=True)
    ctypes.string_at(0)


def exits_at_once(*, folder: str) -> None:
    begins(folder)
    os._exit(3)


def exits(*, folder: str) -> NoReturn:
    begins(folder)
    sys.exit("enough")


def interrupts(*, folder: str) -> NoReturn:
    begins(folder)
    raise KeyboardInterrupt


def closes_all(*, folder: str) -> None:
    begins(folder)
    os.closerange(0, 4096)
    time.sleep(LONG_S)


def kills_itself(*, folder: str) -> None:
    begins(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_child(*, folder: str) -> None:
    """Dies, and leaves a process behind that would live on."""
    begins(folder)
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG_S})"])
    Path(folder, "child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


PRINTER = """
import pathlib, sys, time
folder, ends = pathlib.Path(sys.argv[1]), time.monotonic() + 60
while not (folder / "say").exists() and time.monotonic() < ends: time.sleep(0.01)
print("late", flush=True)
(folder / "said").touch()
"""


def leaves_printer(*, folder: str) -> dict[str, Any]:
    """Does not end at its first start, and leaves a process that prints when `say` is there.

    That has a session of its own, and so lives on when the executor is killed.
    """
    if begins(folder):
        subprocess.Popen([sys.executable, "-c", PRINTER, folder], start_new_session=True)
        Path(folder, "left").write_text(f"{os.getppid()} ")
        time.sleep(LONG_S)
    return {}


def logs_much(*, lines: int) -> dict[str, Any]:
    for _ in range(lines):
        log.warning("x" * 1000)
    return {}


def ignores_sigterm(*, folder: str) -> dict[str, Any]:
    """Does not end at its first start, for any request."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return waits_once(folder=folder)


def ends_at_sigterm(*, folder: str) -> dict[str, Any]:
    """Ends in good order at SIGTERM, so that its process lives on."""
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: got.append(signum))
    begins(folder)
    began = time.monotonic()
    while time.monotonic() < began + LONG_S and not got:
        time.sleep(0.01)
    # One that took less than its time limit, by its own clock, would have completed.
    time.sleep(max(0.0, began + 0.6 - time.monotonic()))
    return {"pid": os.getpid()}


def breaks_json(*, folder: str) -> dict[str, Any]:
    """Replaces what a careless engine would call."""
    begins(folder)
    json.dumps = json.loads = None  # type: ignore[assignment]  the point of the task
    return {"pid": os.getpid()}


def floods(*, folder: str, megabytes: int) -> dict[str, Any]:
    begins(folder)
    line = b"x" * (CHUNK - 1) + b"\n"
    for _ in range(megabytes):
        os.write(2, line)
    return {"megabytes": megabytes}


def grows(*, folder: str, megabytes: int) -> dict[str, Any]:
    begins(folder)
    kept = bytearray(megabytes * CHUNK)
    kept[:: resource.getpagesize()] = b"\1" * len(kept[:: resource.getpagesize()])
    return {"pid": os.getpid()}


_kept: list[bytearray] = []


def _touched(megabytes: int) -> bytearray:
    taken = bytearray(megabytes * CHUNK)
    taken[:: resource.getpagesize()] = b"\1" * len(taken[:: resource.getpagesize()])
    return taken


def holds(*, folder: str, megabytes: int) -> dict[str, Any]:
    """Takes so much memory for a moment, and ends when the file `go` is there."""
    _touched(megabytes)
    begins(folder)
    _until_go(folder)
    return {}


def fills(
    *, folder: str, percent: float, keep: bool = False, hangs: bool = False
) -> dict[str, Any]:
    """Fills the memory up to this use, and ends when the file `go` is there.

    `keep`: the memory stays in use. `hangs`: the process does not end when it should.
    """
    begins(folder)
    if hangs:
        atexit.register(time.sleep, LONG_S)
    taken = list[bytearray]()
    while memory_reports.ram_in_use() < percent:
        taken.append(_touched(4))
    _until_go(folder)
    _kept.extend(taken if keep else ())
    return {"pid": os.getpid()}


def leaks(*, megabytes: int) -> dict[str, Any]:
    """Keeps so much more memory for ever."""
    _kept.append(_touched(megabytes))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"pid": os.getpid(), "rss_mb": pages * resource.getpagesize() // CHUNK}


def node_adds(a: int, b: int = 1) -> dict[str, int]:
    return {"sum": a + b}


def node_waits(folder: str, cancel_event: Any) -> dict[str, Any]:
    """Ends when it is cancelled or may go."""
    begins(folder)
    while not cancel_event.is_set() and not Path(folder, "go").exists():
        cancel_event.wait(0.01)
    return {"cancelled": cancel_event.is_set(), "pid": os.getpid()}


def node_stops_threads(cancel_event: threading.Event) -> dict[str, Any]:
    """Uses the event of its job to end a thread of its own."""
    thread = threading.Thread(target=cancel_event.wait)
    thread.start()
    cancel_event.set()
    thread.join()
    return {"ended": True}


def node_reports(folder: str, status_callback: Callable[..., object]) -> dict[str, Any]:
    begins(folder)
    status_callback(0.25)
    _until_go(folder)
    return {}


_meetings: dict[int, asyncio.Event] = {}
_came: dict[int, int] = {}


async def _meet(everyone: int) -> None:
    """Return once so many are in here."""
    met = _meetings.setdefault(everyone, asyncio.Event())
    _came[everyone] = _came.get(everyone, 0) + 1
    if _came[everyone] == everyone:
        met.set()
    await met.wait()


async def meets(*, everyone: int, number: int) -> dict[str, Any]:
    """Ends once so many run at once; prints and logs whose job it is."""
    print(f"prints {number}", end="")
    await _meet(everyone)
    print(f" of {number}")
    log.warning("logs %d", number)
    return {"number": number, "pid": os.getpid(), "id": queue_workflows.current_job().id}


async def async_waits(*, folder: str) -> dict[str, Any]:
    """Ends when the file `go` is there, or when it is cancelled."""
    begins(folder)
    try:
        while not Path(folder, "go").exists():
            await asyncio.sleep(0.02)
    finally:
        Path(folder, "tidied").touch()
    return {"pid": os.getpid()}


async def async_waits_once(*, folder: str) -> dict[str, Any]:
    """Does not end at its first start, and ends at once later."""
    if begins(folder):
        await asyncio.sleep(LONG_S)
    return {"pid": os.getpid()}


async def async_deaf(*, folder: str) -> dict[str, Any]:
    """Does not end at its first start, also if it is cancelled."""
    first = begins(folder)
    while first:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG_S)
    return {"pid": os.getpid()}


async def async_blocks(*, folder: str) -> dict[str, Any]:
    """Blocks the event loop until the file `go` is there."""
    begins(folder)
    _until_go(folder)
    return {"pid": os.getpid()}


async def async_dies(*, folder: str, everyone: int) -> None:
    """Ends its process once so many run at once."""
    begins(folder)
    await _meet(everyone)
    os.kill(os.getpid(), signal.SIGKILL)


async def async_reports(*, folder: str) -> AsyncGenerator[Any, None]:
    """Reports 0.25, and nothing more until the file `go` is there."""
    begins(folder)
    yield 0.25
    while not Path(folder, "go").exists():
        await asyncio.sleep(0.02)


async def node_meets(number: int, everyone: int, out: Path) -> dict[str, Any]:
    """Ends once so many run at once."""
    await _meet(everyone)
    return {"number": number, "pid": os.getpid(), "out": out.is_dir()}


async def node_async(a: int) -> dict[str, int]:
    await asyncio.sleep(0)
    return {"sum": a + 1}


async def node_awaits(folder: str) -> dict[str, Any]:
    """Does not end at its first start; notes the cancel that ends it at its await."""
    if not begins(folder):
        return {"pid": os.getpid()}
    try:
        await asyncio.sleep(LONG_S)
    finally:
        await asyncio.sleep(0)
        Path(folder, "tidied").touch()
    return {}


def node_yields(folder: str) -> Generator[float, None, dict[str, Any]]:
    """Reports by what it yields, and ends at a yield."""
    begins(folder)
    try:
        while not Path(folder, "go").exists():
            yield 0.25
            time.sleep(0.02)
    finally:
        Path(folder, "tidied").touch()
    return {"pid": os.getpid()}


async def node_streams(folder: str) -> AsyncGenerator[Any, None]:
    """Reports by what it yields, and sets its result."""
    begins(folder)
    try:
        while not Path(folder, "go").exists():
            yield 0.25
            await asyncio.sleep(0.02)
    finally:
        Path(folder, "tidied").touch()
    queue_workflows.current_job().set_result({"pid": os.getpid()})


TASKS: tuple[Callable[..., Any], ...] = (
    answers, refuses, tidies_late,
    quick, starts, waits, waits_once, ticks_once, says, fails, fails_late, holds_gil, segfaults,
    exits_at_once, exits, interrupts,
    closes_all, kills_itself, leaves_child, leaves_printer, ignores_sigterm, ends_at_sigterm,
    breaks_json, floods, logs_much, grows,
    async_quick, meets, async_waits, async_waits_once, async_deaf, async_blocks, async_dies,
    async_reports, fills, leaks, holds,
)  # fmt: skip
NODES: tuple[Callable[..., Any], ...] = (
    node_adds, node_waits, node_stops_threads, node_reports, node_awaits, node_yields,
    node_streams, node_meets, node_async,
)  # fmt: skip


def _node(name: str, *, after: tuple[str, ...] = (), **inputs: Any) -> dict[str, Any]:
    return {
        "id": name, "node": "node_adds", "depends_on": list(after),
        "inputs": [{"name": key, "from": value} for key, value in inputs.items()],
    }  # fmt: skip


WIDTH = 8
PIPELINES: dict[str, list[dict[str, Any]]] = {
    "chain": [
        _node("a", a="pipeline._implicit(1)"),
        _node("b", after=("a",), a="pipeline._implicit(2)"),
        _node("c", after=("b",), a="pipeline._implicit(3)"),
    ],
    "async": [
        _node("a", a="pipeline._implicit(1)") | {"node": "node_async"},
        _node("b", after=("a",), a="pipeline._implicit(2)") | {"node": "node_async"},
    ],
    "fan": [
        _node("first", a="pipeline._implicit(0)"),
        *(_node(f"n{n}", after=("first",), a=f"pipeline._implicit({n})") for n in range(WIDTH)),
        _node("last", after=tuple(f"n{n}" for n in range(WIDTH)), a="pipeline._implicit(100)"),
    ],
}


def _workflow(name: str) -> dict[str, Any]:
    return {"name": name, "steps": [{"id": "s", "kind": "pipeline", "pipeline": name}]}


def announced(job: dict[str, Any], run: dict[str, Any], delta: dict[str, Any]) -> None:
    """Note a completed node in the folder of its run."""
    with Path(run["out_dir"], "announced").open("a", encoding="utf-8") as file:
        file.write(f"{job['node_id']} {job['status']} {delta} {os.getpid()}\n")


@contextlib.contextmanager
def around(job: dict[str, Any], run: dict[str, Any]) -> Generator[Callable[..., Any]]:
    """Add to a node's result what its rows say."""
    yield lambda delta: {**delta, "seen": [job["node_id"], run["workflow_name"]]}


def setup_hooks() -> None:
    """Do as `setup` does, with the hooks that an app may set."""
    setup()
    queue_workflows.set_on_node_completed(announced)
    queue_workflows.set_invoke_context(around)


def setup() -> None:
    """Register the tasks and nodes."""
    queue_workflows.set_workflow_provider(
        _workflow, lambda name: {"name": name, "nodes": PIPELINES[name]}
    )
    queue_workflows.configure(ingest_queues=(QUEUE,))
    for task in TASKS:
        queue_workflows.register_ingest_task(task.__name__, task)
    queue_workflows.register_ingest_task("alone", quick, isolation="process")
    for node in NODES:
        queue_workflows.register_node(node.__name__, node)


class _Refusing(psycopg.types.string.StrDumperUnknown):
    def dump(self, obj: str) -> Any:
        if "unstorable" in obj:
            raise RuntimeError("the dumper of the app cannot store it")
        return super().dump(obj)


def setup_dumper() -> None:
    """Do as `setup` does, with a dumper of texts for every connection of the process."""
    setup()
    psycopg.adapters.register_dumper(str, _Refusing)


def own_ref(value: Any, context: Mapping[str, Any]) -> Any:
    """A language of refs of the app's own: `{"$own": x}` is x, and no other dict is a ref."""
    del context
    return value["$own"] if isinstance(value, dict) and "$own" in value else value


def setup_resolver() -> None:
    """Do as `setup` does, with refs that the app resolves itself."""
    setup()
    nodes = [
        _node("a", a="pipeline._implicit(1)"),
        _node("b", after=("a",), a="pipeline._implicit(2)") | {"skip_if": {"$own": False}},
    ]
    queue_workflows.set_workflow_provider(
        _workflow, lambda name: {"name": name, "nodes": nodes}, resolve_ref=own_ref
    )


def own_policy(worker: Any, *, on_exit: Callable[[int], object]) -> None:
    """Hand the jobs back for a reason of the app's own, and leave with a code of its own."""
    worker.heartbeat.send()
    worker.requeue_inflight_for_control(f"own policy of {worker.host} in {os.getpid()}")
    on_exit(worker.host_priority + 90)
    raise AssertionError("it does not return")


def odd_policy(worker: Any, *, on_exit: Callable[[int], object]) -> None:
    """Hand the jobs back for a reason that no database stores."""
    worker.requeue_inflight_for_control("\0\udc80" * 100)


def failing_policy(worker: Any, *, on_exit: Callable[[int], object]) -> None:
    """Raise an error."""
    raise ValueError("no")


def slow_policy(worker: Any, *, on_exit: Callable[[int], object]) -> None:
    """Take too long."""
    print(f"slow policy in {os.getpid()};", file=sys.stderr, flush=True)
    time.sleep(60)


def setup_policy() -> None:
    """Do as `setup` does, with stop policies of the app's own."""
    setup()
    worker_control.STOP_POLICIES.update(
        own=own_policy, odd=odd_policy, fails=failing_policy, slow=slow_policy
    )


def setup_logs() -> None:
    """Do as `setup` does, and print the app's log records as the app likes it."""
    setup()
    log.addHandler(logging.StreamHandler(sys.stderr))
    log.propagate = False


def setup_threads() -> None:
    """Do as `setup` does, and leave a thread behind, as careless libraries do."""
    setup()
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def let_go(*folders: str | Path) -> None:
    """Let the handlers of these folders end."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            Path(folder, "go").touch()
