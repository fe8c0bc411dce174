"""Which patterns of `matches` are tried start by start, as their search cannot be interrupted."""

from __future__ import annotations

from queue_workflows.refs import safe_patterns


def test_only_patterns_without_an_anchor_are_tried_start_by_start() -> None:
    assert not safe_patterns.safe_pattern(r"^x.*y.*z").costly
    assert not safe_patterns.safe_pattern(r"\Ax.*y.*z").costly
    assert safe_patterns.safe_pattern(r"x.*y.*z").costly
    assert safe_patterns.safe_pattern(r"(?m)^x.*y.*z").costly
    assert safe_patterns.safe_pattern(r"^x|a.*b.*c").costly
