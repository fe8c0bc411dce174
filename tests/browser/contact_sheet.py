"""Make pictures of the pages: `python -m tests.browser.contact_sheet FOLDER [--docs]`.

FOLDER gets each of the twelve pages in four scenes, light and dark, in three widths, those that
find nothing among usual work, and an index.html that shows all of them. `--docs` also makes the
pictures of README and docs in `docs/screens`, out of runs of the demo and of the tutorial's app.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import itertools
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from queue_workflows import db
from tests.browser import browsers
from tests.browser.browsers import settled
from tests.browser.scenes import EMPTY, PAGES, SCENES
from tests.support import commands, factories, process_state, reaper
from tests.support.database import Database, throw_away_server
from tests.support.wait import until

SHEET = tuple(name for name in SCENES if name != "hostile names")
SCHEMES = ("light", "dark")
WIDTHS = {1440: 900, 768: 1024, 320: 640}
"""Widths of the window with their heights. A picture has the whole page."""
SCREENS = Path(__file__).parents[2] / "docs" / "screens"
APP = "tests.browser.folder_app"
"""Its nodes would be declared in this process, too, if it were imported here."""
TEXTS = 100
"""The files that its workflow counts."""
WITHOUT_WORDS = (12, 57)
_INDEX = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Contact sheet</title>
<style>
body {{ font: 14px/1.4 sans-serif; margin: 1rem; background: #777; color: #fff }}
h2 {{ position: sticky; top: 0; background: #777; margin: 0; padding: .5rem 0 }}
div {{ display: flex; gap: .75rem; overflow-x: auto; align-items: flex-start }}
figure {{ margin: 0 0 1rem }}
img {{ height: 420px; width: auto; max-width: 640px; object-fit: cover; object-position: top }}
</style>
{parts}
</html>
"""


def _write(folder: Path) -> None:
    """Write the files that the workflow counts."""
    folder.mkdir()
    for number in range(TEXTS):
        text = "" if number in WITHOUT_WORDS else "words of a text\n" * (number % 9 + 1)
        (folder / f"text-{number:02}.txt").write_text(text, encoding="utf-8")


def make(
    database: Database,
    browser: Browser,
    folder: Path,
    *,
    scenes: Iterable[str] = SHEET,
    schemes: Sequence[Any] = SCHEMES,
    widths: Iterable[int] = tuple(WIDTHS),
) -> Path:
    """Make the pictures of these scenes in a folder; return the page that shows all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str], list[str]] = {}
    for scene in scenes:
        templates = PAGES | EMPTY if scene == "usual" else PAGES
        with browsers.showing(database, scene) as site:
            for scheme, width in itertools.product(schemes, widths):
                site.refresh()
                window = {"viewport": {"width": width, "height": WIDTHS[width]}}
                with site.visitor(browser, color_scheme=scheme, **window) as visitor:
                    page = visitor.context.new_page()
                    for name, template in templates.items():
                        settled(visitor.open(site.scene.address(template), page))
                        file = f"{scene} {name} {scheme} {width}.png".replace(" ", "-")
                        picture = page.screenshot(full_page=True, animations="disabled")
                        folder.joinpath(file).write_bytes(picture)
                        found.setdefault((scene, name), []).append(file)
    index = folder / "index.html"
    index.write_text(_INDEX.format(parts="\n".join(_shown(found))), encoding="utf-8")
    return index


def _shown(found: dict[tuple[str, str], list[str]]) -> Iterable[str]:
    for (scene, name), files in found.items():
        yield f"<h2>{html.escape(name)}, {html.escape(scene)}</h2><div>"
        for file in files:
            yield (
                f'<figure><a href="{file}"><img src="{file}" alt="{file}" loading="lazy"></a>'
                f"<figcaption>{file.removesuffix('.png')}</figcaption></figure>"
            )
        yield "</div>"


def picture_docs(database: Database, browser: Browser, folder: Path) -> None:
    """Make the pictures of README and docs, out of runs of the demo and of the tutorial's app.

    Of a hundred files two have no words, and a question waits for its answer.
    """
    folder.mkdir(exist_ok=True)
    own = database.fresh_name()
    dsn = database.create_migrated(own)
    env = {"QUEUE_WORKFLOWS_DB_URL": dsn, "QUEUE_WORKFLOWS_HOST_LABEL": "box-1"}
    with contextlib.ExitStack() as stack:
        stack.callback(database.drop, own)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cli = stack.enter_context(commands.commands(**env))
        _write(place / "texts")
        demo = cli.run(
            "queue-workflows", "demo", "--yes", "--out", str(place / "demo"), timeout_s=120,
            QUEUE_WORKFLOWS_APP_DASHBOARD="0",
        )  # fmt: skip
        assert demo.process.returncode == 0, demo.err
        up = cli.start(
            "queue-workflows", "up", "--app", APP, "--cpu", "4",
            QUEUE_WORKFLOWS_APP_DASHBOARD="1",
        )  # fmt: skip
        link = until(lambda: browsers.LINK.search(up.err), timeout_s=60)
        submitted = cli.run(
            "queue-workflows", "run", "texts", "--app", APP, "--no-wait",
            "--input", f"folder={place / 'texts'}", "--out", str(place / "run"),
        )  # fmt: skip
        assert submitted.process.returncode == 0, submitted.err
        run_id = submitted.out.strip()
        with db.connect(url=dsn) as conn:
            ended = "SELECT count(*) FROM workflow_map_items WHERE state IN ('done', 'failed')"
            until(lambda: factories.one(conn, ended) == TEXTS, timeout_s=120)
            picture_book = factories.one(
                conn, "SELECT id FROM workflow_runs WHERE workflow_name = 'picture_book'"
            )
        window = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"}
        visitor = stack.enter_context(browsers.entered(browser, link, **window))
        page = visitor.context.new_page()
        for name, path in {
            "run": f"/runs/{picture_book}", "now": "/", "failures": "/failures", "inbox": "/inbox",
            "waiting-run": f"/runs/{run_id}", "map": f"/runs/{run_id}/map?node=count",
        }.items():  # fmt: skip
            settled(visitor.open(path, page))
            picture = page.screenshot(animations="disabled")
            folder.joinpath(f"{name}.png").write_bytes(picture)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the pictures on a server of its own; print where they are."""
    parser = argparse.ArgumentParser(prog="python -m tests.browser.contact_sheet")
    parser.add_argument("folder", type=Path, help="where the pictures and index.html go")
    parser.add_argument("--docs", action="store_true", help="also make those of docs/screens")
    given = parser.parse_args(argv)
    process_state.forget_environment()
    reaper.start()
    with throw_away_server() as url, Database(url) as own, browsers.chromium() as browser:
        own.migrate()
        if given.docs:
            picture_docs(own, browser, SCREENS)
        print(make(own, browser, given.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
