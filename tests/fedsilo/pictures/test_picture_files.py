"""Pictures are files of the kind that their names end with, with the same bytes each time."""

import runpy
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedsilo.core.errors import SettingError
from fedsilo.pictures import picture_files
from fedsilo.pictures.picture_files import (
    picture_path,
    write_for_screen_and_paper,
    write_picture,
)

BEGINNINGS = {"a.png": b"\x89PNG", "a.PDF": b"%PDF-", "a.svg": b"<?xml"}


def small_figure() -> Figure:
    figure = Figure(figsize=(1, 1), layout="constrained")
    figure.subplots().plot([0, 1], label="Süd")
    return figure


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_picture_is_of_the_kind_that_its_name_ends_with(tmp_path: Path, name: str) -> None:
    written = []
    for folder in ("one", "other"):
        path = tmp_path / folder / name
        path.parent.mkdir()
        write_picture(path, small_figure())
        written.append(path.read_bytes())
    assert written[0].startswith(BEGINNINGS[name])
    assert written[0] == written[1]


def test_a_pdf_has_no_font_that_journals_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the module has them, because tests draw with others
    options = runpy.run_path(picture_files.__file__)["_OPTIONS"]
    monkeypatch.setattr(picture_files, "_OPTIONS", options)
    write_picture(tmp_path / "a.pdf", small_figure())
    written = (tmp_path / "a.pdf").read_bytes()
    assert b"/TrueType" in written or b"/CIDFontType2" in written
    assert b"/Type3" not in written


def test_a_picture_for_screen_and_paper_is_two_files(tmp_path: Path) -> None:
    paths = write_for_screen_and_paper(tmp_path / "curves.png", small_figure())
    assert [path.name for path in paths] == ["curves.png", "curves.pdf"]
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG", b"%PDF"]


@pytest.mark.parametrize("name", ["a.jpg", "a", ".png", "png", "a.png.bak"])
def test_another_ending_is_refused_before_anything_is_drawn(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match=r"\.png, \.svg or \.pdf"):
        picture_path(name)
    with pytest.raises(SettingError):
        write_picture(tmp_path / name, small_figure())
    assert not list(tmp_path.iterdir())
    assert picture_path(None) is None
