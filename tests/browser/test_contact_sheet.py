"""The contact sheet has a picture of each page, and one page that shows them."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser

from tests.browser import contact_sheet
from tests.browser.scenes import PAGES
from tests.support.database import Database


def test_a_part_of_the_contact_sheet(
    own_database: Database, chromium: Browser, tmp_path: Path
) -> None:
    index = contact_sheet.make(
        own_database, chromium, tmp_path, scenes=["on fire"], schemes=["dark"], widths=[320]
    )
    text = index.read_text(encoding="utf-8")
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert len(pictures) == len(PAGES) == 12
    assert all(f'src="{name}"' in text for name in pictures)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
