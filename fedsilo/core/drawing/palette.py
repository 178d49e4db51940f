"""The palette of all pictures: colours that colour-blind people can tell apart, also in grey.

The colours and their names are those of Okabe and Ito (2008, "Color universal design"), as given by
Wong, Nature Methods 8:441 (2011). Lines also differ in marker and dash, so a picture can be
printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK = "#CC79A7", "#56B4E9", "#000000"
GREY, LIGHT = "#808080", "#DDDDDD"  # reading aids: a diagonal, bars behind lines

# Neighbours in this order differ in lightness. Okabe and Ito's yellow is missing, because it is
# hardly visible on white
CATEGORIES = (BLUE, ORANGE, GREEN, SKY, VERMILLION, PURPLE, BLACK)
# Four more colours that differ from those above
_DARKER = ("#7F0000", "#4D4D4D", "#332288", "#117733")

WRONG = VERMILLION  # a wrong answer; words beside it say so as well

# Colour maps for numbers from 0, and for numbers of both signs with white at 0
AMOUNTS, SIGNED = "Blues", "PuOr"
SALIENCY = "plasma"  # over an image

# The end of viridis is hardly visible on white, so it is cut off
_RAMP, _LIGHTEST = "viridis", 0.95
_MARKERS = "os^vDP*X"
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class LineStyle:
    """The style of a line: its colour (``#rrggbb``), the marker at its points, and its dash."""

    color: str
    marker: str
    linestyle: str

    def options(self) -> dict[str, Any]:
        """Return the style as keyword arguments for ``Axes.plot`` and ``errorbar``."""
        return dict(vars(self))


def colours(names: Sequence[str]) -> dict[str, str]:
    """Assign a colour, ``#rrggbb``, to each name, so that lines or areas can be told apart.

    Up to eleven names get distinct colours in the order of ``names``: seven of a palette, then four
    darker ones. If there are more names, all colours come from ``shades``, and run from dark to
    light. A repeated name counts each time towards the eleven, and gets the colour of its last
    place. Without names the mapping is empty.
    """
    several = CATEGORIES + _DARKER
    return dict(zip(names, several, strict=False)) if len(names) <= len(several) else shades(names)


def shades(names: Sequence[str]) -> dict[str, str]:
    """Assign colours, ``#rrggbb``, that run from dark to light in the order of ``names``.

    The colours are evenly spaced over the colour map viridis, without its lightest 5 %. A single
    name gets the darkest colour. A name that occurs twice gets the colour of its last place.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    step = _LIGHTEST / max(1, len(names) - 1)
    return {name: to_hex(colormaps[_RAMP](place * step)) for place, name in enumerate(names)}


def line_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """Assign a colour, a marker and a dash to each name.

    The colour (one of seven) and the marker (one of eight) change with every name. The dash (one of
    four) changes after every seven names. When a list is used up, it starts again. The first 56
    styles are all different.
    """
    return {
        name: LineStyle(
            CATEGORIES[place % len(CATEGORIES)],
            _MARKERS[place % len(_MARKERS)],
            _DASHES[place // len(CATEGORIES) % len(_DASHES)],
        )
        for place, name in enumerate(names)
    }
