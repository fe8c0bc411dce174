"""The outermost layer of every command: logging, exit codes, and secrets kept out of both."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable

from queue_workflows import config, errors
from queue_workflows.runtime import service

LOG_LEVELS = ("debug", "info", "warning", "error")
USAGE_ERROR = 2
INTERRUPTED = 130
FLUSH_TIMEOUT_S = 0.5

_URL_PASSWORD = re.compile(r"(://[^\s:/@]*:)\S+(?=@)")
_KEY_PASSWORD = re.compile(r"(password[\"']?\s*[=:]\s*)('(?:[^'\\]|\\.)*'|\"[^\"]*\"|\S+)", re.I)

logger = logging.getLogger(__name__)


def mask(text: str) -> str:
    """The text with the password of each DSN in it replaced by `***`.

    Known are `scheme://user:PASSWORD@` (up to the last `@` of the word, as a password typed without
    percent-encoding may hold one) and `password=...`, quoted or not.
    """
    return _KEY_PASSWORD.sub(r"\1***", _URL_PASSWORD.sub(r"\1***", text))


class MaskSecrets(logging.Filter):
    """Masks message and traceback; for handlers, as a logger's filter misses its descendants."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = mask(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = mask(logging.Formatter().formatException(record.exc_info))
        return True


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


def run_main(prog: str, body: Callable[[], int], *, debug: bool = False) -> int:
    """The body's exit code; 2 for an error of ours, 130 for Ctrl-C, 1 for any other exception.

    An error of ours is one line on stderr; `debug` or the knob DEBUG adds the traceback. Any other
    exception is logged with its traceback. SystemExit passes.
    """
    try:
        return body()
    except errors.QueueWorkflowsError as error:
        if debug or config.DEBUG.read():
            sys.stderr.write(mask(traceback.format_exc()))
        message = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"{prog}: {mask(message)}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        setup_logging()
        logger.exception("%s: unexpected error", prog)
        return 1


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
