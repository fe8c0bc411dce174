"""Why a server refuses a connection is recognised by its words."""

from __future__ import annotations

from typing import Any

from queue_workflows.cli import doctor
from tests.support import tabled


def test_errors_of_the_server_are_recognised() -> None:
    cases: list[Any] = [
        ("FATAL:  sorry, too many clients already", "login", "raise max_connections"),
        ("FATAL:  remaining connection slots are reserved for ...", "login", "max_connections"),
        ("FATAL:  the database system is starting up", "login", "wait until it has started"),
        ('FATAL:  Peer authentication failed for user "u"', "login", "another kind of login"),
        ('FATAL:  role "u" does not exist', "login", "CREATE ROLE {user} LOGIN"),
        ('root certificate file "/etc/root.crt" does not exist', "tls", "sslrootcert"),
        ("SSL error: certificate verify failed", "tls", "sslrootcert"),
        ("connection timeout expired", "login", "does not answer"),
        ("session is read-only", "server", "target_session_attrs"),
        ("FATAL:  no such user", "login", "ALTER ROLE {user}"),
        ("FATAL:  das Passwort stimmt nicht", "login", "see the server's log"),
    ]
    for message, ended, words in cases:
        with tabled.case(message):
            step, remedy = doctor.refusal(f'connection to server at "h", port 1 failed: {message}')
            assert (step, words in remedy) == (ended, True)
