"""The outermost layer of every command: logging, exit codes, and secrets kept out of both."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from queue_workflows import config, errors
from queue_workflows.runtime import display, service
from queue_workflows.runtime.masking import mask

if TYPE_CHECKING:
    from argparse import ArgumentParser

Explain: TypeAlias = "Callable[[Exception], errors.QueueWorkflowsError | None]"
"""Makes an error of ours of one that it knows, else None."""

LOG_LEVELS = ("debug", "info", "warning", "error")
USAGE_ERROR = 2
INTERRUPTED = 130
FLUSH_TIMEOUT_S = 0.5
MESSAGE_CHARACTERS = 8000
"""Length of a refusal's line. An error may contain an id of any length."""

logger = logging.getLogger(__name__)
_explanations: list[Explain] = []


class MaskSecrets(logging.Filter):
    """Masks and escapes message and traceback of a record.

    It belongs to handlers: a logger's filter does not see the records of its descendants. A line
    end in an argument becomes `\\n`. Every line after a record's first is indented, so that no
    text of a row can look like a record of its own.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.args = _safe_arguments(record.args)
        record.msg, record.args = _indented(mask(display.block(record.getMessage()))), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = "  " + _indented(mask(display.block(record.exc_text))).lstrip()
        return True


class _Argument:
    """An argument of a log message, which escapes the text that it becomes."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return display.line(str(self._value), None)

    def __repr__(self) -> str:
        return display.line(repr(self._value), None)


def _safe_arguments(given: Any) -> Any:
    """The arguments of a record; numbers stay what they are, as `%d` takes nothing else."""
    if isinstance(given, Mapping):
        members = cast("Mapping[str, object]", given)
        return {name: _safe_argument(value) for name, value in members.items()}
    if isinstance(given, tuple):
        return tuple(map(_safe_argument, cast("tuple[object, ...]", given)))
    return given


def _safe_argument(value: object) -> object:
    return value if isinstance(value, (int, float)) else _Argument(value)


def _indented(text: str) -> str:
    return re.sub(r"\n(?!  )", "\n  ", text)


def print_by_lines() -> None:
    """Write each line that handlers print at once, also to a pipe or a file."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def setup_logging(level: str = "info") -> None:
    """Log to stderr in UTC, masked; nothing when the root logger already has a handler."""
    root = logging.getLogger()
    if root.handlers:
        return
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    handler.addFilter(MaskSecrets())
    root.addHandler(handler)
    root.setLevel(level.upper())


def add_common_arguments(parser: ArgumentParser) -> None:
    """`--app`, `--embedded`, `--debug` and `--log-level`, which every role script takes."""
    parser.add_argument(
        "--app", metavar="MODULE[:CALLABLE]", help="the host app (or env QUEUE_WORKFLOWS_APP)"
    )
    parser.add_argument(
        "--embedded", action="store_true", help="without a DSN, use the embedded PostgreSQL"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of refused input")
    parser.add_argument(
        "--log-level", type=str.lower, choices=LOG_LEVELS, default="info", metavar="LEVEL",
        help=f"one of {', '.join(LOG_LEVELS)} (default: info)",
    )  # fmt: skip


def explain_by(explain: Explain) -> None:
    """Ask this for an error of ours in place of one that a command's body lets pass."""
    _explanations.append(explain)


def run_main(prog: str, body: Callable[[], int], *, debug: bool = False) -> int:
    """The body's exit code; 2 for an error of ours, 130 for Ctrl-C, 1 for any other exception.

    An error of ours, or what `explain_by` makes one, is one line on stderr; `debug` or the knob
    DEBUG adds the traceback. Output that nobody reads: 1, quietly; that cannot be written: 1 and a
    line. Any other exception is logged with its traceback. SystemExit passes.
    """
    _open_streams()
    try:
        code = body()
        sys.stdout.flush()
    except errors.QueueWorkflowsError as error:
        return _refuse(prog, error, debug=debug)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and (lost := lost_output(error)):
            if not isinstance(lost, BrokenPipeError):
                _say(f"{prog}: what it prints cannot be written: {lost.strerror}\n")
            return 1
        for explain in _explanations:
            if (ours := explain(error)) is not None:
                ours.__cause__ = error
                return _refuse(prog, ours, debug=debug)
        setup_logging()
        logger.exception("%s: unexpected error", prog)
        return 1
    return code


def _refuse(prog: str, error: errors.QueueWorkflowsError, *, debug: bool) -> int:
    if debug or config.DEBUG.read():
        trace = traceback.format_exception(type(error), error, error.__traceback__)
        _say(display.block("".join(trace)))
    message = " ".join(str(error).split()) or type(error).__name__
    _say(f"{prog}: {display.line(message, MESSAGE_CHARACTERS)}\n")
    if isinstance(error, errors.AppFailed) and error.__cause__ is not None:
        _say("".join(traceback.format_tb(error.__cause__.__traceback__)))
    return USAGE_ERROR


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(mask(text))
        sys.stderr.flush()


def _open_streams() -> None:
    """Open on nothing what was closed before the start, so that nothing else gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115, PTH123
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def lost_output(error: OSError) -> OSError | None:
    """Why stdout or stderr takes nothing more; None where neither is to blame.

    What a lost stream still holds goes nowhere, or the flush at exit would fail too.
    """
    lost = error if isinstance(error, BrokenPipeError) else None
    for stream in (sys.stdout, sys.stderr):
        try:
            if error.errno == errno.ENOSPC and stream is sys.stdout:
                # It may hold nothing of what failed, so that a flush alone would find no fault.
                stream.write("\n")
            stream.flush()
        except OSError as refused:
            lost = refused
            with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nothing:  # noqa: PTH123
                os.dup2(nothing.fileno(), stream.fileno())
    return lost


def exit_now(code: int) -> None:
    """Leave at once, without clean-up; what is printed is flushed if that takes no time.

    A full pipe that nobody reads would block the flush for ever, hence the thread and its limit.
    """
    try:
        flush = service.Pool("exit-flush", 1, lambda _: _flush())
        flush.start()
        flush.stop(FLUSH_TIMEOUT_S)
    finally:
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
