"""Makes foreign text safe for the place that shows it: one line, a terminal or Markdown.

The templates of ``fedsilo.pages.page`` escape HTML. Text is escaped once, where it leaves: in
``cli.printing.line``, in ``run.terminal.make_console`` and where Markdown is written.
"""

import math
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
# Markup of Markdown and HTML, and texts that GitHub's Markdown turns into links
_INLINE = r"[\\`*_\[\]~&@]|<(?=\S)|:(?=//)|(?<=www)\.|(?<=mailto):|(?<=xmpp):"
# Characters that begin a heading, a list or a quotation count only at the start of a line
_MARKUP = re.compile(rf"{_INLINE}|^[#+=>-]")
_CELL_MARKUP = re.compile(rf"{_INLINE}|\|")
# A cell keeps a star by itself, and an interval of numbers unless a link could follow
_NUMBER = r"[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf)"
_NO_MARKUP = re.compile(rf"(\[{_NUMBER}, {_NUMBER}\](?![\[(:])|(?<!\S)\*(?!\S))")


def one_line(text: object, longest: int = LONGEST) -> str:
    """Convert ``text`` by ``str`` to one printable line of at most ``longest`` characters.

    Each run of spaces, line ends and other unprintable characters becomes one space. The ends of
    the line have no spaces. A line that is still too long is cut, and its last character is then
    '…'.

    Only the first ``4 * longest`` characters are read. All further characters are lost, even if the
    line is short enough to have no '…'.
    """
    # The text is cut before it is cleaned, because a site may send megabytes
    words = printable(_convert_to_text(text)[: 4 * longest])
    if len(words) <= longest:
        return words
    return f"{words[: longest - 1]}…"


def abbreviate(text: object, longest: int = LONGEST, end: int = 100) -> str:
    """Convert ``text`` to one printable line of at most ``longest`` characters.

    The middle of a longer line is replaced by ' … '. The last ``end`` characters always stay,
    because an error names its remedy at the end. ``longest`` must be at least ``end + 3``, which is
    not checked.
    """
    words = printable(_convert_to_text(text))
    if len(words) <= longest:
        return words
    return f"{words[: longest - end - 3]} … {words[-end:]}"


def site_reason(text: object) -> str:
    """Shorten the reason that a site gives for an error to one line of at most 600 characters.

    Unprintable characters become spaces. If the line is too long, its middle is replaced by ' … '.
    Its last 300 characters always stay, because they name the remedy.
    """
    return abbreviate(text, 2 * LONGEST, LONGEST)


def by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Collect the names that belong to each reason, so that each reason is shown only once.

    Reasons and names keep their order. A name that occurs twice is listed twice.

    Args:
        reasons: pairs of a name and a reason.

    Returns:
        Reason -> its names, joined with commas.
    """
    who: dict[str, list[str]] = {}
    for name, reason in reasons:
        who.setdefault(reason, []).append(name)
    return {reason: ", ".join(names) for reason, names in who.items()}


def printable(text: str) -> str:
    """Convert a string to one line, without white space at its ends.

    Each run of spaces, line ends and other unprintable characters becomes one space.
    """
    if text.isprintable() and "  " not in text:
        return text.strip()
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def quote_value(value: object, longest: int = 100) -> str:
    """Return a value's ``repr`` as one line of at most ``longest`` characters, cut at the end."""
    if isinstance(value, str):
        # repr() of a text of megabytes takes time, and only its start is shown
        value = value[: 2 * longest]
    return one_line(_convert_to_text(value, repr), longest)


def join_names(names: Iterable[object], most: int = 30) -> str:
    """Join the first ``most`` names with commas. If there are more, add " and N more".

    Each name is shown as one printable line of at most 80 characters. Without names, the result is
    empty.
    """
    all_names = list(names)
    joined = ", ".join(one_line(name, _NAME) for name in all_names[:most])
    if len(all_names) > most:
        joined += f" and {len(all_names) - most} more"
    return joined


