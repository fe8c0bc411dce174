"""What came from a row is printed escaped, bounded and on one line, whatever its type."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_workflows.cli import output
from queue_workflows.runtime import display, entry_point, logs
from queue_workflows.types import Unreadable
from tests.support import tabled

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
ANY_TEXT = st.text(st.characters() | st.sampled_from("\x1b\x9b\x00\n\t\r\x7f\u202e\u2066\u200b\\"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary()
    | st.datetimes(timezones=st.just(timezone.utc)) | st.timedeltas() | st.decimals(),
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
)  # fmt: skip


def is_safe(text: str) -> bool:
    return not any(unicodedata.category(char) in HIDDEN for char in text)


def test_every_control_and_format_character_of_unicode_is_escaped() -> None:
    raw = [
        hex(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in HIDDEN and not is_safe(display.line(chr(code)))
    ]
    assert raw == []


@given(ANY_TEXT, st.integers(0, 300))
def test_any_text_becomes_one_bounded_printable_line(text: str, limit: int) -> None:
    shown = display.line(text, limit)
    assert is_safe(shown)
    assert len(shown) <= limit
    assert display.line(shown, limit) == shown


@given(ANY_TEXT.map(lambda text: text.replace("\\", "")))
def test_no_character_of_an_uncut_text_is_lost(text: str) -> None:
    # Lone surrogates side by side are what JSON calls one character; rows hold none.
    text = text.encode(errors="replace").decode()
    assert display.restored(display.line(text, None)) == text


@given(ANY_TEXT)
def test_the_id_that_json_shows_leads_back_to_the_row(text: str) -> None:
    text = text.encode(errors="replace").decode().replace("\\", "").replace('"', "")
    assert display.restored(display.strict_json(text)[1:-1]) == text


@given(VALUES, st.integers(10, 300))
def test_any_value_becomes_one_bounded_printable_line(value: Any, limit: int) -> None:
    for shown in (display.line(value, limit), display.compact(value, limit)):
        assert is_safe(shown) and len(shown) <= limit
    assert is_safe("".join(display.pretty(value)))


@given(VALUES)
def test_any_value_is_strict_json_in_ascii(value: Any) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = display.strict_json(value)
    assert text.isascii() and is_safe(text.replace("\n", ""))
    json.loads(text, parse_constant=refuse)


def test_escaped_characters_are_visible() -> None:
    assert display.line("a\x1b[31m\nb\x9b\u202ec\x00\td") == r"a\x1b[31m\nb\x9b\u202ec\x00\td"
    assert display.line("e\U000e0041f\udc80g\u200bh") == r"e\U000e0041f\udc80g\u200bh"
    assert display.line(r"C:\x1b [red]%s[/]") == r"C:\x1b [red]%s[/]"
    assert display.line("größer 日本　⚠️") == "größer 日本　⚠️"


def test_a_long_text_shows_how_much_is_left_out() -> None:
    assert display.line("x" * 300) == "x" * 191 + "...(+109)"
    assert display.line("x" * 200) == "x" * 200
    assert display.line("\n" * 10, 12) == r"\n\n...(+8)"


SEPARATE_SECRETS = "\n".join(["X_TOKEN=" + "A" * 500] * 40)


def test_no_part_of_a_long_secret_shows_where_a_text_is_cut() -> None:
    cases: list[Any] = [
        "token=" + "A" * 5000, "token=" + "A" * 50_000, SEPARATE_SECRETS, SEPARATE_SECRETS * 3,
        '{"token": "' + "A" * 5000 + '"}', "('token', '" + "A" * 30_000 + "')",
        "token=" + "B" * 9_900 + " postgres://u:" + "A" * 900 + "@h/x",
        "x" * 150 + " --token " + "A" * 5000, "x " * 300 + "token=" + "A" * 5000
    ]  # fmt: skip
    for text in cases:
        with tabled.case(text):
            shapes = [text, {"a": text}, {"token": text}, [text] * 5, {"a": {"b": [text, "c"]}}]
            for shape in shapes:
                for limit in (20, 50, 180, 200, 333, 2500):
                    for shown in (display.line(shape, limit), display.compact(shape, limit)):
                        assert "AA" not in shown, (limit, shown)
                        assert len(shown) <= limit
                assert "AA" not in "".join(display.pretty(shape))
                assert "AA" not in display.compact(shape, None)
            assert "AA" not in "".join(display.lines(text))
            assert "AA" not in display.block(text)


def test_what_a_mask_hides_is_not_counted() -> None:
    assert display.line("token=" + "A" * 4000) == "token=***"
    assert display.line("token=" + "A" * 4000 + " " + "x" * 300, 50) == (
        "token=*** " + "x" * 31 + "...(+269)"
    )
    shown = display.line("token=" + "A" * 400_000 + " " + "x" * 50)
    assert shown.startswith("token=***...(+3")


def test_no_escape_is_cut_in_two() -> None:
    for limit in range(8, 40):
        kept = display.line("\u202e" * 20, limit).partition("...")[0]
        assert len(kept) % 6 == 0


def test_values_of_every_type_have_words() -> None:
    cases: list[Any] = [
        (None, "-"),
        (b"\xff\x1b", r"\xff\x1b"),
        (float("nan"), "nan"),
        (float("-inf"), "-infinity"),
        (Decimal("1E+5000"), "1E+5000"),
        (Unreadable("it is \x1b deep", b"[["), r"unreadable: it is \x1b deep"),
        (datetime.max.replace(tzinfo=timezone.utc), "after year 9999"),
        (datetime.min.replace(tzinfo=timezone.utc), "before year 1"),
        (datetime(5, 1, 2, 3, 4, 5, tzinfo=timezone.utc), "0005-01-02 03:04:05 UTC"),
        ({"a": [1, float("nan"), Unreadable("no", b"")]},
         '{"a": [1, "NaN", {"unreadable": "no"}]}'),
    ]  # fmt: skip
    for value, shown in cases:
        with tabled.case(value, shown):
            assert display.line(value) == shown


def test_a_time_at_the_end_of_what_python_has_is_shown_in_any_zone() -> None:
    east, west = timezone(timedelta(hours=14)), timezone(-timedelta(hours=12))
    for instant, words in ((datetime.max, "after year 9999"), (datetime.min, "before year 1")):
        for zone in (east, west):
            at = instant.replace(tzinfo=zone)
            for shown in (display.moment(at), display.clock(at), display.strict_json(at)):
                assert shown
        assert display.moment(instant.replace(tzinfo=timezone.utc)) == words
    assert display.moment(datetime.max.replace(tzinfo=west)) == "after year 9999"
    assert display.moment(datetime.min.replace(tzinfo=east)) == "before year 1"


def test_json_has_utc_times() -> None:
    at = datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=2)))
    assert json.loads(display.strict_json({"at": at})) == {"at": "2025-12-31T23:00:00+00:00"}


def test_durations_in_words() -> None:
    cases: list[Any] = [
        (None, "-"), (0.04, "0.0 s"), (59.9, "59.9 s"), (125, "2 min 05 s"),
        (11_220, "3 h 07 min"), (float("nan"), "unknown"), (float("inf"), "forever"),
        (float("-inf"), "0.0 s"), (-5, "0.0 s"), (Decimal("NaN"), "unknown"), ("\x1b", r"\x1b"),
        (timedelta(seconds=61), "1 min 01 s"),
    ]  # fmt: skip
    for value, shown in cases:
        with tabled.case(value, shown):
            assert display.duration(value) == shown


def test_an_integer_of_too_many_digits_for_python_has_words() -> None:
    assert display.line(10**5000) == "an integer of about 5000 digits"
    assert display.duration(10**5000).startswith("an integer of about 4996 digits h")
    assert display.number(10**5000) == "an integer of about 5000 digits"
    assert json.loads(display.strict_json({"n": 10**5000}))["n"].startswith("an integer")


def test_nested_json_is_bounded_in_depth_and_size() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert len(display.line(deep)) <= 200
    assert json.loads(display.strict_json(deep))
    wide = {f"k{n}": "v" * 1000 for n in range(100_000)}
    assert len(display.line(wide)) == 200
    with pytest.raises(ValueError):
        json.loads(display.line(wide))


def test_json_on_a_line_is_escaped_as_json_escapes() -> None:
    shown = display.compact({"a\x7f\u202e\U000e0041\n": "b\x1b\x9b"})
    assert is_safe(shown)
    assert json.loads(shown) == {"a\x7f\u202e\U000e0041\n": "b\x1b\x9b"}


def test_lines_keep_line_ends_and_nothing_else() -> None:
    assert display.lines("a\tb\r\nc\x1b\rd\x85\u2028e") == ["a       b", r"c\x1b", r"d\x85\u2028e"]
    assert display.block("a\nb\x1b") == "a\nb\\x1b"


def test_a_line_that_nobody_escaped_is_escaped_where_it_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.echo("a\x1b\u202eb\nc")
    output.complain("password=canary1 \x1b\n")
    output.table(("id",), [("[red]x[/]\x1b\u2066" + "y" * 100,)])
    written_text = capsys.readouterr()
    assert written_text.out.splitlines()[0] == r"a\x1b\u202eb\nc"
    assert written_text.err == "password=*** \\x1b\\n\n"
    assert is_safe(written_text.out.replace("\n", "")) and "[red]x[/]" in written_text.out


# --- logs --------------------------------------------------------------------------------------


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger with the handler that `setup_logging` makes, and what it writes."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = []
    entry_point.setup_logging("info")
    yield logging.getLogger("queue_workflows.test_display"), written
    root.handlers[:] = before
    root.setLevel(level)


FORGED = "x\n2026-01-01T00:00:00.000Z ERROR root: forged\x1b[31m\u202e"


def records(written: io.StringIO) -> list[str]:
    """The lines that stand where a record begins."""
    return [one for one in written.getvalue().split("\n") if one and not one.startswith("  ")]


def test_no_argument_begins_a_log_line(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    logger.warning("run %s (%r) after %d s, %.1f", FORGED, FORGED, 3, 1.25)
    logger.warning("%(id)s", {"id": FORGED})
    logger.warning("%s", ValueError(FORGED))
    logger.warning(f"run {FORGED}")
    assert len(records(written)) == 4
    # Of the four only the last has its text in the message itself, and so a second line.
    assert written.getvalue().count("\n") == 5
    assert r"run x\n2026-01-01T" in written.getvalue()
    assert "after 3 s, 1.2" in written.getvalue()
    assert is_safe(written.getvalue().replace("\n", ""))


def test_a_traceback_keeps_its_lines_and_begins_no_record(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, written = log
    try:
        raise ValueError(FORGED + " postgresql://ann:canary1@h/d")
    except ValueError:
        logger.exception("run %s failed", "r1")
    assert len(records(written)) == 1
    written_text = written.getvalue()
    assert "\n  Traceback (most recent call last):\n" in written_text
    assert "canary1" not in written_text and "ann:***@h" in written_text
    assert is_safe(written_text.replace("\n", ""))


def test_two_handlers_do_not_escape_twice(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    handler = logging.getLogger().handlers[0]
    second_handler = handler.__class__(written)
    second_handler.addFilter(logs.MaskSecrets())
    logging.getLogger().addHandler(second_handler)
    logger.warning("one\ntwo %s", FORGED)
    first, second = (
        written.getvalue()
        .split("Z WARNING queue_workflows.test_display: ", 1)[1]
        .split("one", 2)[1:]
    )
    assert first.strip() == second.strip()


def test_an_error_of_ours_is_one_safe_line(capsys: pytest.CaptureFixture[str]) -> None:
    from queue_workflows import errors

    def body() -> int:
        raise errors.InvalidConfig(f"run {FORGED}: " + "y" * 100_000)

    assert entry_point.run_main("prog", body) == 2
    written_text = capsys.readouterr().err
    assert written_text.count("\n") == 1 and len(written_text) < 10_000
    assert is_safe(written_text.replace("\n", ""))
