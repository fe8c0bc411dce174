"""The dashboard hides the members of values whose names APP_REDACT_KEYS has."""

from __future__ import annotations

import pytest

import queue_workflows
from queue_workflows.service.dashboard import view

KEYS = ("password", "api_key", "aws_secret_access_key_of_team", "contraseña", "пароль", "密码")


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [
        ("password", True), ("DB_PASSWORD", True), ("dbPassword", True), ("password2", True),
        ("oauth2password", True), ("PASSWORD2", True), ("apiKey", True), ("APIKey_2", True),
        ("api-key", True), ("aws_secret_access_key_of_team", True),
        ("myAwsSecretAccessKeyOfTeam", True), ("contraseña", True), ("la_contraseña", True),
        ("пароль", True), ("Пароль", True), ("密码", True),
        ("passwords", False), ("api", False), ("monkey", False), ("key_api", False),
        ("aws_secret_access_key", False), ("2", False), ("", False), ("пар", False),
    ],
)  # fmt: skip
def test_a_member_is_hidden_by_the_words_of_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, is_hidden: bool
) -> None:
    monkeypatch.setattr(queue_workflows.get_config(), "redact_keys", KEYS)
    assert (view.redacted({name: 1}) != {name: 1}) is is_hidden
