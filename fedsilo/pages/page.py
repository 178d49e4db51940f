"""A page that people read: one HTML file that loads nothing and runs nothing.

Every page is a template of its own in ``templates``. It extends ``base.html``, which holds the only
stylesheet, and it gets values by name: texts, rows of tables, pictures. The same values give the
same bytes. Everything is escaped except a picture's SVG, which fedsilo itself has drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markupsafe import Markup


@dataclass(frozen=True)
class Table:
    """A table whose rows begin with their heading; ``note`` below it explains the numbers."""

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


def render_page(
    template: str | Template,
    title: str,
    data: Mapping[str, Any],
    *,
    subtitle: str = "",
    foot: str = "",
) -> str:
    """Render a page; a page of more than two sections gets a table of contents.

    Args:
        template: the name of a template that extends ``base.html``, or such a template.
        title: the page's title and first heading.
        data: the template's own variables.
        subtitle: a line below the title; empty for none.
        foot: a line at the end of the page; empty for none.

    Returns:
        The HTML text. The template calls ``section`` with headings that are unique in the page.
    """
    from markupsafe import Markup

    contents: list[tuple[str, str]] = []

    def section(heading: str, caller: Callable[[], Markup]) -> Markup:
        # Links to a section must stay the same when other sections are added
        anchor = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"
        contents.append((anchor, heading))
        text = '<section id="{}">\n<h2>{}</h2>\n{}</section>\n'
        return Markup(text).format(anchor, heading, caller())

    # base.html renders the sections first, so that the table of contents above them knows them
    page = {"title": title, "subtitle": subtitle, "foot": foot, "contents": contents}
    loaded = environment().get_template(template)
    return loaded.render({**data, "page": page, "section": section}) + "\n"


def is_number(cell: str) -> bool:
    """Tell whether a cell begins as a number and is aligned right: ``0.81 (0.7 to 0.9)``."""
    return bool(re.match(r"[-+<>]?\s?\d", cell)) or cell in ("", "-", "n/a")


@cache
def environment(package: str = "fedsilo.pages", *, html: bool = True) -> Environment:
    """Build the environment that renders the templates in the folder of a package."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # A misspelt name in a template is an error, and not an empty text on the page
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.tests["number"] = is_number
    return environment
