"""Check the way to the server up to the login: names, ports, TLS, and a refused connection."""

from __future__ import annotations

from queue_workflows.cli.findings import ERROR, OK, WARNING, Finding, Findings
from queue_workflows.db import connectivity


def network(where: connectivity.Destination, timeout_s: float) -> Findings:
    """Yield the steps before the login: the names and ports of the servers, and TLS."""
    if not where.targets:
        yield Finding("name", OK, "no host is named: libpq's service or default socket")
        return
    step, good = _of_all(
        "name", [(target, connectivity.resolve(target)) for target in where.targets]
    )
    yield step
    step, good = _of_all(
        "port", [(target, connectivity.probe_port(target, timeout_s)) for target in good]
    )
    yield step
    if not good:
        return
    target = good[0]
    if not target.local and where.probe_tls and where.sslmode != "disable":
        yield _tls(target, where.sslmode, timeout_s)


def _of_all(
    name: str, replies: list[tuple[connectivity.Target, connectivity.Reply]]
) -> tuple[Finding, list[connectivity.Target]]:
    """Return one step for all servers of the DSN, and the good ones; it fails if none is good."""
    good = [target for target, reply in replies if not reply.remedy]
    text = "; ".join(reply.text for _, reply in replies)
    remedy = next((reply.remedy for _, reply in replies if reply.remedy), "")
    level = OK if not remedy else WARNING if good else ERROR
    return Finding(name, level, text, remedy), good


def _tls(target: connectivity.Target, sslmode: str, timeout_s: float) -> Finding:
    try:
        offered = connectivity.offers_tls(target, timeout_s)
    except connectivity.NoReply:
        text = f"{target} accepts connections and sends nothing for {timeout_s:g} s"
        return Finding("tls", ERROR, text, "the server hangs, or it is not PostgreSQL")
    if offered is None:
        text = f"the server at {target} is not PostgreSQL"
        return Finding("tls", ERROR, text, "name the port of the server or of its pooler")
    if offered:
        return Finding("tls", OK, f"offered, sslmode={sslmode}")
    if sslmode.startswith(("require", "verify")):
        remedy = "set ssl = on in its postgresql.conf, or sslmode=prefer in the DSN"
        return Finding("tls", ERROR, f"sslmode={sslmode}, and the server offers none", remedy)
    if target.host in {"127.0.0.1", "::1", "localhost"}:
        return Finding("tls", OK, "none, on this machine")
    text = "none: what is sent and received can be read on the way"
    return Finding("tls", WARNING, text, "set ssl = on in its postgresql.conf")


def refused(where: connectivity.Destination, message: str) -> Findings:
    """Yield the step that a refused connection failed at, and those before it that passed."""
    user, dbname = where.user or "of this account", where.dbname or where.user
    kind = connectivity.refusal(message)
    remedies = {
        "tls": "see sslmode and sslrootcert in the DSN",
        "no_password": "put it in the DSN, in PGPASSWORD, or in ~/.pgpass (mode 0600)",
        "password": f"as a superuser there: ALTER ROLE {user} PASSWORD '...' (or CREATE ROLE)",
        "peer": "its pg_hba.conf wants another kind of login; name a user with a password",
        "rule": (
            f"add `host {dbname} {user} <address of this machine>/32 scram-sha-256` to its "
            "pg_hba.conf, and SELECT pg_reload_conf()"
        ),
        "role": f"as a superuser there: CREATE ROLE {user} LOGIN PASSWORD '...'",
        "no_database": f"as a superuser there: CREATE DATABASE {dbname} OWNER {user}",
        "no_connect": f"GRANT CONNECT ON DATABASE {dbname} TO {user}",
        "full": "raise max_connections there; a worker holds up to three connections",
        "starting": "wait until it has started; see the server's log",
        "session": "no server of the DSN is what target_session_attrs wants",
        "silent": "it takes connections and does not answer: see the server's log",
        "other": "see the server's log",
    }
    if kind in {"no_database", "no_connect"}:
        yield Finding("login", OK, f"as {user}")
        step = "database"
    else:
        step = {"tls": "tls", "session": "server"}.get(kind, "login")
    yield Finding(step, ERROR, message, remedies[kind])
