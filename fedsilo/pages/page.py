"""Renders pages for people: one HTML file that loads nothing and runs nothing.

Every page is a template of its own in ``templates``. The template extends ``base.html``, which has
the only stylesheet, and gets values by name: texts, rows of tables, pictures. The same values give
the same text. Everything is escaped except a picture's SVG, which fedsilo itself has drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.models.measures.intervals import Estimate

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markupsafe import Markup


@dataclass(frozen=True)
class Table:
    """A table on a page; the first cell of a row is its heading, ``note`` explains the numbers."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture on a page: the SVG, a description for readers who cannot see it, and a caption."""

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
    """Render a template as an HTML page.

    The template marks each section by a call of ``section`` with the heading. The anchor of a
    section is made from its heading, so the headings on a page should differ. This is not checked.
    A page with more than two sections gets a table of contents.

    Args:
        template: a template that extends ``base.html``, or its name.
        title: the page's title and first heading.
        data: the values of the template's variables, by name. The function ``section`` is added.
        subtitle: a line below the title; empty for none.
        foot: a line at the end of the page; empty for none.

    Returns:
        The HTML text.
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
    """Tell whether a table's cell is aligned right: it begins with a number, or is empty.

    ``0.81 (0.7 to 0.9)`` and ``< 10`` count as numbers; "-" and "n/a" count as empty.
    """
    return bool(re.match(r"[-+<>]?\s?\d", cell)) or cell in ("", "-", "n/a")


@cache
def environment(package: str = "fedsilo.pages", *, html: bool = True) -> Environment:
    """Build the Jinja environment that renders the templates of a package.

    Later calls with the same arguments return the same environment. If a template uses an unknown
    variable, Jinja raises an error. The Jinja test ``number`` tells a template whether to align the
    text of a table cell to the right.

    Args:
        package: the package with the templates, in its folder ``templates``.
        html: whether to escape values for HTML.
    """
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


def template_text(name: str) -> str:
    """Return the text of a file in the folder of the templates, such as a script."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def write_page(out: Path, page: Callable[[], str], *, overwrite: bool = False) -> Path:
    """Build a page, write it to the file ``out``, and return ``out``.

    Args:
        out: the file to write.
        page: a function that builds the page. It is called only if the file may be written.
        overwrite: whether to replace an existing file.

    Raises:
        SettingError: ``out`` is a folder, or ``out`` exists and ``overwrite`` is False. No file is
            then written.
    """
    if out.is_dir():
        raise SettingError(f"{out} is a folder: name a file, such as {out / 'report.html'}")
    if out.exists() and not overwrite:
        raise SettingError(f"{out} exists: choose another --out, or say --overwrite")
    write_atomically(out, page())
    return out


def refuse_twice(paths: Sequence[Path], option: str) -> None:
    """Check that all ``paths`` differ, so that no file is written twice.

    Raises:
        SettingError: a path is listed twice. The message names the path, and asks the user to
            change the command-line option ``option``, such as "--html".
    """
    for path in paths:
        if paths.count(path) > 1:
            raise SettingError(f"{path} would be written twice: give {option} another name")


NONE = "n/a"
BINARY = ("0 (no)", "1 (yes)")  # the groups of a number whose only edge is 0.5


def share(value: float | None) -> str:
    """Format a value, such as a share from 0 to 1, with three decimals. None becomes "n/a"."""
    if value is None:
        return NONE
    return f"{value:.3f}"


def percent(value: float) -> str:
    """Format a share from 0 to 1 in percent with one decimal: ``81.2 %``."""
    return f"{100 * value:.1f} %"


def with_interval(estimate: Estimate | None) -> str:
    """Format a value with its interval, with three decimals: ``0.812 (0.730 to 0.873)``.

    Without an interval, only the value is shown. For None, the text is "n/a".
    """
    if estimate is None:
        return NONE
    value = share(estimate.value)
    if estimate.interval is None:
        return value
    return f"{value} ({share(estimate.interval.low)} to {share(estimate.interval.high)})"


def at_most(bound: float) -> str:
    """Format a bound such as epsilon with two decimals, rounded up so that it is still a bound."""
    # Rounded to nearest, the text could be below what was spent
    return f"{math.ceil(100 * bound) / 100:,.2f}"


def hide_small_count(count: int | None, floor: int) -> str:
    """Format a number of patients; None, a hidden number, becomes ``< 10`` if ``floor`` is 10."""
    if count is None:
        return f"< {floor}"
    return f"{count:,}"


def edge_names(edges: Sequence[float]) -> list[str]:
    """Name the groups between ascending edges: "below 1", "1 to 2", "from 2".

    Yes-or-no values, 0 and 1, have the single edge 0.5. Its groups are "0 (no)" and "1 (yes)".
    ``edges`` must not be empty.
    """
    if list(edges) == [0.5]:
        return list(BINARY)
    names = [f"below {edges[0]:g}"]
    for low, high in pairwise(edges):
        names.append(f"{low:g} to {high:g}")
    return [*names, f"from {edges[-1]:g}"]
