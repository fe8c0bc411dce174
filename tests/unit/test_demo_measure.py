"""What the demo measures, compares and writes, without the engine."""

from __future__ import annotations

import os
import textwrap
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from queue_workflows.dag import definition
from queue_workflows.demo import files, likeness, listing, models, source, survey, words, workflows
from queue_workflows.demo.nodes import measure
from queue_workflows.demo.report import blocks, contents, html, markdown, sections

MODEL = models.CodeWords({"self": 10, "return": 10, "parse": 3}, documents=10)


def at(path: str, above: tuple[str, ...] = ()) -> listing.Source:
    return listing._source(path, above, 100)


def measured(text: str, path: str = "pack/mod.py") -> source.Measured:
    return source.measure(at(path), text.encode())


def findings(**changes: Any) -> sections.Findings:
    counted, functions = [], []
    for path, text in changes.pop("texts", {"a/x.py": "def f(a):\n    return a or 1\n"}).items():
        file, found, _ = source.measure(at(path), text.encode())
        counted.append(file)
        functions += found
    given = listing.Listing(folder="/code/app", python="3.12", sources=[], left_out={})
    return sections.Findings(
        **{
            "survey": survey.make_survey(given, counted, functions),
            "pairs": [],
            "positions": [],
            "groups": likeness.like_functions([], MODEL, lambda _: None),
            "words": {},
        }
        | changes
    )


# --- lines, definitions, complexity --------------------------------------------------------------


def test_every_line_is_one_kind() -> None:
    text = (
        '"""Module\n\ndoc."""\n'  # 3 docstring lines, the empty one too
        "\n"
        "# a comment\n"
        "import os  # code, not comment\n"
        "X = '''\n# no comment\n\n'''\n"  # 4 lines of code
        "def f():\n"
        "    '''One line.'''\n"  # docstring
        "def g(): 'shares its line'\n"  # code
        "Y = ('a'\n"
        "     # a comment between two strings\n"
        "     'b')\n"
    )
    file = measured(text).file
    assert (file["lines"], file["code"], file["comments"], file["docstrings"]) == (16, 9, 2, 4)


@pytest.mark.parametrize(
    ("body", "complexity"),
    [
        ("pass", 1),
        ("return a if b else c", 2),
        ("return a and b or c", 3),
        ("return a and b and c", 3),
        ("if a: pass\n elif b: pass\n else: pass", 3),
        ("for a in b: pass\n while c: pass", 3),
        ("try: pass\n except A: pass\n except B: pass\n finally: pass", 3),
        ("return [x for x in y if x if z]", 4),
        ("match a:\n  case 1: pass\n  case _: pass", 3),
        ("def inner():\n  if a: pass\n return lambda: a or b", 2),
        ("class C:\n  x = 1 if a else 2", 1),
    ],
)
def test_complexity_counts_the_ways_through(body: str, complexity: int) -> None:
    function = measured(f"def f():\n {body}\n").functions[0]
    assert (function["name"], function["complexity"]) == ("f", complexity)


def test_public_definitions_and_their_docstrings() -> None:
    text = (
        '"""Doc."""\n'
        "class A:\n"
        "    '''Doc.'''\n"
        "    def m(self): pass\n"
        "    def _m(self): pass\n"
        "    def __init__(self): pass\n"
        "class _B:\n"
        "    def m(self): '''Doc.'''\n"
        "def f():\n"
        "    '''Doc.'''\n"
        "    def inner(): pass\n"
    )
    file = measured(text).file
    assert (file["public"], file["documented"]) == (4, 3)  # module, A, A.m, f
    assert (file["classes"], file["functions"]) == (2, 6)
    assert measured(text, "pack/_mod.py").file["public"] == 0
    assert measured(text, "pack/__init__.py").file["public"] == 4


def test_functions_have_dotted_names_and_places() -> None:
    text = "class A:\n    @deco\n    async def m(self):\n        def n():\n            pass\n"
    names = {f["name"]: (f["line"], f["lines"]) for f in measured(text).functions}
    assert names == {"A.m": (3, 3), "A.m.n": (4, 2)}


def test_only_long_functions_that_are_not_nested_are_compared() -> None:
    body = "x = 1\n" * source.COMPARED_LINES
    inner = textwrap.indent(f"def inner():\n{textwrap.indent(body, '  ')}", "  ")
    functions = measured(f"def long():\n{inner}").functions
    compared = {f["name"]: f["words"] is not None for f in functions}
    assert compared == {"long": True, "long.inner": False}
    local = f"def long():\n  class C:\n{textwrap.indent(inner, '  ')}"
    assert [f["words"] for f in measured(local).functions if "inner" in f["name"]] == [None]
    assert measured("def short():\n    pass\n").functions[0]["words"] is None


