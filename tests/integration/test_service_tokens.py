"""The bearer token that the service creates once."""

from __future__ import annotations

from pathlib import Path

import pytest

from queue_workflows.service import settings, tokens


def test_services_that_start_at_once_share_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one starts while the first makes its token: no file is there, or a whole one."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("QUEUE_WORKFLOWS_TOKEN", raising=False)
    chosen = settings.load()
    made = tokens.secrets.token_urlsafe
    second: list[tokens.Tokens] = []

    def interrupted(size: int) -> str:
        monkeypatch.setattr(tokens.secrets, "token_urlsafe", made)
        second.append(tokens.load(chosen))
        return made(size)

    monkeypatch.setattr(tokens.secrets, "token_urlsafe", interrupted)
    assert [tokens.load(chosen)] == second == [tokens.load(chosen)]
    (path,) = tmp_path.iterdir()
    assert (path.name, path.stat().st_mode & 0o777) == (tokens.FILE, 0o600)
