"""Run commands of the console in this process, which takes a hundredth of a process's time."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any, NamedTuple

from queue_workflows import cli


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def command(*argv: str) -> Done:
    """Run `queue-workflows` with these arguments."""
    out, err = _stream(), _stream()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(argv)
    return Done(code, _text(out), _text(err))


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n")


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def printed(*argv: str) -> str:
    """Run a command that succeeds; return what it prints."""
    done = command(*argv)
    assert done.code == 0, done
    return done.out


def reply(*argv: str) -> Any:
    """Run a command with `--json`; return what it prints, also if it reports a failure."""
    done = command(argv[0], "--json", *argv[1:])
    assert done.code in (0, 1), done
    return json.loads(done.out)


def refusal(*argv: str) -> str:
    """Run a command that refuses its input; return the line that says why."""
    done = command(*argv)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done
    return done.err
