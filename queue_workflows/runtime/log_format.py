"""Format log records as lines of text or of JSON, with the ids of the work and without secrets."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Final, cast

from queue_workflows.runtime import display, log_context, masking

FORMATS: Final = ("text", "json")
FIELDS_LIMIT: Final = 8000
"""Characters of the `extra` fields of a record as JSON; more are left out."""
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message", "asctime", "taskName", "color_message",
}  # fmt: skip
_OWN: Final = frozenset({"time", "level", "logger", "message", "pid", "error"})
_TEXT: Final = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"


class MaskSecrets(logging.Filter):
    """Mask secrets in, and escape, the message and traceback of a log record.

    It belongs to handlers: a logger's filter does not see the records of child loggers. A line end
    in an argument becomes `\\n`. Every line after a record's first is indented, so that no text of
    a row can look like a record of its own; not with `indent=False`, for lines of JSON.
    """

    def __init__(self, *, indent: bool = True) -> None:
        super().__init__()
        self._indent = _indented if indent else str

    def filter(self, record: logging.LogRecord) -> bool:
        record.args = _safe_arguments(record.args)
        text = display.block(record.getMessage())
        record.msg, record.args = self._indent(text), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            text = self._indent(display.block(record.exc_text))
            record.exc_text = "  " + text.lstrip() if self._indent is _indented else text
        return True


class EscapeArguments(logging.Filter):
    """Escape the arguments of a record, for a logger of a library whose app has handlers.

    It belongs to a logger: line ends in an id cannot forge a record in the log of the app.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.args = _safe_arguments(record.args)
        return True


class TextFormatter(logging.Formatter):
    """One line a record, in UTC; behind it the ids of its work that the message does not name."""

    converter = time.gmtime

    def __init__(self) -> None:
        super().__init__(_TEXT, "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  of the base class
        """Return the line without the traceback."""
        line = super().formatMessage(record)
        ids = {**log_context.of_code(), **_known_ids(record)}
        words = [
            f"{name}={display.line(value)}"
            for name in log_context.NAMES
            if (value := ids.get(name)) is not None and str(value) not in record.message
        ]
        if not words:
            return line
        first, end, rest = line.partition("\n")
        return f"{first} [{' '.join(words)}]{end}{rest}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII: time, level, logger, message, pid, ids, then `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what is no JSON becomes text, and NaN a string."""
        error = record.exc_text
        if error is None and record.exc_info:
            error = display.block(self.formatException(record.exc_info))
        members: dict[str, Any] = {
            "time": f"{_seconds(record)}.{int(record.msecs):03d}Z",
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


def _known_ids(record: logging.LogRecord) -> dict[str, Any]:
    return {name: vars(record)[name] for name in log_context.NAMES if name in vars(record)}


def _seconds(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))


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
