"""A page as PDF: its text is there, its bytes repeat, and nothing is loaded."""

import builtins
import io
import sys

import pytest
from pypdf import PdfReader

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.studies.report.page import Section, Text, page
from fedsilo.server_app.studies.report.pdf import pdf_of, write_page

_PAGE = page("A title", [Section("A section", [Text(["One sentence."])])])


def test_pdf_of_page_has_its_text():
    reader = PdfReader(io.BytesIO(pdf_of(_PAGE)))
    text = " ".join(page.extract_text() for page in reader.pages)
    assert "A title" in text
    assert "One sentence." in text


def test_pdf_of_same_page_has_same_bytes():
    assert pdf_of(_PAGE) == pdf_of(_PAGE)


def test_pdf_page_that_names_a_file_shows_none_of_it(tmp_path):
    secret = tmp_path / "secret.svg"
    secret.write_text('<svg xmlns="http://www.w3.org/2000/svg"><text y="20">secret</text></svg>')
    page = pdf_of(f'<p>seen</p><img src="{secret.as_uri()}">')
    text = PdfReader(io.BytesIO(page)).pages[0].extract_text()
    assert text.strip() == "seen"


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ImportError("no weasyprint"), r"pip install 'fedsilo\[pdf\]'"),
        (OSError("cannot load library 'pango'"), "apt install libpango"),
    ],
)
def test_pdf_without_its_packages_says_what_to_install(error, fix, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **words):
        if name.startswith("weasyprint"):
            raise error
        return real(name, *rest, **words)

    monkeypatch.delitem(sys.modules, "weasyprint", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingError, match=fix):
        pdf_of(_PAGE)


def test_page_that_is_named_as_its_pdf_is_refused(tmp_path):
    with pytest.raises(SettingError, match="would be written twice: give --out another name"):
        write_page(tmp_path / "page.pdf", lambda: _PAGE, pdf=True)
    assert list(tmp_path.iterdir()) == []


def test_making_a_pdf_leaves_damaged_images_refused() -> None:
    """weasyprint's import tells Pillow to fill what is missing of an image with grey."""
    from PIL import ImageFile

    pdf_of("<p>one</p>")
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
