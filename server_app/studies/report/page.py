"""A page that people read: one HTML file that loads nothing and runs nothing.

The same content gives the same bytes. All content is plain text and is escaped; only a picture's
SVG is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@dataclass(frozen=True)
class Text:
    """Paragraphs; a warning is framed."""

    paragraphs: Sequence[str]
    warning: bool = False


@dataclass(frozen=True)
class Items:
    """A list of sentences below a heading, or without one if it is empty."""

    sentences: Sequence[str]
    heading: str = ""


@dataclass(frozen=True)
class Facts:
    """Pairs of a name and its value."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table whose rows begin with their heading; ``note`` below it says what the numbers are."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """An SVG, what it shows in words for readers who cannot see it, and its caption."""

    svg: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Pictures:
    """Pictures side by side where there is room."""

    pictures: Sequence[Picture]


Block = Text | Items | Facts | Table | Pictures


@dataclass(frozen=True)
class Section:
    """A heading and the blocks below it."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


def page(title: str, sections: Sequence[Section], *, subtitle: str = "", foot: str = "") -> str:
    """Return a page of sections whose titles differ."""
    return render_page("sections.html", title, {"sections": sections}, subtitle=subtitle, foot=foot)


def render_page(
    template: str, title: str, data: Mapping[str, Any], *, subtitle: str = "", foot: str = ""
) -> str:
    """Return a page whose body is a template; more than two sections get a table of contents.

    The template gets ``data``, and calls ``section`` with titles that are unique in the page.
    """
    from markupsafe import Markup

    contents: list[tuple[str, str]] = []

    def section(heading: str, caller: Callable[[], Markup]) -> Markup:
        anchor = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"
        contents.append((anchor, heading))
        text = '<section id="{}">\n<h2>{}</h2>\n{}</section>\n'
        return Markup(text).format(anchor, heading, caller())

    body = Markup(environment().get_template(template).render(**data, section=section))
    shell = {"title": title, "contents": contents, "subtitle": subtitle, "foot": foot}
    return environment().get_template("base.html").render(**shell, body=body) + "\n"


def is_number(cell: str) -> bool:
    """Tell whether a cell begins as a number and is aligned right: ``0.81 (0.7 to 0.9)``."""
    return bool(re.match(r"[-+<>]?\s?\d", cell)) or cell in ("", "-", "n/a")


@cache
def environment(folder: str = "report", *, html: bool = True) -> Environment:
    """Build the environment that renders the templates in a folder of ``studies``."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(f"fedsilo.server_app.studies.{folder}"),
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.tests["number"] = is_number
    return environment
