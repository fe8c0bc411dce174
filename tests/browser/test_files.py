"""The files of runs: shown as what they are, downloaded, and uploaded as an answer."""

from __future__ import annotations

import base64
import json
from collections.abc import Generator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import browsers
from tests.browser.browsers import Site, Visitor, settled
from tests.support import factories
from tests.support.database import Database
from tests.support.wait import until

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
"""A picture of one pixel."""
SCRIPT = "<script>document.title = 'it ran'; alert(1)</script>"
WRITTEN = {
    "picture.png": PNG,
    "table.csv": "".join(["name,price\n", *(f"row {n},{n}\n" for n in range(300))]).encode(),
    "value.json": json.dumps({"a": SCRIPT}).encode(),
    "drawing.svg": f"<svg xmlns='http://www.w3.org/2000/svg'>{SCRIPT}</svg>".encode(),
    "page.html": f"<!doctype html><title>t</title>{SCRIPT}".encode(),
    "data.bin": bytes(range(256)) * 400,
}
"""The files of a run, with names that say what is in them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only folder in which runs may have files."""
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def site(own_database: Database, folder: Path) -> Generator[Site]:
    """A service that reads and writes files there, and has no rows but those of these tests."""
    with browsers.showing(own_database, "empty", QUEUE_WORKFLOWS_OUT_ROOTS=str(folder)) as made:
        yield made


@pytest.fixture
def run_id(site: Site, folder: Path) -> str:
    """A run that has written files of all kinds."""
    out = folder / "written"
    out.mkdir(exist_ok=True)
    for name, content in WRITTEN.items():
        (out / name).write_bytes(content)
    with site.database() as conn:
        return factories.run(conn, status="completed", out_dir=str(out))


def show(page: Page, name: str) -> None:
    """Follow the link to a file in the list of files."""
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("link", name="Download", exact=True)).to_be_visible()


def test_pictures_tables_and_texts_are_shown(visitor: Visitor, run_id: str) -> None:
    page = settled(visitor.open(f"/runs/{run_id}"))
    page.get_by_role("link", name="Outputs", exact=True).click()
    show(page, "picture.png")
    picture = page.locator("img.output")
    expect(picture).to_have_attribute("alt", "picture.png")
    until(lambda: picture.evaluate("image => image.complete && image.naturalWidth === 1"))
    page.go_back()
    show(page, "table.csv")
    expect(page.get_by_role("cell", name="row 99", exact=True)).to_be_visible()
    expect(page.locator("main table tr")).to_have_count(101)
    expect(page.locator("main")).to_contain_text("The first 100 rows")
    page.go_back()
    show(page, "value.json")
    expect(page.locator("pre.log")).to_contain_text("<script>document.title")


@pytest.mark.parametrize("name", ["drawing.svg", "page.html", "data.bin"])
def test_other_files_are_downloads_alone(visitor: Visitor, run_id: str, name: str) -> None:
    """Also by the address with which a page has its pictures: SVG and HTML would run scripts."""
    page = settled(visitor.open(f"/runs/{run_id}/files"))
    show(page, name)
    expect(page.locator("main")).to_contain_text("Files of this type are not shown here.")
    expect(page.locator("main").locator("img, iframe, object, embed")).to_have_count(0)
    link = page.get_by_role("link", name="Download", exact=True)
    for _ in range(2):
        with page.expect_download() as got:
            link.click()
        assert got.value.suggested_filename == name
        assert Path(got.value.path()).read_bytes() == WRITTEN[name]
        link.evaluate("link => { link.href += '&inline=1'; }")
    expect(page.locator("h1")).to_have_text(f"Files of run {run_id}")


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "plain"])
def test_a_file_is_uploaded_as_the_answer_of_a_question(
    site: Site, chromium: Browser, folder: Path, scripts: bool
) -> None:
    """One of another type is refused with the reason, and the form is there again."""
    out = folder / f"asks-{scripts}"
    with site.database() as conn:
        run_id = factories.run(conn, workflow_name="prices", out_dir=str(out))
        factories.node(
            conn, run_id, "load", node_module="__input__file_upload", status="awaiting_input",
            inputs={"target": "answer"}, input_spec={
                "widget": "file_upload", "prompt": "Which prices", "accept": ".csv",
            },
        )  # fmt: skip
    with site.visitor(chromium, java_script_enabled=scripts) as visitor:
        page = visitor.open("/inbox")
        # The other one has a question of the same text.
        question = page.locator("article", has=page.locator(f'a[href*="{run_id}"]'))
        question.get_by_role("link", name="Answer", exact=True).click()
        for name in ("prices.png", "prices.csv"):
            given = {"name": name, "mimeType": "text/csv", "buffer": b"name,price\n"}
            page.get_by_label("Upload a file").set_input_files(given)
            page.get_by_role("button", name="Answer", exact=True).click()
            if name == "prices.png":
                expect(page.locator("main p.alarm")).to_contain_text("it accepts .csv")
        expect(page.locator("[data-flash]")).to_contain_text("Answered: load takes")
        assert all("422" in each for each in visitor.noise), visitor.noise
    (saved,) = (path for path in out.rglob("*") if path.is_file())
    assert (saved.name, saved.read_bytes()) == ("prices.csv", b"name,price\n")
    with site.database() as conn:
        query = "SELECT value FROM workflow_input_submissions WHERE run_id = %s"
        assert saved.samefile(factories.one(conn, query, run_id))
