"""Read the settings of the service (environment, then `.env`), and put them into effect."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, cast
from urllib.parse import quote

import dotenv
import pydantic
import pydantic_settings
from dotenv import parser
from pydantic import Field

from queue_workflows import config, db, errors
from queue_workflows.event_export import exporter
from queue_workflows.runtime import logs, masking
from queue_workflows.worker import shapes

FILE: Final = ".env"
ENCODING: Final = "utf-8-sig"
"""UTF-8, where some editors put a byte order mark before the first line."""
PREFIX: Final = "QUEUE_WORKFLOWS_"
MIN_TOKEN: Final = 16
"""Characters of a token that a person chooses."""
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  compared, not bound
_DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+(?=://)")
_NAMES = pydantic_settings.NoDecode
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?|[0-9a-f:]*:[0-9a-f:.]*")

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


class Settings(pydantic_settings.BaseSettings):
    """The settings of `queue-workflows serve`.

    A setting `X` is read from QUEUE_WORKFLOWS_X, then X, then from both in `.env`.
    """

    model_config = pydantic_settings.SettingsConfigDict(
        env_file=FILE,
        env_file_encoding=ENCODING,
        extra="ignore",
        frozen=True,
        populate_by_name=True,
    )

    app_host: str = Field("", description="address to bind; empty: loopback, any behind a proxy")
    app_port: int = Field(8081, ge=0, le=65_535, description="port to bind; 0: a free one")
    app_behind_proxy: bool = Field(False, description="`--behind-proxy`")
    app_allowed_hosts: Annotated[tuple[str, ...], _NAMES] = Field(
        (), description="names that a request's Host may have, beside those of loopback"
    )
    app_user_header: str = Field(
        "",
        pattern=r"^[A-Za-z0-9-]{0,100}$",
        description="header in which a proxy names the person: the actor of acts",
    )
    app_root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="path below which a proxy serves it, such as /queue",
    )
    app_dashboard: bool = Field(True, description="0: no dashboard at /ui")
    app_redact_keys: Annotated[tuple[str, ...], _NAMES] = Field(
        ("password", "token", "secret", "authorization", "api_key"),
        description="names of members of values that the dashboard hides",
    )
    app_read_only: bool = Field(False, description="`--read-only`: only GET")
    app_max_body_kb: int = Field(2048, ge=1, le=65_536, description="largest body of a request")
    app_request_timeout_sec: Seconds = Field(
        10.0,
        description="longest time of a request, beside its `wait`, until a stream begins; also the "
        "longest time in which a client may read nothing of a response",
    )
    app_header_timeout_sec: Seconds = Field(10.0, description="longest time of a request's head")
    app_max_requests: int = Field(
        100, ge=1, le=10_000, description="requests to the API at once, and as many for pages"
    )
    app_max_streams: int = Field(100, ge=1, le=10_000, description="long polls and streams at once")
    app_max_viewers: int = Field(
        200, ge=1, le=10_000, description="browsers whose dashboard follows changes, at once"
    )
    app_max_connections: int = Field(1000, ge=1, le=100_000, description="connections at once")
    debug: bool = Field(False, description="log level debug")
    local: bool = Field(
        False,
        description="no effect: logs are text with tracebacks anyway, unless LOG_FORMAT is `json`",
    )

    token: pydantic.SecretStr | None = Field(
        None, validation_alias=f"{PREFIX}TOKEN", description="token for everything"
    )
    token_submit: pydantic.SecretStr | None = Field(
        None,
        validation_alias=f"{PREFIX}TOKEN_SUBMIT",
        description="token to read, queue, cancel, retry, answer",
    )
    token_read: pydantic.SecretStr | None = Field(
        None, validation_alias=f"{PREFIX}TOKEN_READ", description="token to read"
    )
    token_look: pydantic.SecretStr | None = Field(
        None,
        validation_alias=f"{PREFIX}TOKEN_LOOK",
        description="token to read states and times, without values",
    )

    dl_db_dsn: pydantic.SecretStr | None = Field(None, description="DSN of the queue")
    pg_host: str | None = Field(None, description="server of the queue without DL_DB_DSN")
    pg_port: int = Field(5432, ge=1, le=65_535, description="its port")
    pg_user: str | None = Field(None, description="its user")
    pg_password: pydantic.SecretStr | None = Field(None, description="its password")
    pg_database: str | None = Field(None, description="its database")
    pg_schema: str = Field("public", description="refused unless public: the tables' schema")
    pg_pool_size: int = Field(4, ge=1, le=100, description="connections for requests")
    pg_max_overflow: int = Field(4, ge=0, le=100, description="connections beyond PG_POOL_SIZE")
    pg_pool_recycle: int = Field(3600, ge=-1, description="age of a connection; -1: no limit")

    workers_json: str = Field("", description="queues to serve, with their concurrency")
    dl_heartbeat_sec: Seconds = Field(10.0, description="time between two heartbeats of a job")
    dl_default_lease_ttl_sec: Seconds = Field(60.0, description="lease of a claim")
    dl_reaper_period_sec: Seconds = Field(
        10.0, description="time between two searches for lapsed leases"
    )
    dl_claim_backoff_sec: Seconds = Field(15.0, description="time between checks of lock keys")

    log_path: str = Field("", description="folder of the application log; empty: stderr alone")
    log_file_name: str = Field("app.log", description="its file")
    metric_path: str = Field("", description="folder of the metric log; empty: none")
    metric_file_name: str = Field("metric.log", description="its file")
    audit_log_path: str = Field("", description="folder of the audit log; empty: none")
    audit_log_file_name: str = Field("audit.log", description="its file")

    @classmethod
    def settings_customise_sources(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, settings_cls: Any, **own: Any
    ) -> tuple[Any, ...]:
        """Return the sources: with the prefix, then without; the environment, then `.env`."""
        prefixed = pydantic_settings.EnvSettingsSource(settings_cls, env_prefix=PREFIX)
        in_file = pydantic_settings.DotEnvSettingsSource(settings_cls, env_prefix=PREFIX)
        environment, file = own["env_settings"], own["dotenv_settings"]
        return own["init_settings"], prefixed, environment, in_file, file

    @pydantic.field_validator("app_allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        names = value.replace(",", " ").split() if isinstance(value, str) else value
        found = tuple(str(name).lower().strip("[]") for name in names)
        for name in found:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r:.80} is not a host name; leave out the port and the scheme"
                )
        return found

    @pydantic.field_validator("app_redact_keys", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(value.replace(",", " ").split()) if isinstance(value, str) else value

    @pydantic.field_validator("dl_db_dsn")
    @classmethod
    def _readable(cls, value: pydantic.SecretStr | None) -> pydantic.SecretStr | None:
        if value is not None and value.get_secret_value():
            db.describe(_DRIVER.sub(r"\1", value.get_secret_value()))
        return value

    @pydantic.field_validator("token", "token_submit", "token_read", "token_look")
    @classmethod
    def _long(cls, value: pydantic.SecretStr | None) -> pydantic.SecretStr | None:
        text = "" if value is None else value.get_secret_value()
        if value is None or not text:
            return None
        if len(text) < MIN_TOKEN or not re.fullmatch(r"[!-~]+", text):
            raise ValueError(f"a token has at least {MIN_TOKEN} printable ASCII characters")
        return value

    @pydantic.field_validator("log_file_name", "metric_file_name", "audit_log_file_name")
    @classmethod
    def _file(cls, value: str) -> str:
        if not value or Path(value).name != value:
            raise ValueError(
                f"{value!r:.80} is not a file name; LOG_PATH, METRIC_PATH and AUDIT_LOG_PATH have "
                "the folder"
            )
        if not value.endswith(logs.SUFFIXES):
            raise ValueError(f"{value!r:.80} must end in {' or '.join(logs.SUFFIXES)}")
        return value

    @pydantic.field_validator("pg_schema")
    @classmethod
    def _public(cls, value: str) -> str:
        if value not in ("", "public"):
            raise ValueError(
                f"schema {value!r:.80}: the tables are in public; give the queue a database of its "
                "own by PG_DATABASE or DL_DB_DSN"
            )
        return value

    @pydantic.model_validator(mode="after")
    def _together(self) -> Settings:
        if self.dl_heartbeat_sec > self.dl_default_lease_ttl_sec / 2:
            raise ValueError(
                "DL_HEARTBEAT_SEC must be at most half of DL_DEFAULT_LEASE_TTL_SEC, or a claim "
                "lapses between two heartbeats"
            )
        if not self.app_behind_proxy and self.app_host and not _is_loopback(self.app_host):
            raise ValueError(
                f"APP_HOST={self.app_host}: without TLS only loopback is served; --behind-proxy "
                "serves other addresses, for a proxy that has TLS"
            )
        if self.dl_db_dsn is None and self.pg_host is None and self.pg_database is not None:
            raise ValueError("PG_DATABASE without PG_HOST: name the server too")
        return self

    @property
    def host(self) -> str:
        """Return the address to bind: loopback, unless a proxy is in front."""
        if self.app_host:
            return self.app_host
        return "0.0.0.0" if self.app_behind_proxy else "127.0.0.1"  # noqa: S104  behind a proxy

    @property
    def hosts(self) -> frozenset[str]:
        """Return the names that the Host of a request may have."""
        own: set[str] = set()
        if self.app_host not in _WILDCARDS:
            own.add(self.app_host.lower().strip("[]"))
        return frozenset({"127.0.0.1", "localhost", "::1", *own, *self.app_allowed_hosts})

    @property
    def dsn(self) -> str | None:
        """Return DL_DB_DSN, else the DSN of PG_*; with None the library's own variables decide."""
        if self.dl_db_dsn is not None and self.dl_db_dsn.get_secret_value():
            return _DRIVER.sub(r"\1", self.dl_db_dsn.get_secret_value())
        if self.pg_host is None:
            return None
        user = "" if self.pg_user is None else quote(self.pg_user, safe="")
        if self.pg_password is not None:
            user += ":" + quote(self.pg_password.get_secret_value(), safe="")
        name = quote(self.pg_database or "", safe="")
        host = quote(self.pg_host, safe="")
        return f"postgresql://{user}{'@' if user else ''}/{name}?host={host}&port={self.pg_port}"

    @property
    def pool(self) -> list[shapes.Entry]:
        """Return the queues to serve; none for an empty WORKERS_JSON."""
        text = self.workers_json.strip()
        return shapes.parse(text, "WORKERS_JSON") if text and text != "[]" else []


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_file() -> None:
    """Raise `InvalidConfig` for a line that would be left out, without its text."""
    if not Path(FILE).is_file():
        return
    with Path(FILE).open(encoding=ENCODING) as file:
        for found in parser.parse_stream(file):
            if found.error:
                text = found.original.string
                blank = text[: len(text) - len(text.lstrip())].count("\n")
                raise errors.InvalidConfig(
                    f"{FILE}, line {found.original.line + blank}: it must be NAME=value, with "
                    "a quote at both ends of the value or at none"
                )


