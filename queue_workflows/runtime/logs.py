"""Format log records as lines of text or JSON, with the ids of the work and without secrets.

If logs are JSON, the output of handlers becomes JSON lines, too. Several processes write to the
same log files, which are rotated by size.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from queue_workflows import config, errors
from queue_workflows.runtime import display, log_context, masking

FORMATS: Final = ("text", "json")
FIELDS_LIMIT: Final = 8000
"""Characters of the `extra` fields of a record as JSON; more are left out."""
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message", "asctime", "taskName", "color_message",
}  # fmt: skip
_OWN: Final = frozenset({"time", "level", "logger", "message", "pid", "error"})
_TEXT: Final = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
_WORD: Final = re.compile(r"\w(?:[\w:./@\[\]-]*\w)?")
"""A word of a message, which may be an id such as `cut[a]/encode`, without marks at its ends."""


class MaskSecrets(logging.Filter):
    """Mask secrets in, and escape, the message and traceback of a log record.

    Add it to handlers, since a logger's filter does not see the records of child loggers. A line
    end in an argument becomes `\\n`. Unless `indent` is false, for JSON, all lines of a record
    after the first are indented, so that no text of a row can look like a record of its own.
    """

    def __init__(self, *, indent: bool = True) -> None:
        super().__init__()
        self._indent = _indented if indent else str

    def filter(self, record: logging.LogRecord) -> bool:
        text = display.block(_text_of(record))
        record.msg, record.args = self._indent(text), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            text = self._indent(display.block(record.exc_text))
            record.exc_text = "  " + text.lstrip() if self._indent is _indented else text
        return True


def _text_of(record: logging.LogRecord) -> str:
    """Return the message of a record with escaped arguments.

    A log call of an app may be wrong, and a value may raise as it is formatted. Neither may raise
    in the app. A value that only `%d` takes, such as a tensor, is formatted as it is.
    """
    given = record.args
    with contextlib.suppress(Exception):
        escape_arguments(record)
        return record.getMessage()
    with contextlib.suppress(Exception):
        record.args = given
        return record.getMessage()
    message: Any = record.msg
    text = message if isinstance(message, str) else f"a {type(message).__name__}"
    return f"{text} (its arguments do not fit: {record.filename}, line {record.lineno})"


def escape_arguments(record: logging.LogRecord) -> bool:
    """Escape the arguments of a record; it is the filter of this library's logger.

    So line ends in an id cannot forge a record in the log of an app that has its own handlers.
    """
    record.args = _safe_arguments(record.args)
    return True


class TextFormatter(logging.Formatter):
    """One line per record, in UTC, followed by the ids of its work that the message lacks.

    The attempt always follows, since a number in the message may mean something else.
    """

    converter = time.gmtime

    def __init__(self) -> None:
        super().__init__(_TEXT, "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  of the base class
        """Return the line without the traceback."""
        line = super().formatMessage(record)
        own = {name: vars(record)[name] for name in log_context.NAMES if name in vars(record)}
        ids = {**log_context.of_code(), **own}
        known = set(_WORD.findall(record.message))
        words = [
            f"{name}={display.line(value)}"
            for name in log_context.NAMES
            if (value := ids.get(name)) is not None
            and (name == "attempt" or str(value) not in known)
        ]
        if not words:
            return line
        first, end, rest = line.partition("\n")
        return f"{first} [{' '.join(words)}]{end}{rest}"


class JsonFormatter(logging.Formatter):
    """One ASCII JSON object per line with time, level, logger, message, pid, ids and `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; values that JSON lacks, and NaN, become strings."""
        error = record.exc_text
        if error is None and record.exc_info:
            error = display.block(self.formatException(record.exc_info))
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        members: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **log_context.current(),
            **fields(record),
        }
        if error:
            members["error"] = error
        return display.json_line(members)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the `extra` fields of a record as JSON values, without the secrets in them."""
    given = {
        name: value
        for name, value in vars(record).items()
        if name not in _STANDARD and name not in _OWN and not name.startswith("_")
    }
    if not given:
        return {}
    try:
        return masking.mask_values(json.loads(display.json_line(given, FIELDS_LIMIT)))
    except Exception as error:  # noqa: BLE001  the boundary around app code: a value's own __str__
        return {"fields_left_out": type(error).__name__}


def allowed(members: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the members that may be the `extra` of a log call, which refuses standard names."""
    return {name: value for name, value in (members or {}).items() if name not in _STANDARD}


def formatter(kind: str) -> logging.Formatter:
    """Return the formatter of this kind, one of `FORMATS`."""
    return JsonFormatter() if kind == "json" else TextFormatter()


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


PRINT_LOGGER: Final = "print"
"""The `logger` of printed lines."""
LINE_LIMIT: Final = 8000
"""Bytes or characters after which a printed line is cut."""
STREAMS: Final = {1: "stdout", 2: "stderr"}
_FORMATTER: Final = JsonFormatter()
_MASK: Final = MaskSecrets(indent=False)


def as_json(text: str, stream: str, pid: int) -> str:
    """Return a printed line as JSON, with its line end and the ids that are bound now."""
    members = {"name": PRINT_LOGGER, "levelno": logging.INFO, "levelname": "INFO", "msg": text}
    record = logging.makeLogRecord({**members, "args": None, "process": pid, "stream": stream})
    _MASK.filter(record)
    return _FORMATTER.format(record) + "\n"


def are_json() -> bool:
    """Return whether this process logs JSON."""
    handlers = logging.getLogger().handlers
    return any(isinstance(each.formatter, JsonFormatter) for each in handlers)


class Pipes:
    """Cuts the bytes from an executor's stdout and stderr into lines, as JSON."""

    def __init__(self, pid: Callable[[], int]) -> None:
        self._pid = pid
        self._rest = dict.fromkeys(STREAMS, b"")

    def add(self, number: int, data: bytes) -> bytes:
        """Return the lines of a stream that these bytes complete."""
        *lines, rest = (self._rest[number] + data).split(b"\n")
        while len(rest) > LINE_LIMIT:
            lines.append(rest[:LINE_LIMIT])
            rest = rest[LINE_LIMIT:]
        self._rest[number] = rest
        return b"".join(self._line(number, line) for line in lines)

    def end(self, number: int) -> bytes:
        """Return the incomplete last line of a stream, if there is one."""
        rest, self._rest[number] = self._rest[number], b""
        return self._line(number, rest)

    def _line(self, number: int, line: bytes) -> bytes:
        text = line.decode("utf-8", "backslashreplace").rstrip("\r")
        return as_json(text, STREAMS[number], self._pid()).encode() if text else b""


MODE: Final = 0o640
SUFFIXES: Final = (".log", ".json", ".jsonl", ".txt")
"""A setting with such an ending names a file, any other a folder."""
MAX_BYTES: Final = 50_000_000
"""Size at which a log file is rotated; editors can still open a file of this size."""
KEPT: Final = 5
"""Rotated files that are kept of each log; with the open one, they take 300 MB."""


def default_format() -> str:
    """Return LOG_FORMAT if it is a known format, else `text`."""
    kind = config.LOG_FORMAT.read().lower()
    return kind if kind in FORMATS else "text"


def application_log() -> list[logging.Handler]:
    """Return the handler of the application log; none unless LOG_PATH is set.

    Raises `InvalidConfig` if the file cannot be written.
    """
    found = path_of(config.LOG_PATH.read(), "app.log")
    return [] if found is None else [FileHandler(opened(found))]


def path_of(setting: str, name: str) -> Path | None:
    """Return the file that a setting names, or `name` in the folder it names; None if empty.

    Raises `InvalidConfig` for a path that this machine or user cannot have.
    """
    if not setting:
        return None
    try:
        path = Path(setting).expanduser()
        return path if path.suffix in SUFFIXES and not path.is_dir() else path / name
    except RuntimeError:
        reason = "its home folder does not exist"
    except OSError as error:
        reason = error.strerror
    raise errors.InvalidConfig(f"the log {setting:.200} cannot be written: {reason}")


def opened(path: Path) -> RotatingFile:
    """Return the file, whose folder is created; raise `InvalidConfig` if it cannot be written."""
    file = RotatingFile(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file.write("")
    except OSError as error:
        raise errors.InvalidConfig(f"the log {path} cannot be written: {error.strerror}") from error
    return file


class RotatingFile:
    """A file to which several processes append lines without mixing or splitting them.

    At MAX_BYTES it is renamed to `.1`, that to `.2`, and so on; KEPT of them stay. A lock on the
    file orders the processes; the threads of one process must not write at the same time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._pid = 0

    def write(self, text: str) -> None:
        """Append a text, or nothing of it if that raises OSError."""
        data = text.encode("utf-8", "backslashreplace")
        while True:
            with self._locked() as size:
                if size == 0 or size + len(data) <= MAX_BYTES:
                    try:
                        while data:
                            data = data[os.write(self._fd, data) :]
                    except OSError:
                        with contextlib.suppress(OSError):
                            os.ftruncate(self._fd, size)  # or the next text continues this line
                        raise
                    return
                self._rename()
            # Other processes may fill the new file before this one has its lock.

    @contextlib.contextmanager
    def _locked(self) -> Generator[int]:
        """Hold the lock of the file that is at the path now; yield its size."""
        while True:
            if self._pid != os.getpid():
                # A forked child shares the open file, and with it the lock.
                self.close()
                self._fd, self._pid = self._open(), os.getpid()
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            mine = os.fstat(self._fd)
            with contextlib.suppress(FileNotFoundError):
                now = self.path.stat()
                if (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino):
                    break
            self.close()
        try:
            yield mine.st_size
        finally:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)

    def _rename(self) -> None:
        for number in range(KEPT, 0, -1):
            older = self._numbered(number)
            newer = self._numbered(number - 1) if number > 1 else self.path
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        fd, self._fd, self._pid = self._fd, -1, 0
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class FileHandler(logging.Handler):
    """Write records to a file; failures are reported on stderr, but not each of them."""

    def __init__(self, file: RotatingFile) -> None:
        super().__init__()
        self._file = file
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, best effort."""
        try:
            self._file.write(self.format(record) + "\n")
        except OSError as error:
            failed, self._failed = self._failed, True
            text = f"the log {self._file.path} cannot be written: {error.strerror}\n"
            with contextlib.suppress(OSError):
                os.write(2, b"" if failed else text.encode("utf-8", "backslashreplace"))
        except Exception:  # noqa: BLE001  logging never raises into the code that logs
            self.handleError(record)
        else:
            self._failed = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
