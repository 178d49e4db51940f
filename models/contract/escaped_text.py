"""Text of others made safe for where it is shown: a terminal or Markdown.

HTML is escaped by the templates of ``server_app.studies.report.page``. Each is applied once, at the
boundary: ``cli.results.line`` and ``run.terminal.make_console``, and what writes Markdown.
"""

import re
from collections.abc import Mapping
from typing import Any

_KEPT = "\n\t"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Markup of Markdown and HTML, and what begins a link by itself in GitHub's Markdown
_MARKUP = re.compile(r"[\\`*_\[\]<>~&@]|:(?=//)|(?<=www)\.|(?<=mailto):|(?<=xmpp):|^[#+=>-]")


def terminal_text(text: str) -> str:
    """Replace characters that move a cursor, colour or hide text or talk to a terminal.

    Line ends and tabs stay. Every other character that is not printable becomes one replacement
    character: control characters, also the 8-bit ones, and those that change the direction.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else _REPLACEMENT for c in text)


class Markdown(str):
    """A text that is Markdown of our own, which ``as_markdown`` leaves as it is."""

    __slots__ = ()


def markdown_text(text: str) -> str:
    """Escape a text so that Markdown shows it as it is, on one line: no link, picture or HTML."""
    line = " ".join(terminal_text(text).split())
    return _MARKUP.sub(r"\\\g<0>", line)


def markdown_code(text: object) -> Markdown:
    """Put a text into a code span, in which a backtick becomes an apostrophe."""
    line = " ".join(terminal_text(str(text)).split())
    return Markdown(f"`{line.replace('`', chr(39))}`" if line else "")


def as_markdown(value: Any) -> Any:
    """Escape every text in what a Markdown template is given, but not the keys of mappings."""
    if isinstance(value, Markdown):
        return value
    if isinstance(value, str):
        return Markdown(markdown_text(value))
    if isinstance(value, Mapping):
        return {key: as_markdown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_markdown(one) for one in value]
    return value
