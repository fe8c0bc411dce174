"""Why a server refuses a connection is recognised by its words."""

from __future__ import annotations

from typing import Any

from queue_workflows.cli import doctor
from tests.support import tabled

NO_ENTRY = 'FATAL:  no pg_hba.conf entry for host "192.0.2.7", user "u", database "d"'


def test_errors_of_the_server_are_recognised() -> None:
    cases: list[Any] = [
        ("FATAL:  sorry, too many clients already", "login", "raise max_connections"),
        ("FATAL:  remaining connection slots are reserved for ...", "login", "max_connections"),
        ("FATAL:  the database system is starting up", "login", "wait until it has started"),
        ('FATAL:  Peer authentication failed for user "u"', "login", "another kind of login"),
        ('FATAL:  role "u" does not exist', "login", "CREATE ROLE {user} LOGIN"),
        ('root certificate file "/etc/root.crt" does not exist', "tls", "sslrootcert"),
        ("SSL error: certificate verify failed", "tls", "sslrootcert"),
        ("server does not support SSL, but SSL was required", "tls", "sslmode"),
        (f"{NO_ENTRY}, SSL encryption", "login", "pg_hba.conf"),
        (f"{NO_ENTRY}, no encryption", "login", "pg_hba.conf"),
        # libpq's tries of sslmode=prefer, with TLS and without it
        (f"{NO_ENTRY}, SSL encryption {NO_ENTRY}, no encryption", "login", "pg_reload_conf"),
        ('FATAL:  certificate authentication failed for user "u"', "login", "another kind"),
        ('FATAL:  password authentication failed for user "SSL"', "login", "ALTER ROLE"),
        ("connection timeout expired", "login", "does not answer"),
        ("session is read-only", "server", "target_session_attrs"),
        ("FATAL:  no such user", "login", "ALTER ROLE {user}"),
        ("FATAL:  das Passwort stimmt nicht", "login", "see the server's log"),
    ]
    for message, ended, words in cases:
        with tabled.case(message):
            step, remedy = doctor.refusal(f'connection to server at "h", port 1 failed: {message}')
            assert (step, words in remedy) == (ended, True)
