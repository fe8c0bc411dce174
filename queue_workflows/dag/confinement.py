"""Folders of a run, opened so that no symbolic link leads the engine out of `out_dir` or its root.

A path that was checked may be swapped for a link before it is used. Therefore each folder is opened
component by component, relative to the descriptor of the one before, with `O_NOFOLLOW`: a link that
was planted meanwhile ends in an error, and what is created, listed or removed below the descriptor
is in the folder that was checked. This needs no `/proc`, so it also works on macOS.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Generator, Sequence
from pathlib import Path

from queue_workflows import config, errors

SCRATCH = ".scratch"
MAX_PATH_CHARS = 4096
"""Linux takes no longer path; a longer one in a row is refused before the file system sees it."""
NAME_BYTES = 255
"""File systems take no longer name."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_LINK = (errno.ELOOP, errno.ENOTDIR)
"""What opening a symbolic link as a folder, without following it, ends with."""


def roots() -> list[str]:
    """Return the resolved folders of OUT_ROOTS; empty: runs may keep their files anywhere."""
    named = config.OUT_ROOTS.read()
    return [os.path.realpath(root) for root in named.split(os.pathsep) if root] if named else []


def check(out_dir: str | None) -> None:
    """Raise `FolderRefused` unless `out_dir` resolves into a root of OUT_ROOTS.

    Do nothing without an `out_dir`, and where OUT_ROOTS is not set.
    """
    if out_dir is not None and (allowed := roots()):
        _place(out_dir, allowed)


@contextlib.contextmanager
def opened(out_dir: str, *parts: str, create: bool = False) -> Generator[int]:
    """Yield the descriptor of `out_dir`, or of the folder that `parts` name below it.

    `parts` are names of single folders. `create` makes what is missing, but for a root of
    OUT_ROOTS: a root that is not mounted must not be replaced by an empty folder. Raises
    `FolderRefused` for a place outside the roots and for a symbolic link on the way, OSError for
    what cannot be opened.
    """
    allowed = roots()
    if not allowed:
        _plain(out_dir, f"out_dir {out_dir!r:.120}")
        if create:
            os.makedirs(out_dir, exist_ok=True)  # noqa: PTH103  a Path would lose a trailing "//"
        # The folder itself is the app's: without OUT_ROOTS it may be a link to anywhere.
        start, names = os.path.realpath(out_dir), [*parts]
    else:
        start, below = _place(out_dir, allowed)
        names = [*below, *parts]
    fd = os.open(start, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number, name in enumerate(names):
            below_fd = _step(fd, name, os.path.join(start, *names[: number + 1]), create=create)  # noqa: PTH118
            os.close(fd)
            fd = below_fd
        yield fd
    finally:
        os.close(fd)


def inside(out_dir: str, path: str, what: str) -> tuple[str, ...]:
    """Return the names of the folders that lead from `out_dir` to the relative `path`, resolved.

    Raises `InvalidPayload` naming `what` for a path that is not below `out_dir`, also by a link.
    """
    _plain(out_dir, f"out_dir {out_dir!r:.120}")
    _plain(path, what)
    top = os.path.realpath(out_dir)
    folder = Path(os.path.realpath(Path(top) / path))
    if str(folder) == top or not folder.is_relative_to(top):
        raise errors.InvalidPayload(f"{what} leads outside the run's out_dir")
    return folder.relative_to(top).parts


def make(out_dir: str, path: str, what: str) -> Path:
    """Create the folder `path` below `out_dir` and return it, resolved. Raises as `opened` does."""
    names = inside(out_dir, path, what)
    with opened(out_dir, *names, create=True):
        return Path(os.path.realpath(out_dir), *names)


class Scratch:
    """A new, empty folder below `parent`, and its removal; neither follows a symbolic link.

    It holds a descriptor of `parent` until `remove`, so that it removes what it made, wherever the
    names on the way lead by then.
    """

    def __init__(self, parent: str, parent_fd: int, prefix: str) -> None:
        self._parent_fd = os.dup(parent_fd)
        self._name = f"{prefix}{secrets.token_hex(8)}"
        try:
            os.mkdir(self._name, 0o700, dir_fd=self._parent_fd)
        except OSError:
            os.close(self._parent_fd)
            raise
        self.path = Path(parent, self._name)

    def remove(self) -> None:
        """Remove the folder with all that is in it; what cannot be removed stays."""
        try:
            with contextlib.suppress(OSError, RecursionError):
                _empty(self._name, self._parent_fd)
            with contextlib.suppress(OSError):
                os.rmdir(self._name, dir_fd=self._parent_fd)
        finally:
            os.close(self._parent_fd)


def _empty(name: str, parent_fd: int) -> None:
    # Neither shutil.rmtree before Python 3.11 takes a descriptor to start from, nor does it hold on
    # to the folders above its path: a link planted there would have it remove what lies elsewhere.
    for _, folders, files, fd in os.fwalk(name, topdown=False, dir_fd=parent_fd):
        for file in files:
            with contextlib.suppress(OSError):
                os.unlink(file, dir_fd=fd)
        for folder in folders:
            try:
                os.rmdir(folder, dir_fd=fd)
            except NotADirectoryError:  # a link to a folder
                with contextlib.suppress(OSError):
                    os.unlink(folder, dir_fd=fd)
            except OSError:
                continue


def _step(fd: int, name: str, shown: str, *, create: bool) -> int:
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=fd)
    try:
        return os.open(name, _FOLDER, dir_fd=fd)
    except OSError as error:
        if error.errno not in _LINK:
            raise
        raise errors.FolderRefused(
            f"{shown!r:.300} is a symbolic link or no folder: the engine uses neither for a run's "
            "files; remove it"
        ) from None


def _place(out_dir: str, allowed: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the root that `out_dir` resolves into, and the names of the folders below it."""
    variable = config.OUT_ROOTS.variables[0]
    remedy = (
        f"the folders that {variable} allows ({os.pathsep.join(allowed)}); submit the run with a "
        "folder inside, or add its folder"
    )
    try:
        _plain(out_dir, f"out_dir {out_dir!r:.120}")
        resolved = Path(os.path.realpath(out_dir))
    except (errors.InvalidPayload, OSError) as error:
        # No later try resolves it either: the run has to fail at once, with this reason.
        raise errors.FolderRefused(
            f"the run's out_dir {out_dir!r:.300} cannot be resolved ({error}) into one of {remedy}"
        ) from None
    for root in allowed:
        if resolved.is_relative_to(root):
            return root, resolved.relative_to(root).parts
    raise errors.FolderRefused(f"the run's out_dir {out_dir!r:.300} is outside {remedy}")


def _plain(path: str, what: str) -> None:
    """Refuse what no file system takes, before it raises something that names no reason."""
    if "\0" in path:
        raise errors.InvalidPayload(f"{what} has a NUL character: it is no path")
    if len(path) > MAX_PATH_CHARS or any(
        len(os.fsencode(name)) > NAME_BYTES for name in path.split("/")
    ):
        raise errors.InvalidPayload(f"{what} is too long for a path ({len(path)} characters)")
