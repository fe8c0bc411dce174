"""Fork console scripts from a process that has imported the engine once.

What it forks is a process of its own, which lives and dies as a console script does: it has the
script's arguments, environment, streams, folder, name and exit code. It only imports nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_COMMANDS = (
    f"queue_workflows.cli.{path.stem}" for path in (ROOT / "queue_workflows/cli").glob("*.py")
)
SCRIPTS = Path(sysconfig.get_path("scripts"))
ROLES = (
    "psycopg_pool",
    "queue_workflows.claim_worker",
    "queue_workflows.orchestrator",
    "queue_workflows.scheduler",
    "queue_workflows.worker_control",
)
MODULES = (
    *ROLES,
    "queue_workflows.__main__",
    *_COMMANDS,
    "queue_workflows.service.application",
    "queue_workflows.service.server",
    # What typer imports when a command starts.
    "pydantic.fields",
    "pydantic.json_schema",
    "pydantic.type_adapter",
    "pydantic.types",
)
BEFORE = "QW_TEST_BEFORE_MAIN"
"""Names a function, as `module:function`, that the fork calls before the script."""
_ROOM = "QW_TEST_ROOM"
_ROOM_BYTES = 65536
"""So long may a script's arguments and its environment be; both are written over those of the
server, because other processes read them in /proc."""
_AT_START = re.compile(
    r"PYTHON|LD_|LC_|LANG|TZ$|MALLOC_|COVERAGE|COV_|TYPER|_TYPER|FORCE_COLOR|NO_COLOR|PY_COLORS"
    r"|TERMINAL_WIDTH|GITHUB_ACTIONS|PSYCOPG|OPENSSL|SSL_"
)
"""Variables that a process reads when it starts or imports, so that a fork cannot obey them."""


class _Request(NamedTuple):
    """What the server is asked for: a script to start, or the end of one."""

    argv: Sequence[str] = ()
    env: Mapping[str, str] = {}
    cwd: str = ""
    finalize: bool = True
    pid: int = 0


def serve(end: socket.socket) -> None:
    """Answer requests: fork a script, or report how one ended. Ends with the other side."""
    for name in sys.argv[3:]:
        importlib.import_module(name)
    mains = _scripts()
    gc.collect()
    gc.freeze()
    alive: set[int] = set()
    while got := _receive(end):
        request, files = got
        if request.pid:
            pid, status = os.waitpid(request.pid, os.WNOHANG)
            alive.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            end.close()
            _become(request, files)
            if name := request.env.get(BEFORE):
                metadata.EntryPoint(BEFORE, name, "").load()()
            code = _exit_code(mains[request.argv[0]].load())
            if request.finalize:
                _end_as_the_interpreter_does(code)
            # What the interpreter does at its end costs 0.1 s, and nothing of the engine.
            os._exit(code)
        else:
            alive.add(answer)
            for fd in files:
                os.close(fd)
        end.sendall(json.dumps(answer).encode())
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _exit_code(script: Callable[[], int]) -> int:
    """Return what the script returns, or exits with."""
    try:
        return script()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        raise


def _end_as_the_interpreter_does(code: int) -> None:
    """End this process; skip the tear-down of the modules where no other thread can disturb it.

    The tear-down takes half of a short command's time, as it writes to all memory that the fork
    shares.
    """
    if threading.active_count() == 1:
        atexit._run_exitfuncs()
        # Where this fails, the interpreter reports it and changes the exit code.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)


@functools.cache
def _scripts() -> dict[str, metadata.EntryPoint]:
    found = metadata.entry_points(group="console_scripts")
    return {
        entry.name: entry
        for entry in found
        if entry.dist and entry.dist.metadata["Name"] == "queue_workflows"
    }


def _receive(end: socket.socket) -> tuple[_Request, list[int]] | None:
    text, files, _, _ = socket.recv_fds(end, 4 * _ROOM_BYTES, 3)
    return (_Request(**json.loads(text)), files) if text else None


def _become(request: _Request, files: Sequence[int]) -> None:
    """Make this forked process what the script's own would be before its first line."""
    os.setsid()
    os.chdir(request.cwd)
    for stream, fd in enumerate(files):
        os.dup2(fd, stream)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.env)
    _forget_tests()
    path = str(SCRIPTS / request.argv[0])
    sys.argv = [path, *request.argv[1:]]
    sys.path[0] = os.path.dirname(os.path.realpath(path))  # noqa: PTH120  as the interpreter does
    sys.modules["__main__"].__file__ = path
    _show([sys.executable, *sys.argv], [f"{name}={text}" for name, text in request.env.items()])
    Path("/proc/self/comm").write_bytes(request.argv[0].encode()[:15])
    sys.stdin = sys.__stdin__ = _stream(0, sys.stdin)
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout)
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr)


