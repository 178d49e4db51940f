"""A figure as SVG for a page: the same bytes for the same figure."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}  # the time is one
_STYLE = re.compile(r"<defs>\s*<style type=\"text/css\">.*?</style>\s*</defs>", re.DOTALL)


def svg_of(figure: Figure, name: str) -> str:
    """Return a figure as the text of one ``svg`` element.

    Letters stay letters, so that they can be searched and read aloud.

    Args:
        figure: what is drawn.
        name: of the picture, one in its page; all ids in the SVG begin with it.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata=_NO_METADATA)
    svg = text.getvalue()
    svg = _STYLE.sub("", svg[svg.index("<svg") :])  # its style would apply to the page
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg).strip()
