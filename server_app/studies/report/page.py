"""A page that people read: one HTML file, of sections of paragraphs, tables and pictures.

Nothing in it comes from the network and nothing runs; the same content gives the same bytes. What
stands in a block is plain text and is escaped; only a picture's SVG is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Text:
    """Paragraphs; with ``warning`` they stand in a frame."""

    paragraphs: Sequence[str]
    warning: bool = False
    template: ClassVar[str] = "text.html"


@dataclass(frozen=True)
class Items:
    """A list of sentences, below a line that says what they are (empty: none)."""

    sentences: Sequence[str]
    heading: str = ""
    template: ClassVar[str] = "items.html"


@dataclass(frozen=True)
class Facts:
    """Names and what they are, such as settings: (name, value)."""

    pairs: Sequence[tuple[str, str]]
    template: ClassVar[str] = "facts.html"


@dataclass(frozen=True)
class Table:
    """A table: the first cell of a row is its heading; a cell that reads as a number stands right.

    ``note`` stands below it and says what the numbers are.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    template: ClassVar[str] = "table.html"


@dataclass(frozen=True)
class Picture:
    """An SVG, what it shows in words (for who cannot see it), and its caption."""

    svg: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Pictures:
    """Pictures beside one another where there is room, else below one another."""

    pictures: Sequence[Picture]
    template: ClassVar[str] = "pictures.html"


Block = Text | Items | Facts | Table | Pictures


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)

    @property
    def anchor(self) -> str:
        """The section's id: its title in small letters, digits and hyphens."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") or "section"


def page(title: str, sections: Sequence[Section], *, subtitle: str = "", foot: str = "") -> str:
    """Return the page as HTML.

    Args:
        title: of the page and of its window.
        sections: in their order, with titles that differ; more than two get a table of contents.
        subtitle: a line below the title.
        foot: a line at the end.
    """
    template = _environment().get_template("base.html")
    return template.render(title=title, sections=sections, subtitle=subtitle, foot=foot) + "\n"


def is_number(cell: str) -> bool:
    """Tell whether a cell begins as a number, so that it stands right: ``0.81 (0.7 to 0.9)``."""
    return bool(re.match(r"[-+<>]?\s?\d", cell)) or cell in ("", "-", "n/a")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedsilo.server_app.studies.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.tests["number"] = is_number
    return environment
