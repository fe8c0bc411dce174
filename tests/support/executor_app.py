"""Define an app for the tests of executors: handlers of every kind, and hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import queue_workflows
from queue_workflows import config, errors, steps, tasks

log = logging.getLogger("some_app")


def add(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"sum": args["a"] + args["b"], "reason": reason}


def counting(reason: str, args: dict[str, Any]) -> Generator[Any, None, Any]:
    for number in range(args["to"]):
        yield {"step": number}
    return {"steps": args["to"]}


async def coroutine(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"async": args["a"]}


async def stream(reason: str, args: dict[str, Any]) -> AsyncGenerator[Any, None]:
    for number in range(3):
        yield number / 3
    queue_workflows.current_job().set_result({"streamed": 3})


def endless(reason: str) -> Generator[Any, None, None]:
    while True:
        yield None
        time.sleep(0.001)


async def endless_await(reason: str) -> None:
    await asyncio.sleep(3600)


_meeting: list[asyncio.Event] = []


async def meets(reason: str, args: dict[str, Any]) -> dict[str, Any]:
    """End once as many as `args["all"]` of these run at once."""
    _meeting.append(asyncio.Event())
    if len(_meeting) == args["all"]:
        for each in _meeting:
            each.set()
    log.warning("waits")
    await _meeting[args["n"]].wait()
    return {"met": len(_meeting)}


def until_cancelled(reason: str) -> None:
    job = queue_workflows.current_job()
    job.report("first")
    job.report("started")
    while not job.cancel_requested:
        time.sleep(0.001)


def prints_and_waits(reason: str) -> None:
    print("it waits", flush=True)
    until_cancelled(reason)


def leaves_a_question(reason: str) -> None:
    """Leave a thread behind that waits for the answer to a question about a step."""
    asks = contextvars.copy_context().run
    threading.Thread(target=asks, args=(steps.step, "a step", str), daemon=True).start()
    until_cancelled(reason)


def fails(reason: str) -> None:
    raise ValueError("no \x00 such thing")


def retries(reason: str) -> None:
    raise errors.Retry(7)


def snoozes(reason: str) -> None:
    raise errors.Snooze(9)


def job_facts(reason: str) -> dict[str, Any]:
    job = queue_workflows.current_job()
    return {"id": job.id, "claim": job.claim, "attempt": job.attempt, "pid": os.getpid()}


def prints(reason: str, args: dict[str, Any]) -> None:
    print("on stdout", args["n"])
    print("on stderr", args["n"], file=sys.stderr)
    os.system("echo from a child")
    sys.stdout.write("without an end")


def prints_much(reason: str, args: dict[str, Any]) -> None:
    line = b"x" * 99 + b"\n"
    for _ in range(args["mb"] * 10):
        os.write(1, line * 1000)
    os.write(2, b"the last line\n")


def logs(reason: str) -> None:
    log.debug("a detail")
    log.warning("a %s", "warning")
    with contextlib.suppress(ValueError):
        raise ValueError("inside")
    try:
        raise ValueError("shown")
    except ValueError:
        log.exception("it failed")


def prints_and_logs(reason: str, args: dict[str, Any]) -> None:
    print("prints", args["n"])
    log.warning("logs %d", args["n"])
    Path(args["folder"], str(args["n"])).touch()


def takes_memory(reason: str, args: dict[str, Any]) -> None:
    data = bytearray(args["mb"] << 20)
    data[::4096] = b"x" * len(data[::4096])
    if args.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)


# Hostile ones.


def holds_gil(reason: str, args: dict[str, Any]) -> str:
    ctypes.PyDLL(None).usleep(int(args["s"] * 1e6))
    return "done"


def evil_regex(reason: str) -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")


def segfaults(reason: str) -> None:
    print("about to fall", flush=True)
    ctypes.string_at(0)


def exits(reason: str) -> None:
    os._exit(3)


def sys_exits(reason: str) -> None:
    sys.exit("enough")


def interrupts(reason: str) -> None:
    raise KeyboardInterrupt


def closes_everything(reason: str, args: dict[str, Any]) -> None:
    os.closerange(0, 4096)
    time.sleep(args["s"])


def closes_some(reason: str) -> None:
    """Close descriptors as libraries do that start daemons."""
    os.closerange(3, 150)


def reporting_child(reason: str) -> int:
    """Return the exit code of a forked child that reports progress."""
    pid = os.fork()
    if not pid:
        code = 4
        try:
            queue_workflows.current_job().report(0.5)
            code = 5
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def writes_garbage(reason: str) -> None:
    for fd in range(4096):
        with contextlib.suppress(OSError):
            os.write(fd, b"garbage \x00\xff everywhere\n")


def forks_children(reason: str, args: dict[str, Any]) -> int:
    """Leave a child behind that returns from the handler as its parent does."""
    pid = os.fork()
    if not pid:
        if args.get("returns"):
            return 0
        signal.pause()
    return pid


def leaves_a_printing_child(reason: str) -> int:
    """Leave a child behind that prints as fast as it can until it is killed."""
    pid = os.fork()
    if not pid:
        while True:
            os.write(1, b"x" * 4095 + b"\n")
    return pid


def terminates_child(reason: str) -> int:
    """Return the signal that ended a forked child to which SIGTERM was sent."""
    pid = os.fork()
    if not pid:
        signal.pause()
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ignores_sigterm(reason: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    queue_workflows.current_job().report("deaf")
    while True:
        signal.pause()


def replaces_json(reason: str) -> dict[str, Any]:
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("not your json")

    for name in ("dumps", "loads", "dump", "load"):
        setattr(json, name, broken)
    json.JSONEncoder.encode = json.JSONEncoder.iterencode = broken  # type: ignore[method-assign]
    json.JSONEncoder.default = broken  # type: ignore[method-assign]
    json.JSONDecoder.decode = json.JSONDecoder.raw_decode = broken  # type: ignore[method-assign]
    return {"replaced": True}


def alarms(reason: str, args: dict[str, Any]) -> int:
    """Let a signal handler raise `n` exceptions in quick succession, in what logs and sends."""
    raised = 0

    def alarm(_: int, frame: FrameType | None) -> None:
        # Not in this function: an exception outside of its `try` would end it.
        if frame is not None and frame.f_code.co_filename != __file__:
            raise TimeoutError("alarm")

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    while raised < args["n"]:
        try:
            log.warning("x" * 1000)
        except TimeoutError:
            raised += 1
    signal.setitimer(signal.ITIMER_REAL, 0, 0)
    return raised


def alarm_later(reason: str, args: dict[str, Any]) -> None:
    """Leave an alarm behind, which raises about when the job ends."""

    def alarm(*_: object) -> None:
        raise TimeoutError("too late")

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, args["s"])


def logs_from_threads(reason: str, args: dict[str, Any]) -> int:
    def many() -> None:
        for number in range(args["n"]):
            log.warning("line %d", number)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return 4 * args["n"]


TASKS = (
    add, meets, closes_some, reporting_child, counting, coroutine,
    stream, endless, endless_await, until_cancelled, fails, retries,
    snoozes, job_facts, prints, prints_and_logs, prints_much, logs, takes_memory, holds_gil,
    evil_regex, segfaults, exits, sys_exits, interrupts, closes_everything, writes_garbage,
    forks_children, leaves_a_printing_child, terminates_child, ignores_sigterm, replaces_json,
    alarms, alarm_later, prints_and_waits, leaves_a_question,
    logs_from_threads,
)  # fmt: skip


def load() -> None:
    """Register all tasks, and the nodes."""
    for task in TASKS:
        tasks.register_ingest_task(task.__name__, task, queue="load")
    config.register_node("echo", lambda inputs: {"got": inputs})
    config.register_node("sums", lambda a, b=2: {"sum": a + b})
    config.register_node("folders", lambda out, scratch: {"out": str(out), "s": scratch.is_dir()})
    config.register_node("fails", fails)
    config.register_node("takes_memory", lambda mb: takes_memory("", {"mb": mb}))
    config.register_node("cancelled", _until_event)
    config.register_node("modelled", lambda model_handle: {"handle": model_handle})
    config.register_node("looks_up", _looks_up)
    config.register_node("reports", _reports)
    config.set_node_resolver(_resolve)


def _resolve(name: str) -> Any:
    """Find no node; for one of them an alarm ends the wait for what the error's text needs."""
    if name == "alarmed":

        def alarm(*_: object) -> None:
            raise TimeoutError("no answer")

        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    raise errors.NodeNotFound(name)


def _looks_up() -> None:
    raise errors.NodeNotFound("a node of a graph of the app's own")


def _until_event(cancel_event: threading.Event) -> dict[str, Any]:
    cancel_event.wait(60)
    return {"set": cancel_event.is_set()}


def _reports(status_callback: Any) -> None:
    status_callback(0.5)
    status_callback(phase="two")
