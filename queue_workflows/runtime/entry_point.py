"""Run a command's main function: set up logs, turn errors into exit codes, and mask secrets."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from queue_workflows import config, errors
from queue_workflows.runtime import display, exit_codes, logs, masking

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

LOG_LEVELS = ("debug", "info", "warning", "error")
SI_KERNEL = 0x80
"""`si_code` of a signal that the kernel sent by itself, as a terminal does for Ctrl-C."""
MESSAGE_CHARACTERS = 8000
"""The most characters of an error's line, since an error may contain an id of any length."""

REMOVED: Mapping[str, str] = dict.fromkeys(
    (
        "ALERTS_PER_MINUTE", "ALERT_MAX_AGE_S", "ALERT_POLL_S", "ALERT_TIMEOUT_S",
        "DB_PING_INTERVAL_S", "DB_STATEMENT_TIMEOUT_S", "DISPATCH_MAX_ATTEMPTS",
        "GPU_MAX_WAIT_S", "GPU_URGENT_GRACE_S", "LOG_FILES_KEPT", "LOG_FILE_MAX_MB",
        "MAX_CRASHES", "MAX_NODES_PER_RUN", "MAX_PAYLOAD_DEPTH", "METRICS_COUNT_INTERVAL_S",
        "RESUME_ON_HOST_S", "STALL_TIMEOUT_S", "STREAM_MAX_MB", "STREAM_MAX_PARTS",
        "STREAM_PART_KB", "SUBMISSION_RECLAIM_S", "SUPERVISOR_BACKOFF_MAX_S", "UNKNOWN_NODE_S",
    ),
    "the value is fixed now",
) | {
    "AUDIT_LOG_FILE_NAME": "name the file in AUDIT_LOG_PATH",
    "DB_CONNECT_TIMEOUT_S": "set connect_timeout in the DSN",
    "DB_ENGINE_POOL_MAX": "the value is fixed now, except in `serve`, where PG_POOL_SIZE sets it",
    "DB_POOL_RECYCLE_S": "the value is fixed now, except in `serve`, where PG_POOL_RECYCLE sets it",
    "DEBUG": "use the option --debug; only `serve` still reads it",
    "DISABLE_BOOT_KICK": "declare a `Schedule` instead of a `ScheduleEntry`",
    "DISPATCH_POLL_S": "set CLAIM_POLL_S",
    "EVENT_RETENTION_DAYS": "set NODE_EVENT_RETENTION_DAYS",
    "GPU_VRAM_GB": "give the models a smaller est_vram_gb, or 0",
    "HEARTBEAT_INTERVAL_S": "set DL_HEARTBEAT_SEC",
    "LOG_FILE_NAME": "name the file in LOG_PATH",
    "MAP_WINDOW": "set `at_once` of the map",
    "METRIC_FILE_NAME": "name the file in METRIC_PATH",
    "SILENT_WORKER_AFTER_S": "set STALE_WORKER_AFTER_S",
    "STATE_DIR": "set STATE_DIRECTORY, as systemd does",
}  # fmt: skip
"""Settings that are no longer read, with the remedy for an environment that still sets them."""

logger = logging.getLogger(__name__)


