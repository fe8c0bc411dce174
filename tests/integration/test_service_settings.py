"""Settings and tokens of the service are validated at its start, and no message has a secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from queue_workflows import config, errors
from queue_workflows.runtime import masking
from queue_workflows.service import settings, tokens

GUIDE = (
    "APP_HOST APP_PORT DEBUG LOCAL PG_HOST PG_PORT PG_USER PG_PASSWORD PG_DATABASE PG_SCHEMA"
    " PG_POOL_SIZE PG_MAX_OVERFLOW PG_POOL_RECYCLE DL_DB_DSN WORKERS_JSON DL_HEARTBEAT_SEC"
    " DL_DEFAULT_LEASE_TTL_SEC DL_REAPER_PERIOD_SEC DL_CLAIM_BACKOFF_SEC LOG_PATH LOG_FILE_NAME"
    " METRIC_PATH METRIC_FILE_NAME AUDIT_LOG_PATH AUDIT_LOG_FILE_NAME"
)
SECRET = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("APP_", "PG_", "DL_")) or name in ("DEBUG", "LOCAL", "WORKERS_JSON"):
            monkeypatch.delenv(name)
    return tmp_path


def test_every_setting_of_the_guide_is_one_with_its_default() -> None:
    known = {name: default for name, default, _ in settings.describe()}
    assert set(GUIDE.split()) <= known.keys()
    assert known["APP_PORT"] == "8081"
    defaults = [known[f"DL_{name}_SEC"] for name in ("HEARTBEAT", "DEFAULT_LEASE_TTL",
                                                     "REAPER_PERIOD", "CLAIM_BACKOFF")]  # fmt: skip
    assert defaults == ["10.0", "60.0", "10.0", "15.0"]
    assert settings.load().host == "127.0.0.1"


def test_the_environment_wins_over_the_file_and_the_prefix_over_the_bare_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".env").write_text(
        "APP_PORT=1\nPG_PORT=2\nLOG_PATH=/from/file\nUNRELATED=x\nQUEUE_WORKFLOWS_PG_HOST=f\n"
    )
    monkeypatch.setenv("APP_PORT", "3")
    monkeypatch.setenv("PG_PORT", "4")
    monkeypatch.setenv("QUEUE_WORKFLOWS_PG_PORT", "5")
    found = settings.load(dl_reaper_period_sec=7)
    assert (found.app_port, found.pg_port, found.log_path) == (3, 5, "/from/file")
    assert (found.pg_host, found.dl_reaper_period_sec) == ("f", 7)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("APP_PORT", "65536", "APP_PORT"),
        ("APP_PORT", "x", "APP_PORT"),
        ("DEBUG", "perhaps", "DEBUG"),
        ("APP_HOST", "0.0.0.0", "--behind-proxy"),
        ("APP_HOST", "example.org", "--behind-proxy"),
        ("PG_SCHEMA", "etl", "PG_SCHEMA"),
        ("PG_DATABASE", "etl", "PG_HOST"),
        ("DL_HEARTBEAT_SEC", "0", "DL_HEARTBEAT_SEC"),
        ("DL_HEARTBEAT_SEC", "nan", "DL_HEARTBEAT_SEC"),
        ("DL_HEARTBEAT_SEC", "31", "DL_DEFAULT_LEASE_TTL_SEC"),
        ("DL_REAPER_PERIOD_SEC", "-1", "DL_REAPER_PERIOD_SEC"),
        ("WORKERS_JSON", "[{}]", "WORKERS_JSON[0]"),
        ("WORKERS_JSON", '[{"queue": "cpu"}]', "cpu"),
        ("LOG_FILE_NAME", "../x.log", "LOG_FILE_NAME"),
        ("LOG_FILE_NAME", "x", "LOG_FILE_NAME"),
        ("DL_DB_DSN", "nonsense", "DL_DB_DSN"),
        ("DL_DB_DSN", f"mysql://u:{SECRET}@h/d", "DL_DB_DSN"),
        ("APP_ALLOWED_HOSTS", "https://etl.example.org", "APP_ALLOWED_HOSTS"),
        ("APP_ALLOWED_HOSTS", "etl.example.org:443", "leave out the port"),
        ("QUEUE_WORKFLOWS_TOKEN", "short", "QUEUE_WORKFLOWS_TOKEN"),
        ("QUEUE_WORKFLOWS_TOKEN_READ", f"{SECRET} {SECRET}", "QUEUE_WORKFLOWS_TOKEN_READ"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, named: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(errors.InvalidConfig) as refused:
        settings.load()
    assert named in str(refused.value)
    assert SECRET not in str(refused.value)
    assert masking.mask(str(refused.value)) == str(refused.value), "no word of the reason is masked"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("APP_PORT 9001", 1),
        ("DEBUG=1\nthis is no line\nAPP_PORT=9001", 2),
        (f'DEBUG=1\n\nPG_PASSWORD="{SECRET}\nLOCAL=1\n', 3),
        ("=x", 1),
    ],
)
def test_a_line_of_the_file_that_would_be_left_out_is_refused(
    folder: Path, text: str, line: int
) -> None:
    (folder / ".env").write_text(text)
    with pytest.raises(errors.InvalidConfig, match=rf"\.env, line {line}: ") as refused:
        settings.load()
    assert SECRET not in str(refused.value)


def test_the_file_may_have_quotes_comments_exports_and_other_line_ends(folder: Path) -> None:
    (folder / ".env").write_bytes(
        b"\xef\xbb\xbfAPP_PORT='9001' # the port\r\n\r\n# PG_PORT=1\r\nexport PG_HOST=\"db\"\r\n"
        b"pg_user=etl\r\nUNRELATED\r\nLOG_PATH=\r\n"
        b'WORKERS_JSON=[{"queue": "load.a", "concurrency": 2}]\r\n'
    )
    found = settings.load()
    assert (found.app_port, found.pg_host, found.pg_user, found.log_path) == (9001, "db", "etl", "")
    assert [entry.queue for entry in found.pool] == ["load.a"]


def test_the_file_may_have_the_variables_of_the_library_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a database that is named there would be left out, and another one used."""
    (folder / ".env").write_text(
        "QUEUE_WORKFLOWS_DB_URL=postgresql://file/db\nQUEUE_WORKFLOWS_CANCEL_GRACE_S=7\n"
        "QUEUE_WORKFLOWS_SHUTDOWN_TIMEOUT_S=3\nQUEUE_WORKFLOWS_PG_PORT=1\nOTHER=x\n"
    )
    with mock.patch.dict(os.environ, QUEUE_WORKFLOWS_SHUTDOWN_TIMEOUT_S="4"):
        os.environ.pop("QUEUE_WORKFLOWS_DB_URL", None)
        settings.apply(settings.load())
        assert config.database_url() == "postgresql://file/db"
        assert (config.CANCEL_GRACE_S.read(), config.SHUTDOWN_TIMEOUT_S.read()) == (7, 4)
        assert not {"OTHER", "QUEUE_WORKFLOWS_PG_PORT"} & os.environ.keys()
        settings.apply(settings.load(dl_db_dsn="postgresql://given/db"))
        assert config.database_url() == "postgresql://given/db"


