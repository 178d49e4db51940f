"""The one palette: colours that colour-blind people can distinguish, and that differ in grey.

Names have the colours of Okabe and Ito (2008, "Color universal design"), as given by Wong, Nature
Methods 8:441 (2011). Lines also differ by marker and dash, so that a picture can be printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK = "#CC79A7", "#56B4E9", "#000000"
GREY, LIGHT = "#808080", "#DDDDDD"  # of what only helps to read: a diagonal, bars behind lines

# In an order in which neighbours differ in lightness; yellow is not seen on white
CATEGORIES = (BLUE, ORANGE, GREEN, SKY, VERMILLION, PURPLE, BLACK)
_DARKER = ("#7F0000", "#4D4D4D", "#332288", "#117733")  # four more, chosen to differ from those

WRONG = VERMILLION  # a wrong answer; words beside it say so as well

# Colour maps whose lightness runs one way, of numbers from 0, and both ways from 0
AMOUNTS, SIGNED = "Blues", "PuOr"
SALIENCY = "plasma"  # over an image

_RAMP, _LIGHTEST = "viridis", 0.95  # the last of it is not seen on white
_MARKERS = "os^vDP*X"
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class LineStyle:
    """How a line is drawn: its colour, the marker at its points, and its dash."""

    color: str
    marker: str
    linestyle: str

    def options(self) -> dict[str, Any]:
        """Return it as keyword arguments of ``Axes.plot`` and ``errorbar``."""
        return dict(vars(self))


def colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour of each name, as ``#rrggbb``; up to eleven are easy to distinguish."""
    several = CATEGORIES + _DARKER
    return dict(zip(names, several, strict=False)) if len(names) <= len(several) else shades(names)


def shades(names: Sequence[str]) -> dict[str, str]:
    """Return colours, ``#rrggbb``, that run from dark to light in the order of the names."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    step = _LIGHTEST / max(1, len(names) - 1)
    return {name: to_hex(colormaps[_RAMP](place * step)) for place, name in enumerate(names)}


def line_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """Return a style of each name; no two of up to 56 names have the same."""
    return {
        name: LineStyle(
            CATEGORIES[place % len(CATEGORIES)],
            _MARKERS[place % len(_MARKERS)],
            _DASHES[place // len(CATEGORIES) % len(_DASHES)],
        )
        for place, name in enumerate(names)
    }
