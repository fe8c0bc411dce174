"""Passwords, tokens and keys are masked in text for people."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from typing import Any

import queue_workflows
from queue_workflows.runtime.masking import mask, mask_values
from tests.support import tabled

CANARY = "c4nary-Value/1"
PEM = "RSA PRIVATE KEY-----\n"


def test_a_secret_does_not_show() -> None:
    cases: list[Any] = [
        "password={}", "PGPASSWORD={} psql", "token={}", "access_token={}", "accessToken={}",
        "client_secret={}", "api_key={}", "API-KEY={}", "apikey: {}", "x-api-key: {}",
        "AWS_SECRET_ACCESS_KEY={}", "key={}", "connect(key={}, x=1)", "cookie={}",
        "Authorization: Bearer {}", "authorization=Bearer {}", "Authorization: Basic {}",
        "bearer {}", "Cookie: session={}; other={}", "Set-Cookie: a={}",
        '{{"token": "{}"}}', '{{"nested": {{"api_key": "{}"}}}}', "{{'secret': '{}', 'a': 1}}",
        '{{"key":"{}"}}', "{{'password': \"{}\"}}", '{{"password": "a\\"b {}"}}',
        "key: {}\nother: 1", "https://user:{}@h/x", "https://{}@github.invalid/x",
        "postgresql://u:{}@h:5432/db", "password = '{} and more {}'",
        "'password': int, not '{}'", "token: str, not {}", "{{'a': 1, 'password': '{}",
        'secret="{}\\',
        "not {{'x': {{'api_key': \"{} ",
        "Command '['dump', '--password', '{}', '--token={}']' failed", "dump --password {} x",
        "dump --api-key='{} {}'", "{{'password': {{'a': ['x', '{}'], 'b': {{'c': '{}'}}}}}}",
        "password=(\n  'a',\n  '{}',\n)", "token=Token('a {}')", "{{'password': b'a {}'}}",
        '{{"body": "{{\\"api_key\\": \\"{} \\\\\\"{}\\"}}"}}', "password => {}",
        "('password', '{}')", "[(b'authorization', b'Basic {}')]", "passwords={}",
        "client_secrets: {}", "DB_PASS={}", "password=ab(c{}", "password=ab(c)d{}", "token=[a, '{}",
        "[['a', 'b'], ['password', '{}']]", "argv: ['--password', 'or', '--password', '{}']",
        "dump --token '{}", "dump --token = {}", "('password', '{}",
        f"-----BEGIN {PEM}{{}}\n{{}}\n-----END {PEM}",
    ]  # fmt: skip
    for text in cases:
        with tabled.case(text):
            url = "://" in text
            canary = CANARY.replace("/", "-") if url else CANARY
            shown = mask(text.format(canary, canary))
            assert canary not in shown
            assert "c4nary" not in shown
            assert "***" in shown


def test_what_is_no_secret_stays() -> None:
    cases: list[Any] = [
        "max_tokens=100", "tokens: 300", "monkey=ape", "KeyError: 'model'", "no such key: model",
        "idempotency_key='order-7'", "lock_key=box", "partition_key: a", '{"lock_key": "box"}',
        'duplicate key value violates unique constraint "x"', "Key (id)=(r1) already exists.",
        "postgres://u@h:5432/db", "at 10:30 the worker stopped", "result['a'][3]: a set",
        "the token was refused", "http://127.0.0.1:8081/health",
        "give each call a key=... of its own", "it should look like postgresql://user:password@host:5432/x",
        "inputs of workflow 'reset-password': 'text' missing", "node 'get_token': int, not 5",
        "inputs are given by --input KEY=VALUE", "--input x should be key=value or @file.json",
        "start it with --token TOKEN", "--host-password --verbose", "give --idempotency-key k",
        "('password', 'user', 'host') are missing", "first_pass=3", "a bypass: open", "--tokens 5",
        "argument --token: expected one argument", "argument -t/--token: expected one argument",
        "give --password or --token", "option --token requires an argument",
        "['api_key', 'created_at']", '["password", "user"] are the fields',
    ]  # fmt: skip
    for text in cases:
        with tabled.case(text):
            assert mask(text) == text


def test_the_rest_of_a_line_stays() -> None:
    assert mask("f(token=abc, x=1)") == "f(token=***, x=1)"
    assert mask('{"token": "abc", "n": 5}') == '{"token": ***, "n": 5}'
    assert mask("Authorization: Bearer abc\nHost: h") == "Authorization: ***\nHost: h"
    assert mask("{'token': {'a': [1]}, 'n': 5}") == "{'token': ***, 'n': 5}"
    assert mask("f(token=g(1)) = 3, x") == "f(token=***) = 3, x"
    assert mask("['--token=abc', '-x']") == "['--token=***', '-x']"
    assert mask("start --password --token=abc") == "start --password --token=***"
    assert mask("password=ab(c\nTraceback:\n  f(1)") == "password=***\nTraceback:\n  f(1)"
    assert mask(f"f(token=({'[1], ' * 1000})) = 3, x") == "f(token=***) = 3, x"


def test_no_part_of_a_long_secret_shows() -> None:
    cases: list[Any] = [
        "token=", "token=[", "token={'a': '", "token=ab(", "token=Token(\n  '", "x --token ",
        "token=T(\n x='", "token=T(x='B',\n y='", "('token', '", "x --token '", "('token', ",
        '{"token": "', "bearer ", "Cookie: a="
    ]  # fmt: skip
    for begin in cases:
        with tabled.case(begin):
            for secret in (
                "A" * 5000,
                "A " * 5000 if begin.endswith(("[", "'", '"', "(")) else "A" * 9,
            ):
                assert "A" not in mask(begin + secret).partition("***")[2], begin
                assert "***" in mask(begin + secret), begin


def test_what_is_masked_is_masked_once() -> None:
    text = "token=abc {'password': {'a': 1}} '{\"api_key\": \"a b\"}' --token x postgres://u:p@h/"
    assert mask(mask(text)) == mask(text)


def test_members_of_json_are_masked() -> None:
    given = {"argv": ["--token", "abc", "x"], "headers": [["cookie", "abc"], ["a", "b"]], "t": "a"}
    assert mask_values(given) == {
        "argv": ["--token", "***", "x"], "headers": [["cookie", "***"], ["a", "b"]], "t": "a",
    }  # fmt: skip
    for kept in (["api_key", "created_at"], [["password", "a", "b"], ["c", "d"]]):
        assert mask_values({"columns": kept}) == {"columns": kept}


def test_hostile_text_is_masked_in_little_time() -> None:
    cases: list[Any] = [
        "://a:" * 20_000, "password" * 20_000, "key=" * 20_000, '"' * 100_000, "a-" * 50_000,
        "'key': '" * 10_000, "password=(" * 20_000, "password=(\n" * 20_000, "--token " * 20_000,
        '\\"' * 50_000, f"-----BEGIN {PEM}" * 5_000, "('token', " * 20_000,
        "('token', '" * 10_000, "token=" + "(" * 100_000, 'key: \\"' * 20_000,
        " " * 100_000, "\n" * 50_000 + "key: x", "password=a(\n" * 10_000,
        ("password=a(" + "\\'" * 20 + "\n") * 2_000, "password=(" + "\\'" * 50_000,
        "password=a()" * 10_000, "--token '" * 20_000, "('token', a" * 10_000
    ]  # fmt: skip
    for text in cases:
        with tabled.case(text):
            started = time.process_time()
            mask(text)
            assert time.process_time() - started < 2.0


def test_no_message_of_the_engine_is_masked() -> None:
    masked: list[str] = []
    for path in sorted(Path(queue_workflows.__path__[0]).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for found in ast.walk(tree):
            if isinstance(found, ast.Expr) and isinstance(found.value, ast.Constant):
                found.value.value = ""  # a docstring
            text = found.value if isinstance(found, ast.Constant) else ""
            if isinstance(found, ast.JoinedStr):
                parts = [
                    each.value if isinstance(each, ast.Constant) else "X" for each in found.values
                ]
                text = "".join(map(str, parts))
            is_message = isinstance(text, str) and "\\" not in text
            if is_message and mask(text) != text and path.name != "masking.py":
                masked.append(f"{path.name}: {text}")
    assert masked == []
