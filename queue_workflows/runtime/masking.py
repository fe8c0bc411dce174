"""Replace secrets in text that people read: logs, errors, events and tracebacks."""

from __future__ import annotations

import re

MASK = "***"
_SECRETS = (
    "password", "passwd", "passphrase", "pwd", "secret", "token", "apikey", "authorization",
    "cookie", "credential", "credentials",
)  # fmt: skip
_HARMLESS_KEYS = frozenset(
    {"idempotency", "lock", "partition", "public", "primary", "foreign", "sort", "group"}
)
"""What stands before `key` in names of columns; such a key opens nothing."""
# The user's part of a URL is masked up to the last @ of the word: a password that was typed without
# percent-encoding may hold one. The bounds keep hostile text from costing quadratic time.
_URL_PASSWORD = re.compile(r"(://[^\s:/@]{0,200}:)\S{1,1000}(?=@)")
_URL_TOKEN = re.compile(r"(https?://)[^\s:/@]{8,200}(?=@)", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer\s{1,3})[\w.~+/=-]{8,}", re.IGNORECASE)
_NAME = re.compile(
    r"""(?P<quote>(?<![\w.\\-])["']|(?<![\w.-]))(?P<name>[A-Za-z][\w.-]{0,63})(?P=quote)"""
    r"""\s{0,3}(?P<sign>[=:])\s{0,3}"""
)
_VALUE = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
    r"""|(?:(?:bearer|basic|digest|token)[ ]{1,3})?[^\s"']\S*?(?=[,;)\]}]*(?:\s|$))""",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"^([ \t]*(?:proxy-)?(?:authorization|cookie|set-cookie)[ \t]*:[ \t]*)[^\r\n]+",
    re.IGNORECASE | re.MULTILINE,
)
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def mask(text: str) -> str:
    """Return the text with each secret in it replaced by `***`.

    Masked are the passwords and tokens in URLs, bearer values, and what stands behind a name that
    ends in password, token, secret, api_key, key, authorization, cookie or a relative of them, as
    `name=value`, `name: value`, in JSON, in a Python repr and in an HTTP header. The keys of this
    project that name rows (`lock_key` and such) stay readable, and so does `KEY=VALUE` in a usage.
    """
    text = _URL_TOKEN.sub(rf"\1{MASK}", _URL_PASSWORD.sub(rf"\1{MASK}", text))
    text = _BEARER.sub(rf"\1{MASK}", _HEADER.sub(rf"\1{MASK}", text))
    parts: list[str] = []
    done = 0
    for found in _NAME.finditer(text):
        if found.start() >= done and _is_secret(found["name"], bare_key=_is_labelled(found)):
            value = _VALUE.match(text, found.end())
            is_usage = value is not None and (found["name"] + value[0]).lower() == "keyvalue"
            if value is not None and not is_usage:
                parts += (text[done : found.end()], MASK)
                done = value.end()
    return "".join((*parts, text[done:]))


def _is_labelled(name: re.Match[str]) -> bool:
    """Whether a name is more than a word of a sentence: quoted, assigned to, or first on a line."""
    if name["quote"] or name["sign"] == "=":
        return True
    before = name.string[max(0, name.start() - 100) : name.start()].rstrip(" \t")
    return not before or before.endswith("\n")


def _is_secret(name: str, *, bare_key: bool) -> bool:
    """Whether a value behind this name is a secret; `bare_key`: behind the name `key` too."""
    if name.lower().replace("_", "").replace("-", "").endswith(_SECRETS):
        return True
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[-1] != "key":
        return False
    return bare_key if len(words) == 1 else words[-2] not in _HARMLESS_KEYS