# --- odd sources ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"x = 1\ndef (:\n", "line 2: "),
        (b"x = '\xff'\n", "encoding"),
        (b"x = 1\n\nx = '\xff'\n", "byte 0xff at 12 is not utf-8"),
        (b"# -*- coding: klingon -*-\n", "klingon"),
        (b"x = 1\x00\n", "null bytes"),
        (b"x = " + b"(" * 3000 + b")" * 3000, "nested"),
    ],
)
def test_what_does_not_parse_is_a_problem_and_no_error(raw: bytes, problem: str) -> None:
    file, functions, found = source.measure(at("pack/bad.py"), raw)
    assert problem in (file["problem"] or "")
    assert file["lines"] == max(1, raw.count(b"\n"))
    assert (file["code"], functions, found) == (0, [], Counter())


@pytest.mark.parametrize(
    "raw",
    [
        b"\xef\xbb\xbfx = 1\n# c\ny = 2\n",
        "# coding: latin-1\nx = 'é'\n\ny = 2\n".encode("latin-1").replace(b"\n\n", b"\n"),
        b"x = 1\r\n# c\r\ny = 2\r\n",
        b"x = 1\r# c\ry = 2",
    ],
)
def test_encodings_and_line_ends(raw: bytes) -> None:
    file = source.measure(at("pack/mod.py"), raw).file
    assert (file["problem"], file["lines"], file["code"], file["comments"]) == (None, 3, 2, 1)


def test_a_deep_tree_is_no_problem() -> None:
    text = "def f(a):\n    return " + " + ".join(["a"] * 900) + "\n"
    assert measured(text).functions[0]["complexity"] == 1


def test_an_empty_source() -> None:
    file = measured("").file
    assert (file["problem"], file["lines"], file["public"]) == (None, 0, 1)


# --- listing -------------------------------------------------------------------------------------


def test_a_listing_groups_sources_by_package_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    for path in ("top.py", "b/__init__.py", "b/m.py", "b/tests/t.py", "a/x.py", ".git/h.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("x = 1\n")
    (tmp_path / "b" / "site-packages").mkdir()
    (tmp_path / "b" / "__pycache__").mkdir()
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    (tmp_path / "self.py").symlink_to("self.py")
    os.mkfifo(tmp_path / "pipe.py")
    found = listing.list_sources(tmp_path)
    assert [(s["package"], s["module"], s["path"]) for s in found["sources"]] == [
        ("a", "a.x", "a/x.py"),
        ("b", "b", "b/__init__.py"),
        ("b", "b.m", "b/m.py"),
        ("top", "top", "top.py"),
    ]
    assert found["left_out"] == {
        "folders of installed code": 1,
        "folders of tests": 1,
        "links and special files": 3,
    }


def test_a_folder_that_is_a_package_gives_its_name_to_what_is_in_it(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").touch()
    (inner / "m.py").touch()
    assert [s["module"] for s in listing.list_sources(inner)["sources"]] == [
        "outer.inner",
        "outer.inner.m",
    ]


def test_names_that_are_no_utf_8_can_be_stored() -> None:
    path = os.fsdecode(b"p\xff/m\xff.py")
    found = listing._source(path, (), 1)
    assert (found["path"], found["package"], found["module"]) == (path, "p?", "p?.m?")


@pytest.mark.parametrize("name", ["gone", "file.py"])
def test_a_folder_that_is_none_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.py").touch()
    with pytest.raises(NotADirectoryError, match=name):
        listing.list_sources(tmp_path / name)


@pytest.mark.parametrize(
    "sizes", [[], [5], [0] * 7, [10**9, 1, 1], [1] * 100, [3, 10**6, 9, 10**5]]
)
@pytest.mark.parametrize("parts", [1, 3, 24])
def test_shares_are_all_of_it_once_in_order(sizes: list[int], parts: int) -> None:
    sources = [listing._source(f"p/m{n}.py", (), size) for n, size in enumerate(sizes)]
    shares = [listing.share_of(sources, part, parts) for part in range(parts)]
    assert [each for share in shares for each in share] == sources


def test_shares_are_about_equal() -> None:
    sources = [listing._source(f"p/m{n}.py", (), 1000 + n) for n in range(240)]
    assert {len(listing.share_of(sources, part, 24)) for part in range(24)} <= {9, 10, 11}


# --- imports -------------------------------------------------------------------------------------


def test_imports_name_modules_and_relative_ones_start_at_home() -> None:
    text = "import os.path, json as j\nfrom . import a\nfrom ..b import c\nfrom .... import d\n"
    assert measured(text, "top/sub/mod.py").file["imports"] == [
        "json", "os.path", "top.b.c", "top.sub.a",
    ]  # fmt: skip
    assert measured("from . import a\n", "top/sub/__init__.py").file["imports"] == ["top.sub.a"]


def test_an_import_is_found_by_its_longest_known_beginning() -> None:
    paths = ("json/__init__.py", "json/decoder.py", "src/app/__init__.py", "src/app/db/__init__.py",
             "src/app/db/pool.py", "scripts/types.py", "solo.py")  # fmt: skip
    modules = survey.Modules([measured("", path).file for path in paths])
    asked = ("json", "json.decoder.X", "app.db.pool.get", "src.app", "app", "solo", "types", "os")
    assert [modules.package_of(name) for name in asked] == [
        "json", "json", "src.app.db", "src.app", "src.app", "solo", None, None,
    ]  # fmt: skip


def test_links_count_files_and_packages() -> None:
    texts = {
        "a/x.py": "import b, os\n",
        "a/y.py": "import b.m\nimport a.x\n",
        "b/__init__.py": "",
        "c.py": "import b.m",
    }
    packages = {p["name"]: p for p in findings(texts=texts).survey["packages"]}
    assert packages["a"]["imports"] == {"b": 2}
    assert [packages[name]["imported_by"] for name in "abc"] == [0, 2, 0]


# --- words and likeness --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("parse_http_date", ("parse", "http", "date")),
        ("parseHTTPDate", ("parse", "http", "date")),
        ("__init__", ("init",)),
        ("HTML", ("html",)),
        ("größeÄndern", ("größeändern",)),
        ("x", ()),
    ],
)
def test_names_are_split_into_words(name: str, parts: tuple[str, ...]) -> None:
    assert words.split(name) == parts


