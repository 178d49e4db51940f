"""A page as PDF: the same HTML, printed by weasyprint, which may load what is in the page alone."""

from __future__ import annotations

import logging
from typing import Any

from fedsilo.models.contract.errors import SettingError, needs_extra


def pdf_of(html: str) -> bytes:
    """Return a page as PDF; the same page gives the same bytes with the same fonts and weasyprint.

    Args:
        html: a page that loads nothing, as ``page.rendered`` returns it.

    Raises:
        SettingError: the extra 'pdf' or a system library of it is not installed.
    """
    weasyprint = _weasyprint()
    fetcher = weasyprint.urls.URLFetcher(allowed_protocols={"data"})
    document = weasyprint.HTML(string=html, url_fetcher=fetcher)
    return bytes(document.write_pdf(pdf_identifier=b"fedsilo"))


def _weasyprint() -> Any:
    logging.getLogger("weasyprint").setLevel(logging.ERROR)  # it warns of CSS that browsers know
    try:
        with needs_extra("a PDF", "pdf", "leave out --pdf"):
            import weasyprint.urls
    except OSError as error:  # its libraries in C are not Python packages
        raise SettingError(
            f"a PDF needs Pango, which is not installed ({error}): "
            "see 'apt install libpango-1.0-0 libpangoft2-1.0-0', or leave out --pdf"
        ) from None
    return weasyprint
