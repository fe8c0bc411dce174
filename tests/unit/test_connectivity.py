"""Why a server refuses a connection is recognised by its words."""

from __future__ import annotations

from typing import Any

from queue_workflows.cli import doctor
from tests.support import tabled


def test_errors_of_the_server_are_recognised() -> None:
    cases: list[Any] = [
        ("FATAL:  sorry, too many clients already", "full"),
        ("FATAL:  remaining connection slots are reserved for roles with ...", "full"),
        ("FATAL:  the database system is starting up", "starting"),
        ('FATAL:  Peer authentication failed for user "u"', "peer"),
        ('FATAL:  role "u" does not exist', "role"),
        ('root certificate file "/etc/root.crt" does not exist', "tls"),
        ("SSL error: certificate verify failed", "tls"),
        ("connection timeout expired", "silent"),
        ("session is read-only", "session"),
        ("FATAL:  no such user", "password"),
        ("FATAL:  das Passwort stimmt nicht", "other"),
    ]
    for message, kind in cases:
        with tabled.case(message, kind):
            said = f'connection to server at "h", port 1 failed: {message}'
            assert doctor.refusal(said) == kind