def load(**given: Any) -> Settings:
    """Return the settings; `given` values replace the environment's, unless they are None.

    Raises `InvalidConfig` with a line for each fault. Messages never contain the value of a secret.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(chosen.keys() - Settings.model_fields.keys()):
        raise errors.InvalidConfig(f"the service has no setting {unknown[0]!r:.80}")
    try:
        _check_file()
        found = Settings(**chosen)
        _ = found.pool
    except pydantic.ValidationError as error:
        raise errors.InvalidConfig("; ".join(map(_fault, error.errors()))) from None
    except (UnicodeDecodeError, OSError) as error:
        raise errors.InvalidConfig(f"{FILE} cannot be read: {error}") from None
    return found


def _fault(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"]).upper()
    text = masking.mask(str(fault["msg"]).removeprefix("Value error, "))
    line = f"{where}: {text}" if where else text
    # The name of a secret with a colon behind it would mask the first word of the reason.
    return line if masking.mask(line) == line else f"{text} ({where})"


def describe() -> list[tuple[str, str, str]]:
    """Return name, default and meaning of each setting."""
    return [
        (str(each.validation_alias or name).upper(), _shown(each.default), each.description or "")
        for name, each in Settings.model_fields.items()
    ]


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(cast("tuple[str, ...]", default))
    return "" if default is None else str(default)


# --- the process -------------------------------------------------------------------------------

_LOGS = (("log_path", "log_file_name"), ("metric_path", "metric_file_name"),
         ("audit_log_path", "audit_log_file_name"))  # fmt: skip
"""Settings of folders and of the files in them."""


def variables(found: Settings) -> dict[str, str]:
    """Return the variables that this process and its workers need."""
    made = {"DL_HEARTBEAT_SEC": str(found.dl_heartbeat_sec)}
    if (dsn := found.dsn) is not None:
        made["DB_URL"] = dsn
    for folder, name in _LOGS:
        if (path := logs.path_of(getattr(found, folder), getattr(found, name))) is not None:
            made[folder.upper()] = str(path)
    return {PREFIX + name: text for name, text in made.items()}


def apply(found: Settings) -> None:
    """Set what this process and its workers need; again once the app may have named variables."""
    os.environ.update(variables(found))
    cfg = config.get_config()
    cfg.redact_keys = found.app_redact_keys
    cfg.engine_pool_max = found.pg_pool_size + found.pg_max_overflow
    cfg.pool_recycle_s = found.pg_pool_recycle if found.pg_pool_recycle > 0 else 366 * 86_400
    own = {name for name, _, _ in describe()}
    for name, text in dotenv.dotenv_values(FILE, encoding=ENCODING).items():
        is_other = name.startswith(PREFIX) and not {name, name.removeprefix(PREFIX)} & own
        if is_other and text is not None:
            os.environ.setdefault(name, text)
    if found.dsn is not None:
        os.environ[config.db_url_variables()[0]] = found.dsn
    queues = [entry.queue for entry in found.pool]
    if queues:
        config.configure(ingest_queues=config.get_config().ingest_queues.union(queues))


def check_app(found: Settings) -> None:
    """Raise `InvalidConfig` for queues without an app with tasks, and for unwritable logs."""
    for export in exporter.wanted():
        export.close()
    if not found.pool:
        return
    if config.get_config().app is None:
        raise errors.InvalidConfig(
            "WORKERS_JSON needs the app that registers the tasks, which each worker process "
            "loads: --app or QUEUE_WORKFLOWS_APP"
        )
    if not config.get_config().ingest_task_map:
        raise errors.InvalidConfig(
            f"WORKERS_JSON names queues, but app {config.get_config().app} registers no ingest "
            "task: call register_ingest_task() in it"
        )
