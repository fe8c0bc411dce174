"""Load or create the bearer tokens, and compare a request's token with them."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Literal, NamedTuple

import pydantic

from queue_workflows import config, errors
from queue_workflows.embedded import cluster
from queue_workflows.service import settings as service_settings

Scope = Literal["look", "read", "submit", "operate"]
RANK: dict[Scope, int] = {"look": 0, "read": 1, "submit": 2, "operate": 3}
"""A token of a scope has the scopes before it too."""
FILE = "service-token"


class Tokens(NamedTuple):
    """The digests of the tokens with their scopes; `path`: the file of a token that was created."""

    digests: tuple[tuple[bytes, Scope], ...]
    path: Path | None = None

    def scope_of(self, given: bytes) -> Scope | None:
        """Return the scope of a token, or None; all are compared, each in constant time."""
        digest = _digest(given)
        found: Scope | None = None
        for known, scope in self.digests:
            if hmac.compare_digest(digest, known):
                found = scope
        return found


def load(settings: service_settings.Settings) -> Tokens:
    """Return the tokens of the settings, or of the file, made if missing (`InvalidConfig`)."""
    chosen: tuple[tuple[pydantic.SecretStr | None, Scope], ...] = (
        (settings.token_look, "look"),
        (settings.token_read, "read"),
        (settings.token_submit, "submit"),
        (settings.token, "operate"),
    )
    named: list[tuple[str, Scope]]
    named = [(secret.get_secret_value(), scope) for secret, scope in chosen if secret is not None]
    path = None
    if settings.token is None:
        # In the folder that systemd sets, else in the data folder.
        folder = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
        path = (Path(folder) if folder else config.data_folder()) / FILE
        named.append((_read_or_create(path), "operate"))
    return Tokens(tuple((_digest(text.encode()), scope) for text, scope in named), path)


def _read_or_create(path: Path) -> str:
    try:
        # The account that runs the embedded server for root enters it too, for a folder of its own.
        cluster.make_folder(path.parent)
        if not os.path.lexists(path):
            text = secrets.token_urlsafe(32)
            # It is complete before it has its name: another service may start at the same time.
            draft = path.with_name(f".{FILE}-{secrets.token_hex(8)}")
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                with os.fdopen(fd, "w", encoding="ascii") as file:
                    file.write(text + "\n")
                with contextlib.suppress(FileExistsError):
                    os.link(draft, path)
            finally:
                draft.unlink()
        return _read(path)
    except OSError as error:
        raise errors.InvalidConfig(
            f"the token's file {path} cannot be used ({error.strerror}): set QUEUE_WORKFLOWS_TOKEN "
            "or STATE_DIRECTORY"
        ) from None


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd, encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise errors.InvalidConfig(
                f"the token's file {path} must belong to this user, with mode 0600: remove it, and "
                "a new one is made"
            )
        text = file.read(1000).strip()
    if len(text) < service_settings.MIN_TOKEN:
        raise errors.InvalidConfig(
            f"the token's file {path} holds no token; remove it, and a new one is made"
        )
    return text


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
