"""Define the model that the gpu nodes share: it paints words as circles.

It stands in for an image model and needs no GPU. A worker loads it once, for its first painting.
"""

from __future__ import annotations

import html
import time
import zlib
from collections.abc import Mapping

from queue_workflows import model_registry

MODEL = "painter"
COLOURS = 5
LOAD_S = 0.5
PAINT_S = 0.05


class Painter:
    """A loaded model; `paint` is the only thing that it can do."""

    def paint(self, words: Mapping[str, int]) -> str:
        """Return a picture of counted words as SVG: the more often a word, the larger its circle.

        The circles have the classes c0 to c4; the page that shows them chooses the colours.
        """
        time.sleep(PAINT_S)  # A real model computes here; the demo's progress stays visible.
        circles = ""
        for word, times in words.items():
            # Unlike hash(), a checksum is the same in each process, and so is the picture.
            place = zlib.crc32(word.encode())
            circles += (
                f'<circle class="c{place % COLOURS}" cx="{place // 7 % 200}"'
                f' cy="{place // 1400 % 120}" r="{len(word) + 6 * times}">'
                f"<title>{html.escape(word)}: {times}</title></circle>"
            )
        start = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 120">'
        return f"{start}{circles}</svg>"


def load() -> Painter:
    """Load the model."""
    time.sleep(LOAD_S)  # Real weights take longer; this one shows that it happens once.
    print("loaded the painter")
    return Painter()


def register() -> None:
    """Register the loader of the model; safe to call again."""
    model_registry.register(model_registry.ModelSpec(id=MODEL, loader=load, est_vram_gb=0.1))
