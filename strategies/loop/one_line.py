"""What others say, as one line: no control characters, no line ends, no more than a screen's."""

from __future__ import annotations

LONGEST = 300  # characters: the line that quotes it stays below 400


def one_line(text: object, longest: int = LONGEST) -> str:
    """Return ``text`` on one line, printable, cut after ``longest`` characters."""
    some = str(text)[: 4 * longest]  # what comes after is cut anyway
    words = " ".join("".join(c if c.isprintable() else " " for c in some).split())
    return words if len(words) <= longest else f"{words[: longest - 1]}…"