def _forget_tests() -> None:
    """Let an app that is in a module of the tests be found only where the script would find it."""
    if not any(name.startswith("tests.") for name in sys.argv[3:]):
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]


def _show(arguments: Sequence[str], variables: Sequence[str]) -> None:
    """Show the arguments and variables in /proc, for this process and for what it forks."""
    # After the name of the command, which may have a blank and a bracket in it.
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    where = [int(field) for field in fields[45:49]]
    for texts, start, end in ((arguments, *where[:2]), (variables, *where[2:])):
        block = b"".join(os.fsencode(text) + b"\0" for text in texts).ljust(end - start, b"\0")
        assert len(block) == end - start, "more than there is room for"
        ctypes.memmove(start, block, len(block))


def _stream(fd: int, like: Any) -> io.TextIOWrapper:
    """Return the text stream that the interpreter makes of this descriptor when it starts."""
    through = like.write_through  # of an interpreter that buffers no output
    mode, buffering = ("wb", 0 if through else -1) if fd else ("rb", -1)
    raw = open(fd, mode, buffering=buffering, closefd=False)  # noqa: SIM115
    lines = not through and (fd == 2 or os.isatty(fd))
    return io.TextIOWrapper(
        raw, like.encoding, like.errors, line_buffering=lines, write_through=through
    )


class Process:
    """A forked script, with what tests use of a `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Return its exit code, minus the signal that killed it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(_Request(pid=self.pid))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code; raise `subprocess.TimeoutExpired` while it runs."""
        if (code := self.poll()) is not None:
            return code
        end = os.pidfd_open(self.pid)
        try:
            over, _, _ = select.select([end], [], [], timeout)
        finally:
            os.close(end)
        code = self.poll() if over else None
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, signum: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Role:
    """A role's process, whose output is in a file."""

    def __init__(self, process: Process, log: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log

    def ended(self) -> int | None:
        """Return its exit code, minus the signal that killed it; None while it runs."""
        return self._process.poll()

    def stop(self) -> int:
        """Send SIGTERM, and return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(30.0)

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


class ForkServer:
    """Forks scripts out of a process of their own that has these modules."""

    def __init__(self, *modules: str, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        self._at_start = _read_at_start(env)
        self._lock = threading.Lock()
        self._end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self._end, other):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _ROOM_BYTES)
        with other:
            code = f"import {__name__} as own; own.main()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(other.fileno()), " " * _ROOM_BYTES, *modules],
                cwd=ROOT,
                env={**env, _ROOM: " " * _ROOM_BYTES},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )

    def ask(self, request: _Request, files: Sequence[int] = ()) -> Any:
        text = json.dumps(request._asdict()).encode()
        with self._lock:
            socket.send_fds(self._end, [text], files)
            return json.loads(self._end.recv(64))

    def can(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether it is a script of ours, and a fork what its own process would be."""
        return argv[0] in _scripts() and _read_at_start(env) == self._at_start

    def start(
        self, *argv: str, env: Mapping[str, str], cwd: Path, files: Sequence[int], finalize: bool
    ) -> Process:
        """Start a console script with these three streams."""
        request = _Request(argv, dict(env), str(cwd), finalize)
        return Process(self, self.ask(request, files))

    def role(self, *argv: str, env: Mapping[str, str], log: Path) -> Role:
        """Start a role's console script in this environment, with its output in `log`."""
        with log.open("ab") as out, Path(os.devnull).open("rb") as none:
            files = [none.fileno(), out.fileno(), out.fileno()]
            return Role(self.start(*argv, env=env, cwd=ROOT, files=files, finalize=False), log)

    def close(self) -> None:
        """End it with every script that still runs."""
        self._end.close()
        assert self._process.wait(30) == 0


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in env.items() if _AT_START.match(name)}


def main() -> None:
    """Serve on the descriptor that the first argument names."""
    with socket.socket(fileno=int(sys.argv[1])) as end:
        os.environ.pop(_ROOM)
        serve(end)


@contextlib.contextmanager
def started(*modules: str, env: Mapping[str, str] | None = None) -> Generator[ForkServer]:
    """Yield a `ForkServer` for a `with` block, by default with this process's environment."""
    made = ForkServer(*modules, env=env)
    try:
        yield made
    finally:
        made.close()


@functools.cache
def shared() -> ForkServer | None:
    """Return this process's server, which lives as long as it; None where scripts are executed."""
    if sys.platform != "linux":
        return None
    made = ForkServer(*MODULES)
    atexit.register(made.close)
    return made
