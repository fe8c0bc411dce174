"""Write logs to files that several processes share, and rename them before they grow too large."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Final

from queue_workflows import config, errors
from queue_workflows.runtime import log_format

MODE: Final = 0o640


def default_format() -> str:
    """Return LOG_FORMAT if it is a known format, else `text`."""
    kind = config.LOG_FORMAT.read().lower()
    return kind if kind in log_format.FORMATS else "text"


def application() -> list[logging.Handler]:
    """Return the handler of the application log; none unless LOG_PATH is set.

    Raises `InvalidConfig` if the file cannot be written.
    """
    found = path_of(config.LOG_PATH, config.LOG_FILE_NAME)
    return [] if found is None else [FileHandler(opened(found))]


def path_of(folder: config.Knob[str], name: config.Knob[str]) -> Path | None:
    """Return the path that two settings name, or None if the folder is not set.

    Raises `InvalidConfig` for a name with a folder in it.
    """
    if not folder.read():
        return None
    file = name.read()
    if not file or Path(file).name != file:
        raise errors.InvalidConfig(
            f"{name.name}={file!r:.80} must be the name of a file in {folder.name}"
        )
    return Path(folder.read()).expanduser() / file


def opened(path: Path) -> RotatingFile:
    """Return the file, whose folder is created; raise `InvalidConfig` if it cannot be written."""
    file = RotatingFile(
        path, int(config.LOG_FILE_MAX_MB.read() * 1_000_000), config.LOG_FILES_KEPT.read()
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file.write("")
    except OSError as error:
        raise errors.InvalidConfig(f"the log {path} cannot be written: {error.strerror}") from error
    return file


class RotatingFile:
    """A file to which several processes append lines, each whole and in one file.

    At `max_bytes` it is renamed to `.1`, that to `.2`, and so on; `kept` of them stay. A lock on
    the file orders the writers of all processes; those of one process order themselves.
    """

    def __init__(self, path: Path, max_bytes: int, kept: int) -> None:
        self.path = path
        self._max = max_bytes
        self._kept = max(0, kept)
        self._fd = -1
        self._pid = 0

    def write(self, text: str) -> None:
        """Append a text. Raises OSError."""
        data = text.encode("utf-8", "backslashreplace")
        while True:
            with self._locked() as size:
                if size == 0 or not 0 < self._max < size + len(data):
                    self._append(data)
                    return
                self._rename()
            # Other processes may fill the new file before this one has its lock.

    @contextlib.contextmanager
    def _locked(self) -> Generator[int]:
        """Hold the lock of the file that has the path now; yield its size."""
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

    def _append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def _rename(self) -> None:
        for number in range(self._kept, 0, -1):
            older = self._numbered(number)
            newer = self._numbered(number - 1) if number > 1 else self.path
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if not self._kept:
            self.path.unlink(missing_ok=True)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        fd, self._fd, self._pid = self._fd, -1, 0
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class FileHandler(logging.Handler):
    """Write records to a file; one that cannot be written is reported on stderr, once a time."""

    def __init__(self, file: RotatingFile) -> None:
        super().__init__()
        self._file = file
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, best effort."""
        try:
            self._file.write(self.format(record) + "\n")
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._report(error)
        except Exception:  # noqa: BLE001  logging never raises into the code that logs
            self.handleError(record)
        else:
            self._failed = False

    def _report(self, error: OSError) -> None:
        with contextlib.suppress(OSError):
            text = f"the log {self._file.path} cannot be written: {error.strerror}\n"
            os.write(2, text.encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
