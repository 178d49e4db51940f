"""Fonts for letters that matplotlib's own font lacks, such as those of a site named '東京'.

Names of sites and classes may be in any script. Matplotlib's font, DejaVu Sans, has Latin, Greek,
Cyrillic, Hebrew and Arabic letters. For others a font of the machine is used, if there is one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from fedsilo.core.one_line import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

_USUAL = "DejaVu Sans"
_MOST_FONTS = 500
# The font 'Last Resort' has a box for every letter
_NO_LETTERS = "Last"


@contextmanager
def fonts_for(figure: Figure) -> Iterator[None]:
    """Set fonts for a figure's texts, so that the ``with`` block can draw all their letters.

    If the usual font (DejaVu Sans) lacks a letter, every text with a character outside ASCII gets
    further fonts of this machine, even after the block. A letter that no font has is drawn as a
    box, and a warning in the log says what to install. Within the block, matplotlib's warnings
    about missing letters are hidden.
    """
    texts = [text for text in _list_texts(figure) if not text.get_text().isascii()]
    missing = _find_missing("".join(text.get_text() for text in texts))
    if missing:
        families = _find_families(missing)
        for text in texts:
            text.set_fontfamily([_USUAL, *families])
    with warnings.catch_warnings():
        # Matplotlib would warn for each letter and each time that it measures the text
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        yield


def _list_texts(figure: Figure) -> list[Text]:
    """List all text objects of a figure, such as titles, labels and the numbers on its axes.

    The labels of ticks are included even if the figure has not been drawn yet. Some objects may be
    listed twice.
    """
    from matplotlib.text import Text

    texts = list(figure.findobj(Text))
    # Matplotlib makes the labels of ticks only when they are drawn or requested
    for axes in figure.axes:
        texts += [*axes.get_xticklabels(), *axes.get_yticklabels()]
    return texts


def _find_missing(text: str) -> frozenset[str]:
    """Return the printable characters of a string that the usual font (DejaVu Sans) lacks.

    An ASCII string gives an empty set.
    """
    if text.isascii():
        return frozenset()
    from matplotlib.font_manager import findfont

    known = _letters_of(findfont(_USUAL))
    return frozenset(letter for letter in text if ord(letter) not in known and letter.isprintable())


@cache
def _find_families(missing: frozenset[str]) -> tuple[str, ...]:
    """Choose fonts of this machine that have the given letters, and return their family names.

    Each step registers the font that has the largest number of the letters still missing, until no
    font has any of them. Among equally good fonts, those with "regular" in their path come first,
    in alphabetical order of the paths. At most 500 fonts are examined.

    If letters are still missing, one warning in the log lists the first 20 of them. The result may
    then be empty.
    """
    from matplotlib import font_manager

    wanted = set(map(ord, missing))
    families: list[str] = []
    # Fonts of the usual weight come first
    found = sorted(font_manager.findSystemFonts())
    paths = sorted(found, key=lambda path: "regular" not in path.lower())[:_MOST_FONTS]
    while wanted:
        # The first of equally good fonts wins, so that a machine draws equal pictures
        best = max(paths, key=lambda path: len(wanted & _letters_of(path)), default="")
        if not best or not wanted & _letters_of(best):
            break
        wanted -= _letters_of(best)
        font_manager.fontManager.addfont(best)
        families.append(font_manager.get_font(best).family_name)
    if wanted:
        letters = printable("".join(map(chr, sorted(wanted)[:20])))
        logging.getLogger("flwr").warning(
            "fedsilo: no font on this machine has the letters %s, so pictures show boxes in their "
            "place: install a font, such as Noto Sans CJK",
            letters,
        )
    return tuple(families)


@cache
def _letters_of(path: str) -> frozenset[int]:
    """Return the Unicode code points of the characters that a font file can draw.

    The set is empty if the file cannot be read, or if its font consists of bitmaps. It is also
    empty for the font 'Last Resort', which draws a box for every character.
    """
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
    except (OSError, RuntimeError):
        return frozenset()
    # Pictures need outlines, which fonts of bitmaps do not have
    if not font.scalable or font.family_name.startswith(_NO_LETTERS):
        return frozenset()
    return frozenset(font.get_charmap())