def test_the_check_of_the_logs_leaves_none_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("METRIC_PATH", "AUDIT_LOG_PATH"):
        monkeypatch.setenv(f"QUEUE_WORKFLOWS_{name}", str(folder / f"{name}.log"))
    settings.check_app(settings.load())
    links = [*Path("/proc/self/fd").iterdir()]
    assert folder not in {link.readlink().parent for link in links if link.is_symlink()}
    assert (folder / "METRIC_PATH.log").exists()


@pytest.mark.parametrize("name", ["METRIC_PATH", "AUDIT_LOG_PATH"])
def test_a_log_that_cannot_be_written_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv(name, str(folder / "file" / "log"))
    found = settings.load()
    with monkeypatch.context() as given:
        for variable, text in settings.variables(found).items():
            given.setenv(variable, text)
        with pytest.raises(errors.InvalidConfig, match="cannot be written"):
            settings.check_app(found)


@pytest.mark.parametrize(
    ("given", "dsn"),
    [
        ({}, None),
        ({"DL_DB_DSN": "postgresql+asyncpg://u:p@h/d"}, "postgresql://u:p@h/d"),
        ({"DL_DB_DSN": "postgresql://h/d", "PG_HOST": "other"}, "postgresql://h/d"),
        (
            {"PG_HOST": "db", "PG_USER": "u", "PG_PASSWORD": "a/@b", "PG_DATABASE": "etl"},
            "postgresql://u:a%2F%40b@/etl?host=db&port=5432",
        ),
    ],
)
def test_the_dsn(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], dsn: str | None) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = settings.load()
    assert found.dsn == dsn
    assert "a/@b" not in repr(found)
    monkeypatch.setenv("QUEUE_WORKFLOWS_DB_URL", "postgresql://ours")
    settings.apply(found)
    assert config.database_url() == (dsn or "postgresql://ours")


def test_a_proxy_opens_every_address_and_names_are_allowed() -> None:
    found = settings.load(app_behind_proxy=True, app_allowed_hosts="Etl.example.org, b")
    assert found.host == "0.0.0.0"
    assert {"etl.example.org", "b", "localhost"} <= found.hosts
    assert settings.load(app_host="::1").host == "::1"


def test_a_token_is_created_once_for_this_user_alone(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(folder / "state"))
    first = tokens.load(settings.load())
    assert first.path == folder / "state" / "service-token"
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    text = first.path.read_text().strip()
    assert len(text) >= 40
    assert tokens.load(settings.load()) == first
    assert first.scope_of(text.encode()) == "operate"
    assert first.scope_of(b"") is first.scope_of(text[:-1].encode()) is None
    first.path.chmod(0o640)
    with pytest.raises(errors.InvalidConfig, match="0600"):
        tokens.load(settings.load())
    first.path.write_text("")
    first.path.chmod(0o600)
    with pytest.raises(errors.InvalidConfig, match="holds no token"):
        tokens.load(settings.load())
    first.path.unlink()
    first.path.symlink_to(folder / "elsewhere")
    with pytest.raises(errors.InvalidConfig):
        tokens.load(settings.load())


def test_the_folder_of_a_token_lets_the_account_of_the_embedded_server_enter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For root the server runs as another account, in a folder beside the token."""
    monkeypatch.setenv("STATE_DIRECTORY", str(folder / "lib" / "state"))
    path = tokens.load(settings.load()).path
    assert path is not None
    modes = {stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path.parent.parent)}
    assert modes == {0o755 if os.geteuid() == 0 else 0o700}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_tokens_have_scopes() -> None:
    found = tokens.load(settings.load(token="o" * 16, token_submit="s" * 16, token_read="r" * 16))
    assert found.path is None
    scopes = [found.scope_of(letter.encode() * 16) for letter in "osr"]
    assert scopes == ["operate", "submit", "read"]


def test_the_page_has_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http-reference.md").read_text(encoding="utf-8")
    for name, default, meaning in settings.describe():
        shown = "" if default in ("", "()") else f"`{default}`"
        assert f"| `{name}` | {shown} | {meaning} |" in page
