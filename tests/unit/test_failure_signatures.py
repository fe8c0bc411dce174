"""Failures of one cause have one signature, and failures of two causes have two."""

from __future__ import annotations

import re
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queue_workflows import failures
from tests.support.examples import examples
from tests.support.wait import patience

SIBLINGS = {
    "ValueError: row # has no price": [
        "ValueError: row 17 has no price",
        "ValueError: row 23,456 has no price",
        "ValueError: row -3 has no price",
        "ValueError: row\n  1.5e-07\thas no price",
        "ValueError: row 0x7f3a2b has no price",
        "ValueError: row 550e8400-e29b-41d4-a716-446655440000 has no price",
        "ValueError: row 550E8400-E29B-41D4-A716-446655440000 has no price",
        "ValueError: row a8f3c2e9 has no price",
        "ValueError: row deadbe1f has no price",
        "ValueError: row 9c1185a5c5e9fc54612808977ee8f548b2258d31 has no price",
        "ValueError: row ٣٤ has no price",
        "ValueError: row 2026-03-01T06:00:00.5+01:00 has no price",
        "ValueError: row 10.0.0.1:5432 has no price",
    ],
    "OutOfMemoryError: CUDA: tried to allocate # (GPU #: # left)": [
        "OutOfMemoryError: CUDA: tried to allocate 2.50 GiB (GPU 0: 1 MB left)",
        "OutOfMemoryError: CUDA: tried to allocate 512.00 MiB (GPU 1: 23.6GB left)",
    ],
    "TimeoutError: no reply within #": [
        "TimeoutError: no reply within 3 s",
        "TimeoutError: no reply within 9.5s",
        "TimeoutError: no reply within 250 ms",
        "TimeoutError: no reply within 2 minutes",
        "TimeoutError: no reply within 3 µs",
    ],
    "LookupError: no item '…' in the list": [
        "LookupError: no item 'a' in the list",
        "LookupError: no item 'it\\'s 5' in the list",
        "LookupError: no item 'ann's file' in the list",
        'LookupError: no item "b c" in the list',
        "LookupError: no item `d` in the list",
        "LookupError: no item b'\\x00' in the list",
        "LookupError: no item “e” in the list",
        "LookupError: no item „f“ in the list",
        "LookupError: no item \u2018g\u2019 in the list",
        "LookupError: no item «h i» in the list",
        "LookupError: no item 「りんご」 in the list",
        "LookupError: no item '' in the list",
    ],
    "OSError: cannot read /…: disk full": [
        "OSError: cannot read /data/x/7.csv: disk full",
        "OSError: cannot read ../x.csv: disk full",
        "OSError: cannot read ~/x: disk full",
        "OSError: cannot read data/items/7.csv: disk full",
        "OSError: cannot read a/b/c: disk full",
        "OSError: cannot read C:\\Users\\ann\\x.csv: disk full",
        "OSError: cannot read \\\\nas\\share\\x: disk full",
        "OSError: cannot read s3://bucket/x/7: disk full",
        "OSError: cannot read https://example.com/a?b=1&c=2: disk full",
    ],
    "TypeError: got [#, …]": [
        "TypeError: got [1, 2]",
        "TypeError: got [1,2,3,4]",
    ],
    "Failed: item# of box-# and job_#": [
        "Failed: item7 of box-2 and job_12",
        "Failed: item41 of box-11 and job_1",
    ],
    "Fehler: Stück # in Köln": ["Fehler: Stück 7 in Köln", "Fehler: Stück 8 in Ko\u0308ln"],
    "app.errors.S3Error: status #": ["app.errors.S3Error: status 503"],
    "the handler called sys.exit(#)": ["the handler called sys.exit(3)"],
    "KeyError: '…'": ["KeyError: 'price'", "KeyError: 'id'"],
    "RuntimeError": ["RuntimeError"],
    "can't open it, it's gone": ["can't open it, it's gone"],
    "E: and/or n/a": ["E: and/or n/a"],
}


@pytest.mark.parametrize("expected", SIBLINGS)
def test_failures_of_one_cause_have_one_signature(expected: str) -> None:
    assert {text: failures.signature(text) for text in SIBLINGS[expected]} == dict.fromkeys(
        SIBLINGS[expected], expected
    )


def test_failures_of_other_causes_have_other_signatures() -> None:
    texts = [
        "ValueError: row 1 has no price", "KeyError: row 1 has no price",
        "ValueError: row 1 has no date", "S3Error: x", "S4Error: x", "int32: x", "x in Köln",
        "x in Kiel", "a: 'b' failed", "a: 'b' was skipped",
    ]  # fmt: skip
    assert len({failures.signature(text) for text in texts}) == len(texts)


def test_a_quoted_text_that_was_cut_is_one_too() -> None:
    begin = "ValueError: cannot parse '"
    texts = [begin + letter * 5000 + "' of a.csv" for letter in "ab"]
    assert {failures.signature(text) for text in texts} == {"ValueError: cannot parse '…'"}
    assert failures.signature(begin + "a" * 50) == "ValueError: cannot parse '…'"


def test_a_signature_is_short() -> None:
    found = failures.signature("ValueError: " + "word " * 5000)
    assert len(found) == failures.SHOWN
    assert found.endswith("…")
    assert failures.signature("") == ""


@given(st.text(max_size=1200))
@settings(max_examples=examples(200))
def test_no_text_raises(text: str) -> None:
    found = failures.signature(text)
    assert len(found) <= failures.SHOWN
    assert re.fullmatch("[0-9a-f]{16}", failures.group_id(found))


HOSTILE = ["'", '"', "`", "\\'", "a'", " '", "a-", "-1", "1-", "/", "a/", ".a", "a.b/", "„", "«",
           "0a", "a0", "1, ", "'a',", "://", "a://", "C:\\", "\\\\", "#, ", "́"]  # fmt: skip


def test_no_text_takes_long() -> None:
    took_s: dict[str, float] = {}
    for part in (*HOSTILE, *string.punctuation):
        begun = time.perf_counter()
        for number in range(10):
            failures.signature(f"E: {number * part}{part * 1000}")
        took_s[part] = time.perf_counter() - begun
    longest = max(took_s, key=took_s.__getitem__)
    assert took_s[longest] < patience(0.5), longest