def print_by_lines() -> None:
    """Flush stdout and stderr after each line, even if they are pipes or files."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def setup_logging(level: str = "info", form: str | None = None) -> None:
    """Log to stderr, and to LOG_PATH if it is set; do nothing if the root logger has a handler.

    `form`: `text` or `json`; default: LOG_FORMAT. Lines are in UTC, and secrets masked.
    """
    root = logging.getLogger()
    if root.handlers:
        warn_of_removed()
        return
    kind = form or logs.default_format()
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    warning = None
    try:
        handlers += logs.application_log()
    except errors.InvalidConfig as error:
        warning = error
    for handler in handlers:
        handler.setFormatter(logs.formatter(kind))
        handler.addFilter(logs.MaskSecrets(indent=kind != "json"))
        root.addHandler(handler)
    root.setLevel(level.upper())
    if kind == "json":
        logging.captureWarnings(True)
    if warning is not None:
        logger.warning("%s; logging to stderr alone", warning)
    warn_of_removed()


def warn_of_removed() -> None:
    """Log a warning for each removed setting that the environment still sets.

    `serve` still accepts the names of log files, and has moved them into the paths of the logs.
    """
    for name, remedy in REMOVED.items():
        second = name if name.endswith("_FILE_NAME") else f"AI_LEADS_{name}"
        for variable in (f"QUEUE_WORKFLOWS_{name}", second):
            raw = os.environ.get(variable)
            path = config.KNOBS.get(name.replace("FILE_NAME", "PATH"))
            if raw is not None and (path is None or not path.read().endswith(raw)):
                config.warn_once(variable, raw, f"no effect; {remedy}")


def add_common_arguments(parser: ArgumentParser) -> None:
    """Add the options that all role scripts have: the app, the database and the log."""
    parser.add_argument(
        "--app", metavar="MODULE[:CALLABLE]", help="the app (or env QUEUE_WORKFLOWS_APP)"
    )
    parser.add_argument(
        "--embedded", action="store_true", help="without a DSN, use the embedded PostgreSQL"
    )
    parser.add_argument(
        "--db", default="", metavar="NAME",
        help="a database of the embedded PostgreSQL; default: the one of the app's folder",
    )  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show tracebacks of refused input")
    parser.add_argument(
        "--log-level", type=str.lower, choices=LOG_LEVELS, default="info", metavar="LEVEL",
        help=f"one of {', '.join(LOG_LEVELS)} (default: info)",
    )  # fmt: skip
    parser.add_argument(
        "--log-format", type=str.lower, choices=logs.FORMATS, metavar="FORMAT",
        help="text or json (default: QUEUE_WORKFLOWS_LOG_FORMAT, else text)",
    )  # fmt: skip


def start(options: Namespace) -> None:
    """Set up the logs of a role script, and the database that its options name."""
    setup_logging(options.log_level, options.log_format)
    if options.embedded:
        config.configure(embedded=True)
    config.get_config().embedded_db = options.db


def run_main(prog: str, command: Callable[[], int], *, debug: bool = False) -> int:
    """Run a command and return its exit code: 2 for an error of ours, 130 for Ctrl-C, 1 otherwise.

    An error of ours, or one that `errors.explained` converts, is one line on stderr; `debug` adds
    the traceback. A closed pipe as output gives 1 without a message, other output errors 1 and a
    line. Any other exception is logged with its traceback. SystemExit passes.
    """
    _open_streams()
    _reset_signals()
    if os.getpid() == 1 and hasattr(signal, "sigwaitinfo"):
        _fork_below_init()
    try:
        code = command()
        sys.stdout.flush()
    except errors.QueueWorkflowsError as error:
        return _refuse(prog, error, debug=debug)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and (lost := lost_output(error)):
            if not isinstance(lost, BrokenPipeError):
                _write_error(f"{prog}: what it prints cannot be written: {lost.strerror}\n")
            return exit_codes.FAILED
        if (ours := errors.explained(error)) is not None:
            ours.__cause__ = error
            return _refuse(prog, ours, debug=debug)
        setup_logging()
        logger.exception("%s: unexpected error", prog)
        return exit_codes.FAILED
    return code


def _refuse(prog: str, error: errors.QueueWorkflowsError, *, debug: bool) -> int:
    if debug:
        trace = traceback.format_exception(type(error), error, error.__traceback__)
        _write_error(display.block("".join(trace)))
    message = display.line(" ".join(str(error).split()), MESSAGE_CHARACTERS) or type(error).__name__
    frames = ""
    if isinstance(error, errors.AppFailed) and (cause := error.__cause__) is not None:
        # The cause of an error in a launcher has the frames as text.
        text = getattr(cause, "frames", None)
        frames = text or "".join(traceback.format_tb(cause.__traceback__))
    if logs.default_format() == "json" or logs.are_json():
        setup_logging(form="json")
        more = {"traceback": display.block(frames)} if frames else None
        logger.error("%s: %s", prog, message, extra=more)
    else:
        _write_error(f"{prog}: {message}\n{frames}")
    return exit_codes.REFUSED


def _write_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(masking.mask(text))
        sys.stderr.flush()


def _open_streams() -> None:
    """Open closed standard streams on /dev/null, so that no other file gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115, PTH123
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _reset_signals() -> None:
    """Reset the inherited handling of signals of this process.

    If SIGCHLD is ignored, the exit status of children is lost. A blocked signal would never stop
    this process or its children.
    """
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _fork_below_init() -> None:
    """Continue in a child, and let this process do the work of process 1 in a container.

    It reaps orphaned processes, forwards signals, and ends with the child's exit status.
    """
    signals = signal.valid_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        return
    while True:
        got = signal.sigwaitinfo(signals)
        if got.si_signo != signal.SIGCHLD:
            if got.si_code != SI_KERNEL:  # the terminal sends such a signal to the child itself
                os.kill(child, got.si_signo)
            continue
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == child:
                    code = os.waitstatus_to_exitcode(reaped[1])
                    os._exit(code if code >= 0 else 128 - code)


def lost_output(error: OSError) -> OSError | None:
    """Return why stdout or stderr can no longer be written, or None if both can.

    Text left in a broken stream is dropped, as otherwise the flush at exit would fail too.
    """
    lost = error if isinstance(error, BrokenPipeError) else None
    for stream in (sys.stdout, sys.stderr):
        try:
            if error.errno == errno.ENOSPC and stream is sys.stdout:
                # After a failure its buffer may be empty, so that a flush alone would succeed.
                stream.write("\n")
            stream.flush()
        except OSError as refused:
            lost = refused
            with contextlib.suppress(OSError), open(os.devnull, "w", encoding="utf-8") as nothing:  # noqa: PTH123
                os.dup2(nothing.fileno(), stream.fileno())
    return lost
