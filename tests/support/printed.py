"""Pages as a printer would have them: weasyprint applies the print styles without a browser."""

import io
import logging

from PIL import ImageFile
from pypdf import PdfReader


def printed_text(html: str) -> str:
    """Print a page and return the text of all its sheets, with single blanks."""
    cut_off = ImageFile.LOAD_TRUNCATED_IMAGES
    import weasyprint

    # Its import lets Pillow take damaged images for whole ones, in later tests too
    ImageFile.LOAD_TRUNCATED_IMAGES = cut_off
    logging.getLogger("weasyprint").setLevel(logging.ERROR)  # it warns of CSS that browsers know
    fetcher = weasyprint.urls.URLFetcher(allowed_protocols={"data"})
    sheets = PdfReader(
        io.BytesIO(weasyprint.HTML(string=html, url_fetcher=fetcher).write_pdf())
    ).pages
    return " ".join(" ".join(sheet.extract_text() for sheet in sheets).split())
