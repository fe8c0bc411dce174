"""Find secrets in text by their names and form, and replace them: in logs, errors and events."""

from __future__ import annotations

import re
from typing import Any, cast

MASK = "***"
_SECRETS = (
    "password", "passwd", "passphrase", "pwd", "secret", "token", "apikey", "authorization",
    "cookie", "credential", "credentials", "passwords", "secrets",
)  # fmt: skip
_HARMLESS_KEYS = frozenset(
    {"idempotency", "lock", "partition", "public", "primary", "foreign", "sort", "group"}
)
"""Words before `key` in names that hold no secret, such as `lock_key`."""
# The password in a URL is masked up to the last @ of the word, since a password that is not
# percent-encoded may contain @. The repetition limits prevent quadratic time on hostile text.
# Messages of ours write `user:password@host`.
_URL_PASSWORD = re.compile(r"(://[^\s:/@]{0,200}:)(?!password@host[:/])\S{1,1000}(?=@)")
_URL_TOKEN = re.compile(r"(https?://)[^\s:/@]{8,200}(?=@)", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer\s{1,3})[\w.~+/=-]{8,}", re.IGNORECASE)
_NAME = re.compile(
    r"""(?P<quote>(?<![\w.\\-])\\{0,20}["']|(?<![\w.-])"""
    r"""|(?:(?<=[\s"']--)|(?<=^--))(?=[\w.-]{1,64}\s{0,3}=))"""
    r"""(?P<name>[A-Za-z][\w.-]{0,63})(?P=quote)\s{0,3}(?P<sign>=>|[=:])\s{0,3}"""
)
_VALUE = re.compile(
    # A text within a text has backslashes before its quotes. A cut text has no last quote.
    r"""\*{3}(?!\*)|(?P<inner>\\{1,20}["']).*?(?:(?<!\\)(?P=inner)|$)"""
    r"""|(?:[bru]{0,2})(?:'(?:[^'\\]|\\.)*(?:'|\\?$)|"(?:[^"\\]|\\.)*(?:"|\\?$))"""
    r"""|(?P<opened>[\w.]{0,100}[\[({])"""
    r"""|(?:(?:bearer|basic|digest|token)[ ]{1,3})?[^\s"']\S*?(?=["',;)\]}]*(?:\s|$))""",
    re.IGNORECASE | re.DOTALL,
)
_BRACKETS = re.compile(
    r"""'(?:[^'\\]|\\.)*(?:'|\\?$)|"(?:[^"\\]|\\.)*(?:"|\\?$)|[\[({\])}]""", re.DOTALL
)
_CALL = re.compile(r"""[bru]{0,2}["']|\w{1,64}=|\n[ \t]""")
"""The text after a word and a bracket if it is a call, and not a password with a bracket."""
_REST = re.compile(r"""[^\s"',;)\]}]*""")
_MOST = 2000
"""How many characters after an opening bracket in a password are searched for the closing one."""
_PAIR = re.compile(
    r"""(?P<start>(?:\(|(?<=\[)\[|(?<=[)\]],)\[|(?<=[)\]],\s)\[)"""
    r"""b?["'](?P<name>[A-Za-z][\w.-]{0,63})["'],\s?)"""
    r"""(?:b?'(?:[^'\\]|\\.)*(?:'(?=[)\]])|\\?$)|b?"(?:[^"\\]|\\.)*(?:"(?=[)\]])|\\?$)"""
    r"""|[^\s()\[\]"']+(?=[)\]]|$))""",
    re.DOTALL,
)
"""A header or an item of a mapping, as Python prints a list of them: a tuple, or a list in a list.
The last one may be cut."""
_OPTION = re.compile(
    r"""(?P<start>(?<![\w-])--(?P<name>[A-Za-z][\w-]{0,63})(?:["'],)?\s{1,3})"""
    r"""(?P<value>(?![-=]|(?:and|as|for|from|has|in|is|may|must|needs|or|requires|to|was|with)\s)"""
    r"""(?:'[^'\n]*'?|"[^"\n]*"?|[^\s"',]+))"""
)
"""An option of a command, also in a list of arguments. In a sentence, a word follows its name."""
_PEM = re.compile(r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----).*?(?=-----END|$)", re.DOTALL)
_OBJECT = re.compile(r"\b(?:workflow|pipeline|step|node|task|schedule|queue|model|map|item) $")
"""Text before an object's quoted name. A colon after the name begins a message, not a secret."""
_PLACEHOLDERS = frozenset({"...", "\N{HORIZONTAL ELLIPSIS}"})
_REFUSED = re.compile(r", not (?=\S)")
"""The text between an expected type and a refused value."""
_HEADER = re.compile(
    r"^([ \t]*(?:proxy-)?(?:authorization|cookie|set-cookie)[ \t]*:[ \t]*)[^\r\n]+",
    re.IGNORECASE | re.MULTILINE,
)
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_MAY_HOLD = re.compile(r"""[:='"]|--|bearer""", re.IGNORECASE)
"""What every text with a secret has; most ids and names have nothing of it."""


