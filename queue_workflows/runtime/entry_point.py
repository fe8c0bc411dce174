"""Run the main function of a command with logging, exit codes, and masked secrets in both."""

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
from queue_workflows.runtime import display
from queue_workflows.runtime.masking import mask

if TYPE_CHECKING:
    from argparse import ArgumentParser

Explain: TypeAlias = "Callable[[Exception], errors.QueueWorkflowsError | None]"
"""Converts a foreign error that it recognizes to an error of this package, else returns None."""

LOG_LEVELS = ("debug", "info", "warning", "error")
USAGE_ERROR = 2
INTERRUPTED = 130
MESSAGE_CHARACTERS = 8000
"""Length of an error's line, since an error may contain an id of any length."""

logger = logging.getLogger(__name__)
_explanations: list[Explain] = []


class MaskSecrets(logging.Filter):
    """Mask secrets in, and escape, the message and traceback of a log record.

    It belongs to handlers: a logger's filter does not see the records of child loggers. A line end
    in an argument becomes `\n`. Every line after a record's first is indented, so that no text of a
    row can look like a record of its own.
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
    """An argument of a log message, escaped when it is formatted."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return display.line(str(self._value), None)

    def __repr__(self) -> str:
        return display.line(repr(self._value), None)


def _safe_arguments(given: Any) -> Any:
    """Return the arguments of a record, escaped; numbers stay, since `%d` accepts nothing else."""
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
    """Flush stdout and stderr after each line, also when it is a pipe or a file."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def setup_logging(level: str = "info") -> None:
    """Log to stderr in UTC, masked; do nothing if the root logger already has a handler."""
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
    """Add `--app`, `--embedded`, `--debug` and `--log-level`, which every role script takes."""
    parser.add_argument(
        "--app", metavar="MODULE[:CALLABLE]", help="the app (or env QUEUE_WORKFLOWS_APP)"
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
    """Add a function that converts foreign errors which leave a command."""
    _explanations.append(explain)


def run_main(prog: str, command: Callable[[], int], *, debug: bool = False) -> int:
    """Run a command and return its exit code: 2 for an error of ours, 130 for Ctrl-C, 1 otherwise.

    An error of ours, or one that `explain_by` converts, is one line on stderr; `debug` or the
    setting DEBUG adds the traceback. If nobody reads the output: 1, silently. If it cannot be
    written: 1 and a line. Any other exception is logged with its traceback. SystemExit passes.
    """
    _open_streams()
    try:
        code = command()
        sys.stdout.flush()
    except errors.QueueWorkflowsError as error:
        return _refuse(prog, error, debug=debug)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and (lost := lost_output(error)):
            if not isinstance(lost, BrokenPipeError):
                _write_error(f"{prog}: what it prints cannot be written: {lost.strerror}\n")
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
        _write_error(display.block("".join(trace)))
    message = " ".join(str(error).split()) or type(error).__name__
    _write_error(f"{prog}: {display.line(message, MESSAGE_CHARACTERS)}\n")
    if isinstance(error, errors.AppFailed) and error.__cause__ is not None:
        _write_error("".join(traceback.format_tb(error.__cause__.__traceback__)))
    return USAGE_ERROR


def _write_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(mask(text))
        sys.stderr.flush()


def _open_streams() -> None:
    """Open closed standard streams on /dev/null, so that no other file gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115, PTH123
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def lost_output(error: OSError) -> OSError | None:
    """Return why stdout or stderr can no longer be written, or None if both can.

    What a broken stream still holds is dropped, or the flush at exit would fail too.
    """
    lost = error if isinstance(error, BrokenPipeError) else None
    for stream in (sys.stdout, sys.stderr):
        try:
            if error.errno == errno.ENOSPC and stream is sys.stdout:
                # After the failure its buffer may be empty, so a flush would find no fault.
                stream.write("\n")
            stream.flush()
        except OSError as refused:
            lost = refused
            with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nothing:  # noqa: PTH123
                os.dup2(nothing.fileno(), stream.fileno())
    return lost
