"""Render the picture book as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from queue_workflows.demo.book_texts import Text

PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>A picture book</title>
<style>
body {{ margin: 2rem auto; max-width: 60rem; font: 1rem/1.5 Georgia, serif; color: #222 }}
main {{ display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)) }}
article {{ border: 1px solid #ddd; border-radius: .5rem; overflow: hidden }}
article svg {{ display: block; background: #faf7f0 }}
article h2, article p {{ margin: .75rem 1rem; white-space: pre-line; overflow-wrap: anywhere }}
circle {{ opacity: .7 }}
{colours}
</style>
<h1>A picture book</h1>
<main>
{cards}
</main>
</html>
"""


def render(cards: Iterable[tuple[Text, str]], colours: Sequence[str]) -> str:
    """Return the page: each text below its painting (SVG), in the given order and colours."""
    return PAGE.format(
        colours="\n".join(f".c{n} {{ fill: {colour} }}" for n, colour in enumerate(colours)),
        cards="\n".join(
            f"<article>{painting}<h2>{html.escape(text['title'])}</h2>"
            f"<p>{html.escape(text['body'])}</p></article>"
            for text, painting in cards
        ),
    )
