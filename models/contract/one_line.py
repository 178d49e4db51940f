"""Text of others made safe for where it is shown: one line, a terminal, or Markdown.

HTML is escaped by the templates of ``server_app.studies.report.page``. Each is applied once, at the
boundary: ``cli.results.line`` and ``run.terminal.make_console``, and what writes Markdown.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

LONGEST = 300  # characters: the line that quotes it stays below 400
_NAME = 80  # characters of one of several names
_KEPT = "\n\t"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Markup of Markdown and HTML, and what begins a link by itself in GitHub's Markdown
_INLINE = r"[\\`*_\[\]~&@]|<(?=\S)|:(?=//)|(?<=www)\.|(?<=mailto):|(?<=xmpp):"
# At the start of a line also what begins a heading, a list or a quotation
_MARKUP = re.compile(rf"{_INLINE}|^[#+=>-]")
_CELL_MARKUP = re.compile(rf"{_INLINE}|\|")
# What a cell keeps: a star by itself, and an interval of numbers unless what follows could make a
# link of it
_NUMBER = r"[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)"
_NO_MARKUP = re.compile(rf"(\[{_NUMBER}, {_NUMBER}\](?![\[(:])|(?<!\S)\*(?!\S))")


def one_line(text: object, longest: int = LONGEST) -> str:
    """Return ``text`` on one line, printable, cut after ``longest`` characters."""
    words = printable(_text(text)[: 4 * longest])  # the rest is cut anyway
    return words if len(words) <= longest else f"{words[: longest - 1]}…"


def shortened(text: object, longest: int = LONGEST, end: int = 100) -> str:
    """Return ``text`` on one line; of more than ``longest`` characters the middle is left out.

    The last ``end`` characters stay: the end of an error says what to do.
    """
    words = printable(_text(text))
    if len(words) <= longest:
        return words
    return f"{words[: longest - end - 3]} … {words[-end:]}"


def site_reason(text: object) -> str:
    """Return a site's reason on one line of at most 600 characters, its last 300 always kept.

    Paths of hospital shares are long, and what to do stands at the end.
    """
    return shortened(text, 2 * LONGEST, LONGEST)


def by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return of pairs (who, reason) each reason's who, with commas between."""
    who: dict[str, list[str]] = {}
    for one, reason in reasons:
        who.setdefault(reason, []).append(one)
    return {reason: ", ".join(names) for reason, names in who.items()}


def printable(text: str) -> str:
    """Return a text on one line, with a space for each character that cannot be printed."""
    if text.isprintable() and "  " not in text:
        return text.strip()
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def shown(value: object, longest: int = 100) -> str:
    """Return a value as Python writes it, on one line, cut after ``longest`` characters."""
    if isinstance(value, str):
        value = value[: 2 * longest]  # writing it costs time
    return one_line(_text(value, repr), longest)


def listed(names: Iterable[object], most: int = 30) -> str:
    """Return at most ``most`` names joined by commas, each cut, and how many more there are."""
    all_ = list(names)
    rest = f" and {len(all_) - most} more" if len(all_) > most else ""
    return ", ".join(one_line(name, _NAME) for name in all_[:most]) + rest


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 site``, ``4 sites``, ``3 processes``."""
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural}"


def as_word(path: Path) -> str:
    """Return a path as typed in a shell here: quoted, and relative if it is below this folder."""
    below = path.is_relative_to(Path.cwd())
    return shlex.quote(str(path.relative_to(Path.cwd()) if below else path))


def reason_of(error: BaseException) -> str:
    """Return the kind and the text of an error of somebody else's code."""
    return f"{type(error).__name__}: {one_line(error, 200)}"


def _text(value: object, written: Callable[[object], str] = str) -> str:
    try:
        return written(value)
    except (ValueError, RecursionError):  # a number of too many digits, lists within lists
        return f"a {type(value).__name__} that is too large to show"


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


def markdown_cell(text: str) -> str:
    """Escape a text so that Markdown shows it as it is in a cell of a table.

    Signs, intervals of numbers and a star that marks a row stay as they are: a cell begins no list,
    brackets around two numbers are no link, and a star between spaces emphasises nothing.
    """
    line = " ".join(terminal_text(text).split())
    parts = _NO_MARKUP.split(line)  # every second part is none
    parts[::2] = [_CELL_MARKUP.sub(r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


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