def mask(text: str) -> str:
    """Return the text with each secret in it replaced by `***`.

    Masks passwords and tokens in URLs, and bearer values. Masks the value after a name that ends in
    one of `_SECRETS` (password, token, cookie, ...) or in `key`. It recognizes `name=value`,
    `name: value`, `--name value`, JSON, Python reprs, also cut and nested ones, HTTP headers, and
    private keys. Not masked are the values of `lock_key`, `partition_key`, `idempotency_key` and
    similar names, and placeholders of messages (`KEY=VALUE`, `key=...`).
    """
    if not _MAY_HOLD.search(text):
        return text
    text = _URL_TOKEN.sub(rf"\1{MASK}", _URL_PASSWORD.sub(rf"\1{MASK}", text))
    text = _BEARER.sub(rf"\1{MASK}", _HEADER.sub(rf"\1{MASK}", text))
    text = _PEM.sub(rf"\1{MASK}", _OPTION.sub(_shown_start, _PAIR.sub(_shown_start, text)))
    parts: list[str] = []
    done = 0
    for found in _NAME.finditer(text):
        if (
            found.start() >= done
            and is_secret(found["name"], bare_key=_is_labelled(found))
            and not (
                found["quote"] and _OBJECT.search(text, max(0, found.start() - 20), found.start())
            )
        ):
            value = _VALUE.match(text, found.end())
            is_usage = value is not None and (found["name"] + value[0]).lower() == "keyvalue"
            if value is not None and not is_usage and value[0] not in _PLACEHOLDERS:
                parts += (text[done : found.end()], MASK)
                done = _closed(text, value) if value["opened"] else value.end()
                refused = _REFUSED.match(text, done)
                if refused and (value := _VALUE.match(text, refused.end())):
                    parts += (refused[0], MASK)
                    done = value.end()
    return "".join((*parts, text[done:]))


def _shown_start(found: re.Match[str]) -> str:
    """Return a pair or option, with its value masked if its name is the name of a secret."""
    placeholder = found["name"].lower() == found.groupdict().get("value", "").lower()
    is_kept = placeholder or not is_secret(found["name"], bare_key=False)
    return found[0] if is_kept else found["start"] + MASK


def _closed(text: str, opened: re.Match[str]) -> int:
    """Return the end of a value with brackets, or of its line if the closing one is missing."""
    begin, depth = opened.end(), 1
    in_word = len(opened["opened"]) > 1 and not _CALL.match(text, begin)
    last = begin + _MOST if in_word else len(text)
    for found in _BRACKETS.finditer(text, begin, last):
        depth += 1 if found[0] in "[({" else -1 if found[0] in "])}" else 0
        if not depth:
            rest = _REST.match(text, found.end())
            return rest.end() if rest else found.end()
    line_end = text.find("\n", begin) if in_word else -1
    return line_end if line_end >= 0 else len(text)


def mask_values(value: Any) -> Any:
    """Return a JSON value with its texts masked, and with `***` for members of a secret name."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {
            name: MASK if is_secret(name) and member else mask_values(member)
            for name, member in members.items()
        }
    if isinstance(value, list):
        listed = cast("list[Any]", value)
        if all(
            isinstance(each, list) and len(cast("Any", each)) == 2 and isinstance(each[0], str)
            for each in listed
        ):
            # Pairs of name and value, such as headers. A pair by itself is not treated as one.
            return [
                [name, MASK if member and is_secret(name, bare_key=False) else mask_values(member)]
                for name, member in listed
            ]
        return [
            MASK if member and _is_secret_option(before) else mask_values(member)
            for before, member in zip([None, *listed], listed, strict=False)
        ]
    return mask(value) if isinstance(value, str) else value


def _is_secret_option(name: Any) -> bool:
    is_option = isinstance(name, str) and name.startswith("--")
    return is_option and is_secret(name[2:], bare_key=False)


def _is_labelled(name: re.Match[str]) -> bool:
    """Return whether a name is quoted, followed by `=`, or first on its line.

    Otherwise `key:` in a sentence would mask the word behind it.
    """
    if name["quote"] or name["sign"] == "=":
        return True
    before = name.string[max(0, name.start() - 100) : name.start()].rstrip(" \t")
    return not before or before.endswith("\n")


def is_secret(name: str, *, bare_key: bool = True) -> bool:
    """Return whether the value after this name is a secret.

    With `bare_key`, the name `key` alone counts as a secret, too.
    """
    if name.lower().replace("_", "").replace("-", "").endswith(_SECRETS):
        return True
    words = [word.lower() for word in _WORDS.findall(name)]
    if words[-1:] == ["pass"]:  # DB_PASS, as environment variables are named
        return len(words) > 1 and name.isupper()
    if words[-1:] != ["key"]:
        return False
    return bare_key if len(words) == 1 else words[-2] not in _HARMLESS_KEYS
