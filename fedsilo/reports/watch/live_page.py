"""The parts that all live pages share: addresses, their frame, and the sections that change."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from fedsilo.pages.page import render_page

FOOT = "The page only reads files; closing it changes nothing."
_SECTION = re.compile(r'<section id="([^"]+)">.*?</section>', re.DOTALL)


def address(page: str, **query: str) -> str:
    """Build the address of a page on this server, such as ``/run?name=hearts``."""
    if not query:
        return page
    return f"{page}?{urlencode(query)}"


def render_live(
    template: str, title: str, data: Mapping[str, Any], *, subtitle: str = "", has_list: bool = True
) -> str:
    """Render a page that updates itself in the browser while it is open.

    The open page replaces only those of its sections whose content has changed.

    Args:
        template: the name of a template that extends ``live.html``.
        title: the page's title.
        data: the template's own variables.
        subtitle: a line below the title; empty for none.
        has_list: whether the page links to the list of all runs.
    """
    frame = {"has_list": has_list, "address": address}
    return render_page(template, title, {**frame, **data}, subtitle=subtitle, foot=FOOT)


def split_sections(html: str) -> dict[str, str]:
    """Return id -> HTML of each section of a page, in the page's order."""
    # All foreign text is escaped, so only the template begins and ends sections
    return {found[1]: found[0] for found in _SECTION.finditer(html)}
