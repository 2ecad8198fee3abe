"""Markdown that user text cannot break: escaping, code spans, tables."""

import html
import re
from collections.abc import Sequence

_SPECIAL = re.compile(r"([\\`*\[\]|~#$])")
# An underscore inside a word is plain text in Markdown; escaping it would only spoil names for readers of the source.
_LOOSE_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BLOCK_START = re.compile(r"^(\s*)([-+=]|\d{1,9}(?=[.)]))")


def escape(text: str) -> str:
    """One line of user text as plain text: nothing in it is markup, a table border, HTML or the start of a list."""
    line = html.escape(" ".join(text.split()), quote=False)
    line = _LOOSE_UNDERSCORE.sub(r"\\_", _SPECIAL.sub(r"\\\1", line))
    return _BLOCK_START.sub(_escape_block, line)


def _escape_block(match: re.Match[str]) -> str:
    mark = match.group(2)
    return f"{match.group(1)}{f'&#{ord(mark[0])};{mark[1:]}' if mark.isdigit() else chr(92) + mark}"


def code(text: str) -> str:
    """A code span that also stands in a table cell; the fence is longer than any run of backticks inside."""
    line = " ".join(text.split())
    longest = max((len(run) for run in re.findall(r"`+", line)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}".replace("|", "\\|")


def quote(text: str) -> str:
    """User text as a block quote, line by line as it was written."""
    return "\n".join(f"> {escape(line)}".rstrip() for line in text.strip().splitlines()) or "> (none)"


def table(header: Sequence[str], *, rows: Sequence[Sequence[str]]) -> str:
    """A table of finished cells: user text in them has been through `escape` or `code`."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def bullets(lines: Sequence[str]) -> str:
    """A list, one finished line each."""
    return "\n".join(f"- {line}" for line in lines)
