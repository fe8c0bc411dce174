"""The colours of states can be told apart, also by deuteranopes, and read on both backgrounds."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

import queue_workflows

STYLE = Path(queue_workflows.__path__[0]) / "service" / "dashboard" / "static" / "dashboard.css"
STATES = ("done", "failed", "running", "queued", "asks", "ended", "warning", "load")
TEXTS = ("text", "dim", "link")
DEUTERANOPE = (
    (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881),
)  # fmt: skip
"""Machado, Oliveira, Fernandes 2009, severity 1, in linear RGB."""
Colour = tuple[float, float, float]


def themes() -> dict[str, dict[str, str]]:
    blocks = re.findall(r":root \{(.*?)\}", STYLE.read_text(encoding="utf-8"), re.S)
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks)
    return {"light": light, "dark": dark}


def linear(text: str) -> Colour:
    parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return red, green, blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted(
        0.2126 * red + 0.7152 * green + 0.0722 * blue
        for red, green, blue in (linear(one), linear(other))
    )
    return (light + 0.05) / (dark + 0.05)


def seen(colour: Colour) -> Colour:
    """What a deuteranope sees."""
    red, green, blue = (
        min(1.0, max(0.0, sum(m * c for m, c in zip(row, colour, strict=True))))
        for row in DEUTERANOPE
    )
    return red, green, blue


def lab(colour: Colour) -> Colour:
    red, green, blue = colour
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one: Colour, other: Colour) -> float:
    """The difference of two colours in Lab, as CIE94 has it: less than the plain distance."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    chroma1, chroma2 = math.hypot(a1, b1), math.hypot(a2, b2)
    chroma = chroma1 - chroma2
    hue2 = max(0.0, (a1 - a2) ** 2 + (b1 - b2) ** 2 - chroma**2)
    weight = math.sqrt(chroma1 * chroma2)
    return math.sqrt(
        (l1 - l2) ** 2
        + (chroma / (1 + 0.045 * weight)) ** 2
        + hue2 / (1 + 0.015 * weight) ** 2
    )  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_states_differ_for_everybody(theme: str) -> None:
    colours = {name: linear(themes()[theme][name]) for name in STATES}
    for (one, a), (other, b) in itertools.combinations(colours.items(), 2):
        assert difference(lab(a), lab(b)) >= 10, (one, other)
        assert difference(lab(seen(a)), lab(seen(b))) >= 10, (one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["background", "panel"])
def test_states_and_texts_can_be_read(theme: str, ground: str) -> None:
    colours = themes()[theme]
    for name in (*STATES, *TEXTS):
        assert contrast(colours[name], colours[ground]) >= 4.5, name


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ground", ["background", "panel", "button", "alarm"])
def test_borders_and_the_focus_can_be_seen(theme: str, ground: str) -> None:
    colours = themes()[theme]
    for name in ("dim", "focus", "strong"):
        assert contrast(colours[name], colours[ground]) >= 3, name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_filled_part_of_a_bar_can_be_seen(theme: str) -> None:
    colours = themes()[theme]
    for name in STATES:
        assert contrast(colours[name], colours["line"]) >= 3, name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_buttons_and_alarms_can_be_read(theme: str) -> None:
    colours = themes()[theme]
    assert contrast(colours["strong"], colours["on-strong"]) >= 4.5
    assert contrast(colours["failed"], colours["background"]) >= 4.5
    for name in TEXTS:
        assert contrast(colours[name], colours["alarm"]) >= 4.5, name
        assert contrast(colours[name], colours["button"]) >= 4.5, name