def test_words_are_counted_with_their_names() -> None:
    assert words.count_words("get_item(item_a, item_a, 12)") == {"get": 1, "item": 3}


def function(name: str, *, lines: int = 9, **counts: int) -> source.Function:
    return source.Function(
        path=f"{name}.py", package=name, name=name, line=1, lines=lines, complexity=1, words=counts
    )


def test_vectors_of_the_same_words_are_alike_and_of_others_not() -> None:
    one, same, other = (
        MODEL.vector(c) for c in ({"parse": 3, "date": 2}, {"date": 2, "parse": 3}, {"socket": 1})
    )
    assert likeness.cosine(one, same) == pytest.approx(1)
    assert abs(likeness.cosine(one, other)) < 0.2
    assert MODEL.weight("never") > MODEL.weight("parse") > MODEL.weight("self")
    assert likeness.cosine(MODEL.vector({}), one) == 0


def test_near_duplicates_join_the_group_of_the_first() -> None:
    body = {"self": 4, "socket": 3, "timeout": 2, "retry": 2}
    functions = [
        function("a", **body),
        function("b", lines=20, **{**body, "retry": 3}),
        function("c", color=4, widget=3, self=4),
        function("d", lines=30, **body),
    ]
    reported: list[float] = []
    groups = likeness.like_functions(functions, MODEL, reported.append)
    assert (groups["compared"], groups["groups"], groups["functions"]) == (4, 1, 3)
    assert [place["name"] for place in groups["largest"][0]["places"]] == ["a", "b", "d"]
    assert groups["repeated"] == 50
    assert 0.9 <= groups["largest"][0]["likeness"] < 1


def test_two_are_enough_for_a_group() -> None:
    alone = [function(name, socket=3, timeout=2) for name in "ab"]
    assert likeness.like_functions(alone, MODEL, lambda _: None)["groups"] == 1


