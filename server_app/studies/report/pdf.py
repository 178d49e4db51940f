"""A page as PDF: the same HTML, printed by weasyprint, which may load what is in the page alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import SettingError, needs_extra


def write_page(
    out: Path, page: Callable[[], str], *, overwrite: bool = False, pdf: bool = False
) -> list[Path]:
    """Write a page, and with ``pdf`` the same as PDF next to it; return the files.

    ``page`` makes the page, once the files are known to be free.

    Raises:
        SettingError: a file is a folder or exists, page and PDF are one file, or the extra 'pdf' is
            missing; then nothing is written.
    """
    paths = page_paths(out, pdf)
    refuse_twice(paths, "--out")
    for path in paths:
        if path.is_dir():
            raise SettingError(f"{path} is a folder: name a file, such as {path / 'report.html'}")
        if path.exists() and not overwrite:
            raise SettingError(f"{path} exists: choose another --out, or say --overwrite")
    if pdf:
        _weasyprint()
    for path, content in page_files(page(), paths).items():
        write_atomically(path, content)
    return paths


def page_paths(html: Path, pdf: bool) -> list[Path]:
    """Return the files of a page: HTML, and if wanted the same as PDF."""
    return [html, html.with_suffix(".pdf")] if pdf else [html]


def page_files(html: str, paths: Sequence[Path]) -> dict[Path, str | bytes]:
    """Return what is written to ``page_paths``; errors as ``pdf_of``."""
    files: dict[Path, str | bytes] = {paths[0]: html}
    return files | {path: pdf_of(html) for path in paths[1:]}


def refuse_twice(paths: Sequence[Path], option: str) -> None:
    """Raise a SettingError if two of the files to write are one; ``option`` names another."""
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise SettingError(f"{twice} would be written twice: give {option} another name")


def pdf_of(html: str) -> bytes:
    """Return a page as PDF; the same page gives the same bytes with the same fonts and weasyprint.

    Raises:
        SettingError: the extra 'pdf' or a system library of it is not installed.
    """
    weasyprint = _weasyprint()
    fetcher = weasyprint.urls.URLFetcher(allowed_protocols={"data"})
    document = weasyprint.HTML(string=html, url_fetcher=fetcher)
    return bytes(document.write_pdf(pdf_identifier=b"fedsilo"))


def _weasyprint() -> Any:
    from PIL import ImageFile

    logging.getLogger("weasyprint").setLevel(logging.ERROR)  # it warns of CSS that browsers know
    cut_off = ImageFile.LOAD_TRUNCATED_IMAGES
    try:
        with needs_extra("a PDF", "pdf", "leave out --pdf"):
            import weasyprint.urls
    except OSError as error:  # its libraries in C are not Python packages
        raise SettingError(
            f"a PDF needs Pango, which is not installed ({error}): "
            "see 'apt install libpango-1.0-0 libpangoft2-1.0-0', or leave out --pdf"
        ) from None
    finally:
        # Its import lets Pillow take damaged images for whole ones, of patients too
        ImageFile.LOAD_TRUNCATED_IMAGES = cut_off
    return weasyprint
