"""Describes the data flows of each level of trust in short sentences, and in a picture."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fedsilo.core.drawing.palette import BLUE, GREEN, ORANGE
from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import NOBODY, SERVER, SUMS
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.tasks.task import task_named
from fedsilo.pages.page import Picture, environment
from fedsilo.server_app.records.summary import ALWAYS_LEAVES, leaves_by_trust, task_words

_WORDS = 25  # largest number of words in a sentence
_START = 30  # first characters that identify a sentence, even if an earlier version wrote it
_OUTSIDE = r"(?![^(]*\))"  # a position that is not within brackets
_STOPS = re.compile(rf"; {_OUTSIDE}|(?<=[a-z)])\. ")
_BREAKS = re.compile(rf"(?<=[;:,.]) (?=\S){_OUTSIDE}")


@cache
def _texts() -> Mapping[str, Any]:
    """Read the sentences of each level of trust from ``flows.yaml``, once per process."""
    text = (Path(__file__).parent / "templates" / "flows.yaml").read_text(encoding="utf-8")
    texts: Mapping[str, Any] = yaml.safe_load(text)
    return texts


def sentences(
    level: str, leaves: Sequence[str], task: str = CLASSIFICATION
) -> dict[str, list[str]]:
    """Describe the data that a site sends, as lists of sentences under four headings.

    The headings are "At the start", "With each reply", "At the end" and "What this method sends".
    The level of trust and the task decide the first three lists. The last list has the sentences of
    ``leaves`` that are not among fedsilo's general sentences on data that leave.

    Args:
        level: the level of trust: ``server``, ``sums`` or ``nobody``.
        leaves: the sentences in the run's ``privacy.json`` on the data that leave a site.
        task: the name of the run's task.
    """
    general = list(ALWAYS_LEAVES)
    for trust in (SERVER, SUMS, NOBODY):
        general += leaves_by_trust(trust, task_named(task))
    # Compared by their beginnings, because a run of an earlier version has other endings
    beginnings = tuple(text[:_START] for text in general)
    by_method: list[str] = []
    for text in leaves:
        if not text.startswith(beginnings):
            by_method += shortened(text)
    always = "When something fails, the error's text leaves; it has no values of patients."
    texts = _texts()[level]
    reply, end = texts["reply"], texts["end"]
    if task != CLASSIFICATION:
        reply, end = _of_task(texts["task-reply"], task), _of_task(texts["task-end"], task)
    return {
        "At the start": texts["start"],
        "With each reply": [*reply, always],
        "At the end": end,
        "What this method sends": by_method,
    }


def _of_task(templates: Sequence[str], task: str) -> list[str]:
    """Fill a task's words into templates, and return sentences of at most 25 words.

    The words name the task's data, such as "classes". The placeholders are the keys of
    ``task_words``. ``shortened`` cuts a filled template that is too long.
    """
    # A task's words may be a long list, and the page promises sentences of at most 25 words
    words, filled = task_words(task_named(task)), list[str]()
    for template in templates:
        filled += shortened(template.format(**words))
    return filled


def shortened(text: str) -> Iterator[str]:
    """Yield the sentences of a text, none of them longer than 25 words.

    The text is cut at full stops and at semicolons outside brackets. ``_cut`` divides a part that
    is still too long. Each sentence begins with a capital letter and ends with a full stop.
    """
    for part in _STOPS.split(text):
        if not part:
            continue
        for sentence in _cut(part.strip()):
            yield f"{sentence[:1].upper()}{sentence[1:].rstrip('.,:;')}."


def _cut(text: str) -> Iterator[str]:
    """Cut a sentence into parts of at most 25 words each.

    A longer sentence is cut after a comma, semicolon, colon or full stop outside brackets. The mark
    nearest to the middle, counted in words, is taken. Without a mark, the sentence is cut after 25
    words. Parts that are still too long are cut again.
    """
    words = text.split()
    if len(words) <= _WORDS:
        yield text
        return
    places = [len(text[: at.start()].split()) for at in _BREAKS.finditer(text)]
    if not places:  # a text without a comma is cut after the last word that fits
        places = [_WORDS]
    middle = min(places, key=lambda place: abs(place - len(words) / 2))
    # Each half may still be too long
    for half in (words[:middle], words[middle:]):
        yield from _cut(" ".join(half))


def picture(level: str, sites: int, epsilon: str) -> Picture:
    """Draw the data flow between the hospitals, the server and the users of the model.

    Args:
        level: the level of trust, which decides the texts and the colour.
        sites: the number of hospitals.
        epsilon: the largest epsilon of a hospital, as text; empty without a privacy guarantee.
    """
    texts = _texts()[level]
    sent, measured = texts["picture"]
    hospitals = format_count(sites, "hospital")
    mark = texts["mark"]
    if epsilon and level == NOBODY:
        mark += f" (epsilon {epsilon})"
    elif epsilon:
        mark += f" (weights: epsilon {epsilon})"
    colour = {SERVER: ORANGE, SUMS: BLUE, NOBODY: GREEN}[level]
    words = {"hospitals": hospitals, "sent": sent, "measured": measured, "mark": mark}
    svg = environment().get_template("flow.svg").render(words, colour=colour, blue=BLUE).strip()
    alt = (
        f"The server sends {hospitals} the model. Each sends back {sent} and {measured}: "
        f"{mark}. Records of patients stay at the hospitals."
    )
    return Picture(svg, alt, f"What flows where at 'trust: {level}'.")
