"""Check the patterns of `matches` before they run, and bound the time that they may take.

A pattern from a workflow may backtrack for ever. One that is accepted costs at most a polynomial of
small degree, and all patterns of one `$filter` share an `Effort`.
"""

from __future__ import annotations

import dataclasses
import re
import time
from functools import lru_cache
from typing import Any, NamedTuple

from queue_workflows import errors

MAX_PATTERN_CHARS = 200
MAX_SUBJECT_CHARS = 1000


class Effort:
    """Return the CPU seconds that one `$filter` may take: a constant and a share for each item.

    It runs from the first comparison on. The constant leaves room for a pause of the garbage
    collector, which counts as time of the thread that it interrupts.
    """

    __slots__ = ("_budget_s", "_deadline")

    def __init__(self, items: int) -> None:
        self._budget_s = 0.04 + 50e-6 * items
        self._deadline: float | None = None

    def check(self) -> None:
        now = time.thread_time()
        if self._deadline is None:
            self._deadline = now + self._budget_s
        elif now > self._deadline:
            raise errors.InvalidRef("$filter: a pattern takes too long here; anchor it with '^'")


class Pattern(NamedTuple):
    """A checked pattern; `costly` ones are tried start by start under the budget."""

    compiled: re.Pattern[str]
    costly: bool


def matches(pattern: Pattern, subject: Any, effort: Effort) -> bool:
    """Return whether the pattern is found in a text, or in the digits of a number.

    Returns False for any other value, and for a text of over `MAX_SUBJECT_CHARS`.
    """
    if isinstance(subject, (int, float)) and not isinstance(subject, bool):
        subject = str(subject)
    if not isinstance(subject, str) or len(subject) > MAX_SUBJECT_CHARS:
        return False
    effort.check()
    if not pattern.costly:
        return pattern.compiled.search(subject) is not None
    for start in range(len(subject) + 1):
        if pattern.compiled.match(subject, start) is not None:
            return True
        effort.check()
    return False


def safe_pattern(text: Any) -> Pattern:
    """Return the compiled pattern; raise `InvalidRef` that names the broken rule."""
    if not isinstance(text, str):
        raise errors.InvalidRef(f"a pattern is text, not {type(text).__name__}")
    if len(text) > MAX_PATTERN_CHARS:
        raise errors.InvalidRef(f"a pattern of {len(text)} characters; at most {MAX_PATTERN_CHARS}")
    return _checked_pattern(text)


@lru_cache(maxsize=256)
def _checked_pattern(text: str) -> Pattern:
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise errors.InvalidRef(f"pattern {text!r}: {error}") from error
    if compiled.flags & re.VERBOSE:
        raise _refused(text, "the verbose flag")
    tokens = _tokens(text)
    degree, choices, branched = _cost(text, tokens, compiled.flags)
    head = tokens[0] if tokens and not branched else _Token("none", "", -1, -1)
    optional = head.kind == "atom" and (head.lo, head.hi) == (0, None)
    if optional and head.start == 0 and text[head.end - 1] != "+":
        return _checked_pattern(text[head.end :])  # a search finds what follows without it
    anchored = head.text == r"\A" or (head.text == "^" and not compiled.flags & re.MULTILINE)
    return Pattern(compiled, not anchored and (choices << 4 * degree) > 16)


def _refused(text: str, rule: str) -> errors.InvalidRef:
    return errors.InvalidRef(f"pattern {text!r} is refused: {rule}")


@dataclasses.dataclass(slots=True)
class _Token:
    """One piece of a pattern and how often it repeats (`hi` is None if unbounded)."""

    kind: str
    text: str
    start: int
    end: int
    repeats: bool = False
    lo: int = 1
    hi: int | None = 1

    def literal(self) -> str | None:
        """Return the character that this token always consumes, or None."""
        if self.kind != "atom" or self.lo == 0:
            return None
        char = self.text[-1]
        escaped = len(self.text) == 2 and self.text[0] == "\\" and not char.isalnum()
        return char if escaped or (len(self.text) == 1 and char != ".") else None


_PIECE = re.compile(
    r"(?P<skip>\(\?\#[^)]*\)|\(\?[aiLmsu]+\))"
    r"|(?P<reference>\\[1-9]|\(\?P=|\(\?\()"
    r"|(?P<verbose>\(\?[aiLmsu]*x[aiLmsux]*(?:-[imsx]+)?:)"
    r"|(?P<open>\((?:\?(?:P<\w+>|[aiLmsu]*(?:-[imsx]+)?:|<?[=!]|>))?)"
    r"|(?P<close>\))|(?P<alt>\|)|(?P<zero>\^|\$|\\[AZzbB])"
    r"|(?P<atom>\[\^?\]?(?:\\.|[^\]\\])*\]"
    r"|\\(?:x..|u.{4}|U.{8}|N\{[^}]*\}|0[0-7]{0,2}|.)|.)",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(?!\})([0-9]*)(,?)([0-9]*)\})[?+]?")