def test_pairs_are_ranked_by_likeness() -> None:
    counts = {"a": {"tcp": 2, "port": 1}, "b": {"tcp": 2, "port": 4}, "c": {"tcp": 1, "pen": 1}}
    vectors = {name: MODEL.vector(each) for name, each in counts.items()}
    reported: list[float] = []
    pairs = likeness.like_pairs(vectors, reported.append)
    assert [(pair["one"], pair["other"]) for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert reported == pytest.approx([1 / 3, 2 / 3, 1])


def test_like_packages_lie_close_on_the_map() -> None:
    counts = {
        "http": {"request": 5, "port": 4}, "ftp": {"request": 4, "port": 5},
        "pen": {"color": 5, "line": 4}, "ink": {"color": 4, "line": 5},
    }  # fmt: skip
    places = {
        p["name"]: p for p in likeness.lay_out({n: MODEL.vector(c) for n, c in counts.items()})
    }

    def apart(one: str, other: str) -> float:
        return abs(places[one]["x"] - places[other]["x"])

    assert max(apart("http", "ftp"), apart("pen", "ink")) < 0.2 < apart("http", "pen")
    assert likeness.lay_out({}) == likeness.lay_out({"a": [1.0], "b": [0.0]}) == []


def test_the_model_knows_rare_words_from_common_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "standard_library", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        models.load_code_words()
    for name, text in {"a": "import socket", "b": "import os", "c": "import io"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    model = models.load_code_words()
    assert model.weight("import") == 1 < model.weight("socket") < model.weight("zzyzx")
    assert likeness.telling_words({"import": 50, "socket": 5}, model, limit=1) == ["socket"]


def test_a_source_that_goes_meanwhile_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "m.py").touch()
    sources = files.write(tmp_path / "listing.json", listing.list_sources(tmp_path))
    (tmp_path / "m.py").unlink()
    measure.run(sources, 0, 1, tmp_path, lambda _: None, threading.Event())
    (file,) = files.read(tmp_path / "measured.json")["files"]
    assert file["problem"] == "No such file or directory"


def test_a_cancelled_part_leaves_the_file_of_another_attempt_alone(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("x = 1\n")
    sources = files.write(tmp_path / "listing.json", listing.list_sources(tmp_path))
    cancel = threading.Event()
    shares: list[float] = []

    def run() -> dict[str, Any]:
        return measure.run(sources, 0, 1, tmp_path, shares.append, cancel)

    assert (run(), shares) == ({"files": 1, "lines": 1}, [1.0])
    written = (tmp_path / "measured.json").read_bytes()
    (tmp_path / "m.py").write_text("")
    cancel.set()
    assert run() == {}
    assert (tmp_path / "measured.json").read_bytes() == written
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "listing.json", "m.py", "measured.json",
    ]  # fmt: skip


# --- the report ----------------------------------------------------------------------------------


def test_the_chosen_section_leads_and_all_are_there() -> None:
    for focus in survey.FOCUSES:
        report = contents.compose(findings(), focus)
        keys = [section.key for section in report.sections]
        assert keys[0] == focus
        assert len(set(keys)) == len(keys) == 9


def test_an_unknown_choice_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'colour'.*size, complexity, documentation, imports"):
        contents.compose(findings(), "colour")


def test_each_option_says_what_it_has_to_tell() -> None:
    options = survey.focuses(findings().survey)
    assert [option["value"] for option in options] == list(survey.FOCUSES)
    assert options[0]["label"] == "Size: a is the largest package, 2 lines of code"
    assert all("nothing found" in o["label"] for o in survey.focuses(findings(texts={}).survey))


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing() -> None:
    page = html.render(contents.compose(findings(), "size"))
    for foreign in ("http:", "https:", "//", "<script", "<link", "@import", "url(", "src="):
        assert foreign not in page.replace("</", "<")
    assert "prefers-color-scheme: dark" in page
    assert page.count("<section") == page.count("</section>") == 9


def test_names_from_the_folder_are_text_and_never_markup() -> None:
    evil = "<img src=x onerror=alert(1)>"
    texts = {f"{evil}/a|b`*.py": "def f():\n    pass\n" * 12, "bad\n.py": "def ("}
    found = findings(
        texts=texts,
        pairs=[likeness.Pair(one=evil, other="b", likeness=0.5)],
        positions=[likeness.Position(name=evil, x=0.5, y=0.5)],
        words={evil: ["w"]},
    )
    report = contents.compose(found, "size")
    assert "<img" not in html.render(report)
    text = markdown.render(report)
    assert "| f | \\<img src=x onerror=alert(1)>/a\\|b\\`\\*.py:1 | 2 |" in text
    assert "| bad .py | line 1:" in text


def test_charts_draw_to_scale() -> None:
    chart = blocks.Bars("t", [blocks.Bar("a", (3, 1), "4"), blocks.Bar("b", (1,), "1")])
    page = html._figure(chart)
    assert 'x="0.00%" width="75.00%"' in page
    assert 'x="75.00%" width="25.00%"' in page
    assert 'class="c1" x="0.00%" width="25.00%"' in page
    assert blocks.Bars("t", []).scale == 1
    assert "█" * 18 + " |" in markdown._bars(chart)
    assert "█" * 19 not in markdown._bars(chart)


def test_the_histogram_counts_every_function_in_its_class() -> None:
    assert sections._classes((1, 2, 5, 10)) == ["1", "2", "3-5", "6-10", "11+"]
    texts = {"a/x.py": "".join(f"def f{n}(a):\n    return {'a or ' * n}a\n" for n in range(12))}
    assert findings(texts=texts).survey["histogram"] == [1, 1, 3, 5, 2, 0, 0]


def test_nothing_is_shown_where_there_is_nothing() -> None:
    page = html.render(contents.compose(findings(texts={}), "size"))
    assert page.count("<figcaption>") == 0
    assert "There are no Python files here." in page


def test_the_workflow_can_run() -> None:
    expanded = definition.expand(workflows.load_workflow("code_report"), workflows.load_pipeline)
    queues = Counter(node["queue"] for node in expanded["nodes"])
    assert queues == {"cpu": 28, "gpu": 4}
    with pytest.raises(KeyError):
        workflows.load_workflow("other")
