"""What flows where in a run: short sentences by level of trust, and a picture of it."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import yaml

from fedsilo.models.figures.palette import BLUE, GREEN, ORANGE
from fedsilo.server_app.records.summary import ALWAYS_LEAVES, BY_TRUST, COUNTED
from fedsilo.server_app.studies.report.page import Picture

_WORDS = 25  # in a sentence at most
_START = 30  # characters by which a sentence is known, also one of an earlier version
_BREAKS = re.compile(r"(?<=[;:,.]) (?=\S)")


@cache
def _texts() -> Mapping[str, Any]:
    text = (Path(__file__).parent / "templates" / "flows.yaml").read_text(encoding="utf-8")
    texts: Mapping[str, Any] = yaml.safe_load(text)
    return texts


def sentences(level: str, leaves: Sequence[str]) -> dict[str, list[str]]:
    """Return what leaves a site at the start, with each reply, at the end, and by the method.

    Args:
        level: of trust.
        leaves: the sentences of ``privacy.json``; those of the method itself are split.
    """
    said = (*ALWAYS_LEAVES, *itertools.chain.from_iterable(BY_TRUST.values()), COUNTED)
    known = tuple(one[:_START] for one in said)
    own = [short for text in leaves if not text.startswith(known) for short in shortened(text)]
    always = "When something fails, the error's text leaves; it has no values of patients."
    texts = _texts()[level]
    return {
        "At the start": texts["start"],
        "With each reply": [*texts["reply"], always],
        "At the end": texts["end"],
        "What this method sends": own,
    }


def shortened(text: str) -> Iterator[str]:
    """Yield a text as sentences of at most 25 words, cut at its own stops."""
    for part in filter(None, re.split(r"; |(?<=[a-z)])\. ", text)):
        yield from (f"{one[:1].upper()}{one[1:].rstrip('.,:;')}." for one in _cut(part.strip()))


def _cut(text: str) -> Iterator[str]:
    if len(text.split()) <= _WORDS:
        yield text
        return
    words = text.split()
    places = [len(text[: at.start()].split()) for at in _BREAKS.finditer(text)]
    middle = min(places or [_WORDS], key=lambda place: abs(place - len(words) / 2))
    for half in (words[:middle], words[middle:]):
        yield from _cut(" ".join(half))


def picture(level: str, sites: int, epsilon: str) -> Picture:
    """Return the picture of what flows between hospitals, server and readers of the model.

    Args:
        level: of trust.
        sites: how many hospitals.
        epsilon: spent at most by one of them, or an empty string without a guarantee.
    """
    texts = _texts()[level]
    sent, measured = texts["picture"]
    mark = f"{texts['mark']} (epsilon {epsilon})" if epsilon else texts["mark"]
    colour = {"server": ORANGE, "sums": BLUE, "nobody": GREEN}[level]
    parts = [
        _box(10, [f"{sites} hospitals", "", "records of patients", "stay here"]),
        _box(470, ["server", "", "makes one model", "of all answers"]),
        _arrow(60, "the model and its settings", "#555555", up=False),
        _arrow(120, sent, colour, up=True),
        _arrow(180, measured, colour, up=True),
        '<text x="340" y="240" text-anchor="middle" font-size="16">'
        f"{escape(f'to the server: {mark}')}</text>",
    ]
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 250" width="680" '
        f'font-family="sans-serif">{"".join(parts)}</svg>'
    )
    alt = (
        f"The server sends {sites} hospitals the model. Each sends back {sent} and {measured}: "
        f"{mark}. Records of patients stay at the hospitals."
    )
    return Picture(svg, alt, f"What flows where at 'trust: {level}'.")


def _box(x: int, lines: Sequence[str]) -> str:
    """Return a box with lines of text, the first of them its name."""
    texts = "".join(
        f'<text x="{x + 100}" y="{60 + 32 * place}" text-anchor="middle" font-size="16" '
        f'font-weight="{400 if place else 700}">{escape(line)}</text>'
        for place, line in enumerate(lines)
    )
    return (
        f'<rect x="{x}" y="20" width="200" height="190" rx="8" fill="#eef5fa" stroke="{BLUE}" '
        f'stroke-width="2"/>{texts}'
    )


def _arrow(y: int, label: str, colour: str, *, up: bool) -> str:
    """Return an arrow between the boxes, up to the server or down to the hospitals."""
    head = f"468,{y} 454,{y - 7} 454,{y + 7}" if up else f"212,{y} 226,{y - 7} 226,{y + 7}"
    return (
        f'<line x1="{214 if up else 226}" y1="{y}" x2="{454 if up else 466}" y2="{y}" '
        f'stroke="{colour}" stroke-width="3"/><polygon points="{head}" fill="{colour}"/>'
        f'<text x="340" y="{y - 10}" text-anchor="middle" font-size="16">{escape(label)}</text>'
    )