_FORBIDDEN = {"reference": "a backreference or a conditional", "verbose": "the verbose flag"}


def _tokens(text: str) -> list[_Token]:
    """Return the pieces of a pattern that `re` has accepted, each with its quantifier."""
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        quantifier = _QUANTIFIER.match(text, at) if tokens else None
        if quantifier is not None:
            sign, low, comma, high = quantifier.groups()
            token, at = tokens[-1], quantifier.end()
            token.repeats, token.end = True, at
            token.lo = int(low or 0) if not sign else int(sign == "+")
            bound = high if comma else low
            token.hi = 1 if sign == "?" else int(bound) if bound else None
            continue
        piece = _PIECE.match(text, at)
        kind = piece.lastgroup if piece else None
        if piece is None or kind is None or kind in _FORBIDDEN:
            raise _refused(text, _FORBIDDEN.get(kind or "", f"not understood at position {at}"))
        if kind != "skip":
            tokens.append(_Token(kind, piece.group(), at, piece.end()))
        at = piece.end()
    return tokens


@dataclasses.dataclass(slots=True)
class _Group:
    """An open group: the ways through each branch, and the character that each starts with."""

    quantified: bool = False
    ways: list[int] = dataclasses.field(default_factory=lambda: [1])
    starts: list[str | None] = dataclasses.field(default_factory=list[str | None])

    def meet(self, token: _Token) -> None:
        """Record the first character of the branch, or begin another branch."""
        if len(self.starts) < len(self.ways) and token.kind != "close":
            self.starts.append(token.literal())
        if token.kind == "alt":
            self.ways.append(1)

    def total(self) -> int:
        """Return how many ways match at one place; branches with different starts are exclusive."""
        keys = {start.casefold() for start in self.starts if start is not None}
        return max(self.ways) if len(keys) == len(self.ways) else sum(self.ways)


_WAYS = (4096, 512, 16)


def _cost(text: str, tokens: list[_Token], flags: int) -> tuple[int, int, bool]:
    """Return degree and factor of the polynomial that bounds one match, and whether it branches.

    Backtracking multiplies the ways of every piece, except one whose successor cannot match it.
    Raises `InvalidRef` if the rules or these bounds forbid it.
    """
    unbounded = spread = degree = 0
    stack = [_Group()]
    for index, token in enumerate(tokens):
        stack[-1].meet(token)
        inner = 1
        if token.kind == "open":
            stack.append(_Group())
        elif token.kind == "close":
            inner = _close(text, stack, token)
        group = stack[-1]
        group.quantified |= token.repeats
        settled = _settled(tokens, index, flags)
        if token.hi is None:
            unbounded += 1
            degree = spread + 1  # even one that is settled scans its whole run each time
            spread += not settled
        elif token.repeats and not settled:
            inner = inner ** min(token.hi, 30) * (token.hi - token.lo + 1)
        group.ways[-1] = min(group.ways[-1] * inner, 1 << 30)
    if unbounded > 2:
        raise _refused(text, "more than two unbounded quantifiers")
    choices = stack[0].total()
    if choices > _WAYS[degree]:
        raise _refused(text, "too many ways to match the same text")
    return degree, choices, len(stack[0].ways) > 1


def _close(text: str, stack: list[_Group], token: _Token) -> int:
    """Close a group; return the ways through it."""
    closed = stack.pop()
    ways = closed.total()
    if token.repeats and closed.quantified:
        raise _refused(text, "a quantifier inside a quantified group")
    if token.hi is None and ways > 1:
        raise _refused(text, "alternatives of a repeated group that start alike")
    stack[-1].quantified |= closed.quantified
    return ways


def _settled(tokens: list[_Token], index: int, flags: int) -> bool:
    """Return whether an atom repeats in one way only: no character of it may follow it."""
    token, follower = tokens[index], tokens[index + 1 : index + 2]
    char = follower[0].literal() if follower and token.repeats and token.kind == "atom" else None
    if char is None:
        return False
    folded = flags | re.IGNORECASE | re.DOTALL
    return not any(re.fullmatch(token.text, char, flags=mode) for mode in (flags, folded))
