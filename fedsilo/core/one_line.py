"""Make foreign text safe for the place that shows it: one line, a terminal or Markdown.

The templates of ``fedsilo.pages.page`` escape HTML. Text is escaped once, where it
leaves: in ``cli.results.line``, in ``run.terminal.make_console`` and where Markdown is written.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

# Characters of a quoted text; with the sentence around the text a line stays below 400
LONGEST = 300
_NAME = 80  # characters of one name in a list of names
_KEPT = "\n\t"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Markup of Markdown and HTML, and what begins a link by itself in GitHub's Markdown
_INLINE = r"[\\`*_\[\]~&@]|<(?=\S)|:(?=//)|(?<=www)\.|(?<=mailto):|(?<=xmpp):"
# Signs that begin a heading, a list or a quotation count at the start of a line only
_MARKUP = re.compile(rf"{_INLINE}|^[#+=>-]")
_CELL_MARKUP = re.compile(rf"{_INLINE}|\|")
# A cell keeps a star by itself, and an interval of numbers unless the next sign could make a link
# of it
_NUMBER = r"[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)"
_NO_MARKUP = re.compile(rf"(\[{_NUMBER}, {_NUMBER}\](?![\[(:])|(?<!\S)\*(?!\S))")


def one_line(text: object, longest: int = LONGEST) -> str:
    """Write ``text`` as one printable line of at most ``longest`` characters, cut at the end."""
    # The text is cut before it is cleaned, because a site may send megabytes
    words = printable(_text(text)[: 4 * longest])
    if len(words) <= longest:
        return words
    return f"{words[: longest - 1]}…"


def abbreviate(text: object, longest: int = LONGEST, end: int = 100) -> str:
    """Write ``text`` as one printable line of at most ``longest`` characters, cut in the middle.

    The last ``end`` characters always stay, because the end of an error says what to do.
    """
    words = printable(_text(text))
    if len(words) <= longest:
        return words
    return f"{words[: longest - end - 3]} … {words[-end:]}"


def site_reason(text: object) -> str:
    """Write a site's reason as one line of at most 600 characters; the last 300 always stay.

    Reasons may be long, because paths of hospital shares are.
    """
    return abbreviate(text, 2 * LONGEST, LONGEST)


def by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Group (who, reason) pairs by reason; join the names of a group with commas."""
    who: dict[str, list[str]] = {}
    for name, reason in reasons:
        who.setdefault(reason, []).append(name)
    return {reason: ", ".join(names) for reason, names in who.items()}


def printable(text: str) -> str:
    """Write a text as one line; characters that cannot be printed become spaces, then one space."""
    if text.isprintable() and "  " not in text:
        return text.strip()
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def quote_value(value: object, longest: int = 100) -> str:
    """Write a value as its Python literal, on one line of at most ``longest`` characters."""
    if isinstance(value, str):
        # repr() of a text of megabytes takes time, and only its start is shown
        value = value[: 2 * longest]
    return one_line(_text(value, repr), longest)


def join_names(names: Iterable[object], most: int = 30) -> str:
    """Join at most ``most`` names with commas, and say how many more there are.

    Each name is cut after 80 characters.
    """
    all_names = list(names)
    joined = ", ".join(one_line(name, _NAME) for name in all_names[:most])
    if len(all_names) > most:
        joined += f" and {len(all_names) - most} more"
    return joined


def format_count(number: int, noun: str) -> str:
    """Write a number with its noun in the right form: ``1 site``, ``4 sites``, ``3 processes``."""
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def as_word(path: Path) -> str:
    """Quote a path for a shell; the path is relative if it is below the working folder."""
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def reason_of(error: BaseException) -> str:
    """Write the class and the text of an error that foreign code raised, as one line."""
    return f"{type(error).__name__}: {one_line(error, 200)}"


def _text(value: object, written: Callable[[object], str] = str) -> str:
    try:
        return written(value)
    except (ValueError, RecursionError):
        # Python refuses to write numbers of too many digits, and lists nested too deeply
        return f"a {type(value).__name__} that is too large to show"


def terminal_text(text: str) -> str:
    """Replace characters that would control a terminal: move its cursor, colour or hide text.

    Line ends and tabs stay. Every other unprintable character becomes one replacement character,
    including 8-bit control characters and those that change the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else _REPLACEMENT for c in text)


class Markdown(str):
    """A text that is Markdown already, so that ``as_markdown`` does not escape the text again."""

    __slots__ = ()


def markdown_text(text: str) -> str:
    """Escape a text so that Markdown shows it on one line, without links, pictures and HTML."""
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
    """Write a text as a Markdown code span; a backtick becomes an apostrophe."""
    line = " ".join(terminal_text(str(text)).split())
    if not line:
        return Markdown("")
    quoted = line.replace("`", "'")
    return Markdown(f"`{quoted}`")


def as_markdown(value: Any) -> Any:
    """Escape every text among the values of a Markdown template, but no key of a mapping."""
    if isinstance(value, Markdown):
        return value
    if isinstance(value, str):
        return Markdown(markdown_text(value))
    if isinstance(value, Mapping):
        return {key: as_markdown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_markdown(item) for item in value]
    return value


# The names of these functions before version 0.2. Only the other rooms still use them
shortened, shown, listed, counted = abbreviate, quote_value, join_names, format_count
