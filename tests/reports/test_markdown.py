"""User text in Markdown, checked with a real parser: it stays text, in its own cell."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from reports.markdown import code, escape, quote, table

NASTY = (
    "a|b",
    "`tick` ``two``",
    "<script>alert(1)</script> & <b>",
    "*bold* _loose_ [link](http://x) ![i](y) ~~gone~~",
    "# title",
    "- item",
    "12. item",
    "a\nb\r\nc",
    "back\\slash |",
    "trailing \\",
    "> quoted",
    "=== rule",
)
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Z"]), min_size=1, max_size=30)


def inlines(markdown: str) -> list[Token]:
    """Inline tokens of the parsed page, HTML allowed as on a forge."""
    return [token for token in MarkdownIt("commonmark").enable("table").parse(markdown) if token.type == "inline"]


def plain(token: Token) -> str:
    """Text of an inline token; fails on anything that is markup."""
    children = token.children or []
    assert {child.type for child in children} <= {"text", "text_special"}, [child.type for child in children]
    return "".join(child.content for child in children)


@pytest.mark.parametrize("text", NASTY)
def test_escape_leaves_plain_text(text: str) -> None:
    (token,) = inlines(escape(text))
    assert plain(token) == " ".join(text.split())


@given(ANY_TEXT)
def test_escape_any_text_stays_one_paragraph_of_text(text: str) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(escape(text))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert plain(tokens[1]) == text


@pytest.mark.parametrize("text", NASTY)
def test_table_keeps_user_text_in_its_cell(text: str) -> None:
    cells = inlines(table(("One", "Two"), rows=[(escape(text), code(text))]))
    assert len(cells) == 4
    assert plain(cells[2]) == " ".join(text.split())
    (span,) = cells[3].children or []
    assert span.type == "code_inline"
    assert span.content == " ".join(text.split())


def test_escape_leaves_underscores_inside_names_alone() -> None:
    assert escape("spell_backward") == "spell_backward"


def test_quote_keeps_lines_and_says_when_empty() -> None:
    assert quote("one\n# two\n") == "> one\n> \\# two"
    assert quote(" ") == "> (none)"
