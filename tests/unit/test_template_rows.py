"""Rows and values in the templates of the dashboard."""

from __future__ import annotations

import jinja2
import pytest

from queue_workflows.service.dashboard import session, view


def test_a_member_of_a_row_hides_no_method_that_templates_call() -> None:
    env = view.Pages().env
    row = {"items": 1, "name": "<a>", "inner": {"get": 2}}
    assert env.from_string("{{ row.name }} {{ row.inner['get'] }}").render(row=row) == "&lt;a&gt; 2"
    assert env.from_string("{{ row.items()|length }}").render(row=row) == "3"
    assert env.from_string("{{ row.none is defined }}").render(row=row) == "False"
    with pytest.raises(jinja2.UndefinedError, match="none"):
        env.from_string("{{ row.none }}").render(row=row)


def test_of_a_value_that_is_too_large_a_page_has_the_size_alone() -> None:
    source = "{% import 'macros.html' as ui with context %}{{ ui.value(value|shown, '/there') }}"
    template = view.Pages().env.from_string(source)
    own = session.Session("read", "", "UTC", "", b"")
    value = {"rows": ["x" * 100] * 1000, "token": "hidden1"}
    large = template.render(session=own, value=value)
    assert large.startswith('<span class="dim">104,030 characters</span> <a href="/there"')
    small = template.render(session=own, value=value | {"rows": []})
    assert "hidden1" not in small and "&#34;rows&#34;: []" in small
    assert "hidden: " in template.render(session=own._replace(scope="look"), value=value)
