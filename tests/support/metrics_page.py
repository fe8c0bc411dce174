"""Read the page of metrics for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support import console

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str | None = None) -> Series:
    """Return the values of a page by name and labels; a series stands there once.

    None: the page that the command prints now.
    """
    found: Series = {}
    page = console.printed("metrics") if text is None else text
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(found: Series, name: str, **labels: str) -> float:
    """Return the sum of the series of a metric that have these labels."""
    return sum(
        number
        for (one, given), number in found.items()
        if one == f"queue_workflows_{name}" and labels.items() <= dict(given).items()
    )


def falls(before: Series, after: Series) -> dict[Any, Any]:
    """Return the counters, with buckets, counts and sums, that are lower than before or gone."""
    return {
        key: (number, after.get(key))
        for key, number in before.items()
        if key[0].endswith(("_total", "_bucket", "_count", "_sum")) and after.get(key, -1) < number
    }