def format_measure(value: float) -> str:
    """Format a measured number for a reader, such as "24.0", "1,523" or "1.2e-05".

    The absolute value decides the form:

    - From 0.001 to below 10 million, there are at least three significant digits. Trailing zeros
      stay, so that numbers below each other have the same precision.
    - From 0.0001 to below 0.001, there are at most three digits, without trailing zeros.
    - All smaller or larger numbers have at most three digits and an exponent.

    Zero becomes "0", and a number that is not finite becomes "inf", "-inf" or "nan".
    """
    if value == 0:
        return "0"
    if not math.isfinite(value) or not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    decimals = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}"


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 site``, ``4 sites``, ``1,000 sites``, ``3 processes``.

    ``noun`` is the singular. The plural adds "es" to a noun that ends with "s", and "s" to any
    other noun.
    """
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def as_word(path: Path) -> str:
    """Format a path as one word of a shell command, with quotes only if the shell needs them.

    An absolute path inside the current directory becomes relative to that directory. Any other path
    stays unchanged.
    """
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def reason_of(error: BaseException) -> str:
    """Describe an error that other code raised, in one line such as "KeyError: 'a'".

    The class comes first, then the text, which is cut after 200 characters.
    """
    return f"{type(error).__name__}: {one_line(error, 200)}"


def _convert_to_text(value: object, written: Callable[[object], str] = str) -> str:
    """Convert a value to a string by ``written``, without failing for values that are too large.

    Python refuses to convert numbers with too many digits, and lists that are nested too deeply. If
    ``written`` therefore raises ValueError or RecursionError, the result names the type, such as "a
    list that is too large to show".
    """
    try:
        return written(value)
    except (ValueError, RecursionError):
        # Python refuses to write numbers of too many digits, and lists nested too deeply
        return f"a {type(value).__name__} that is too large to show"


def terminal_text(text: str) -> str:
    """Replace characters that could move a terminal's cursor, or colour or hide its text.

    Line ends and tabs stay. Every other unprintable character becomes a replacement character
    (U+FFFD), including 8-bit control characters and those that change the direction of writing.

    The length does not change.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else _REPLACEMENT for c in text)


class Markdown(str):
    """A string that is Markdown already, so ``as_markdown`` does not escape it again."""

    __slots__ = ()


def markdown_text(text: str) -> str:
    """Escape a string so that Markdown shows it as one line without links, pictures or HTML."""
    line = " ".join(terminal_text(text).split())
    return _MARKUP.sub(r"\\\g<0>", line)


def markdown_cell(text: str) -> str:
    """Escape a string for a cell of a Markdown table, which then shows it unchanged on one line.

    A backslash is put before each character that Markdown or HTML would interpret. Characters that
    are harmless in a cell stay: '#' at the start, the brackets of an interval such as [0, 1], and a
    star between spaces. Each run of spaces and line ends becomes one space, and spaces at the ends
    are removed. Unprintable characters become U+FFFD.
    """
    line = " ".join(terminal_text(text).split())
    # Every second part is a match of _NO_MARKUP, which stays unchanged
    parts = _NO_MARKUP.split(line)
    parts[::2] = [_CELL_MARKUP.sub(r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def markdown_code(text: object) -> Markdown:
    """Format a value as a Markdown code span on one line.

    An apostrophe replaces each backtick, which a code span cannot hold. Each run of spaces and line
    ends becomes one space. An empty value gives an empty string without a code span.
    """
    line = " ".join(terminal_text(str(text)).split())
    if not line:
        return Markdown("")
    quoted = line.replace("`", "'")
    return Markdown(f"`{quoted}`")


def as_markdown(value: Any) -> Any:
    """Escape every string in a value by ``markdown_text``, for a Markdown template.

    Strings inside mappings, lists and tuples are escaped too, but not the keys of a mapping. Tuples
    become lists. An escaped string has the type ``Markdown``. Strings of this type stay unchanged,
    so a second call escapes nothing twice. Values of other types stay unchanged too.
    """
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
