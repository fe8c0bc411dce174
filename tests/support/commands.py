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

from tests.support.wait import until

ROOT = Path(__file__).parents[2]
TOYHOST = "tests.support.toy_app:setup"
_MARK = "QW_TEST_COMMAND"


def script(name: str) -> str:
    """Return the path of an installed console script."""
    return str(Path(sysconfig.get_path("scripts")) / name)


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
        self.process = subprocess.Popen(
            [script(argv[0]), *argv[1:]],
            cwd=cwd,
            env={**os.environ, **env, _MARK: self.mark},
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=self._out if terminal is None else terminal,
            stderr=self._err if terminal is None else terminal,
            start_new_session=True,
        )

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
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{self.out}\n{self.err}") from None

    def family(self) -> dict[int, str]:
        """Return every live process that this command started, by pid, with its command line."""
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = line.strip()
        return found

    def pids(self, part: str) -> list[int]:
        """Return the pids of those processes whose command line has this part, without wrappers."""
        return sorted(
            pid
            for pid, line in self.family().items()
            if part in line and "-ISc" not in line and not line.startswith("/bin/sh")
        )

    def close(self) -> list[str]:
        """Kill what is left of it; what that was."""
        left = self.family()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        until(lambda: not self.family())
        self._out.close()
        self._err.close()
        return list(left.values())


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
        for started in self._started:
            started.close()


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
