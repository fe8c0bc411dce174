"""Start, signal and read the console scripts as real processes, and end them after the test."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from tests.support import constants, fork_server
from tests.support.wait import patience, until

ROOT = Path(__file__).parents[2]
TOYHOST = "tests.support.toy_app:setup"
_MARK = "QW_TEST_COMMAND"


def script(name: str) -> str:
    """Return the path of an installed console script."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def _process(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path, files: Sequence[int]
) -> subprocess.Popen[bytes] | fork_server.Process:
    """Start a console script: fork it, which saves its imports, or execute it."""
    server = fork_server.shared()
    if server is not None and server.can(argv, env):
        env = constants.for_children(env)
        return server.start(*argv, env=env, cwd=cwd, files=files, finalize=True)
    return subprocess.Popen(
        [script(argv[0]), *argv[1:]],
        cwd=cwd,
        env=constants.for_children(env),
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        start_new_session=True,
    )


class Command:
    """A running command; what it prints is in files, so that no pipe blocks it or its children."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        terminal: int | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.mark = secrets.token_hex(8)
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        env = {**os.environ, **env, _MARK: self.mark}
        with Path(os.devnull).open("rb") as none:
            files = [none.fileno(), self._out.fileno(), self._err.fileno()]
            files = files if terminal is None else [terminal] * 3
            self.process = _process(argv, env, cwd, files)

    @property
    def out(self) -> str:
        return os.pread(self._out.fileno(), 1 << 24, 0).decode()

    @property
    def err(self) -> str:
        return os.pread(self._err.fileno(), 1 << 24, 0).decode()

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def catches(self, signum: signal.Signals) -> bool:
        """Return whether it has a signal handler of its own; False once it has ended."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Return its exit code; the message of a timeout has what it printed."""
        try:
            return self.process.wait(patience(timeout_s))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{self.out}\n{self.err}") from None

    def family(self) -> dict[int, str]:
        """Return every live process that this command started, by pid, with its command line."""
        return families([self])[0]

    def pids(self, part: str) -> list[int]:
        """Return the pids of those processes whose command line has this part, without wrappers."""
        return without_wrappers(self.family(), part)

    def close(self) -> None:
        """Reap it, and close its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self._out.close()
        self._err.close()


def families(started: Sequence[Command]) -> list[dict[int, str]]:
    """Return for each command every live process that it started, with its command line."""
    found = {f"{_MARK}={each.mark}".encode(): dict[int, str]() for each in started}
    mark, length = f"{_MARK}=".encode(), max(map(len, found), default=0)
    with os.scandir("/proc") as folders:
        pids = [folder.name for folder in folders if folder.name.isdecimal()]
    for pid in pids:
        with contextlib.suppress(OSError):
            variables = _read(f"/proc/{pid}/environ")
            start = variables.find(mark)
            family = found.get(variables[start : start + length]) if start >= 0 else None
            if family is not None:
                line = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode()
                family[int(pid)] = line.strip()
    return [*found.values()]


def without_wrappers(family: Mapping[int, str], part: str) -> list[int]:
    """Return the pids of those whose command line has this part."""
    return sorted(
        pid
        for pid, line in family.items()
        if part in line and "-ISc" not in line and not line.startswith("/bin/sh")
    )


def _read(path: str) -> bytes:
    """Return what is in a file; `Path` takes twice the time, which tests spend every 0.01 s."""
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = [os.read(fd, 1 << 18)]
        while parts[-1]:
            parts.append(os.read(fd, 1 << 18))
        return b"".join(parts)
    finally:
        os.close(fd)


class Commands:
    """Starts commands with an environment of its own, and ends what a test left running."""

    def __init__(self, **env: str) -> None:
        self.env = env
        self._started: list[Command] = []

    def start(
        self, *argv: str, terminal: int | None = None, cwd: Path = ROOT, **env: str
    ) -> Command:
        """Start it and go on; `terminal`: the descriptor that all three of its streams are."""
        started = Command(argv, {**self.env, **env}, terminal=terminal, cwd=cwd)
        self._started.append(started)
        return started

    def run(self, *argv: str, timeout_s: float = 30.0, cwd: Path = ROOT, **env: str) -> Command:
        """Start it and wait for its end; its process's `returncode` is set."""
        done = self.start(*argv, cwd=cwd, **env)
        done.wait(timeout_s)
        return done

    def close(self) -> None:
        """Kill what is left of any of them."""
        for pid in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for started in self._started:
            started.close()
        until(lambda: not self._left())

    def _left(self) -> list[int]:
        return [pid for family in families(self._started) for pid in family]


@contextlib.contextmanager
def commands(**env: str) -> Generator[Commands]:
    """Yield `Commands` for a `with` block."""
    made = Commands(**env)
    try:
        yield made
    finally:
        made.close()


def refused(done: Command) -> str:
    """Return the line with which a command refused its input: exit code 2, no traceback."""
    assert done.process.returncode == 2, f"{done.process.returncode}\n{done.out}\n{done.err}"
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    return lines[0]
