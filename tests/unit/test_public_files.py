"""The published files have no secret, no open task, no large file and no path of this checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {".venv", ".git", "__pycache__", "build", "dist", "site", "htmlcov"}
OPEN_TASK = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
SECRET = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(?:ghp|gho|pypi)[_-][A-Za-z0-9]{20,}")


def _files() -> list[Path]:
    """Return the files that git knows or would add; without git, all but built and cached ones."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        listed = subprocess.run(
            [git, "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        found = [ROOT / name for name in listed.decode().split("\0") if name]
    else:
        found = [path for path in ROOT.rglob("*") if not _skipped(path.relative_to(ROOT))]
    return sorted(path for path in found if path.is_file() and path != Path(__file__))


def _skipped(path: Path) -> bool:
    return any(
        part in SKIPPED or part.endswith(("_cache", ".egg-info")) or part == ".hypothesis"
        for part in path.parts
    )


FILES = _files()
PICTURES = ROOT / "docs" / "screens"
"""The pictures of the pages, which `python -m tests.browser.contact_sheet` makes."""
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8", errors="replace")
    for path in FILES
}


def _matches(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip():.120}"
        for name, text in TEXTS.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_the_files_are_found() -> None:
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= TEXTS.keys()


def test_no_file_names_the_folder_of_this_checkout() -> None:
    assert not _matches(re.compile(re.escape(str(ROOT)) + r"(?![\w-])"))


def test_no_open_task() -> None:
    assert not _matches(OPEN_TASK)


def test_no_secret() -> None:
    assert not _matches(SECRET)


def test_no_large_or_binary_file() -> None:
    """What was recorded of 0.3.0 is larger than what people write."""
    recorded = {ROOT / "tests" / "oracle" / name for name in ("cases.json", "expected.json")}
    large = [path for path in FILES if path.stat().st_size > 512 * 1024]
    assert not [path for path in large if path not in recorded]
    assert not [path for path in large if path.stat().st_size > 4 * 1024 * 1024]
    pictures = {path for path in FILES if path.parent == PICTURES and path.suffix == ".png"}
    assert not [path for path in FILES if b"\0" in path.read_bytes() and path not in pictures]
