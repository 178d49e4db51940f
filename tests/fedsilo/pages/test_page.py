"""A page: nothing of its content is taken for HTML, nothing in it is loaded, bytes do not vary."""

import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedsilo.core.drawing.palette import line_styles
from fedsilo.core.errors import SettingError
from fedsilo.models.measures.intervals import Estimate
from fedsilo.pages import page as page_module
from fedsilo.pages.page import (
    Picture,
    Table,
    environment,
    is_number,
    refuse_twice,
    render_page,
    write_page,
)
from fedsilo.pages.page_pictures import curves, estimates, svg_of
from tests.support.printed import printed_text

_TEMPLATES = Path(page_module.__file__).parent / "templates"
_NASTY = "<script>alert('a')</script> & \"b\""
_VOID = {"meta", "link", "use"}
# The pages of 'fedsilo watch --port', the only ones with a script: their server brings it
_LIVE = {"notice.html", "runs.html", "side_by_side.html", "watch.html"}


class _Outline(HTMLParser):
    """Collects a page's tags, ids, links and text, and holds that tags close in their order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [] if tag in _VOID else [tag]
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("href", "src", "xlink:href"):
                self.references.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _figure() -> Figure:
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4], "o--", label="va")
    axes.set_xlabel("round & more")
    axes.legend()
    return figure


# A page of every kind of block
_TEMPLATE = """
{% extends "base.html" %}
{% import "blocks.html" as b %}
{% block main %}
{% call section("What is shown") %}
{{ b.text([word, word]) }}
{{ b.text([word], true) }}
{{ b.items([word], word) }}
{{ b.facts([(word, word)]) }}
{{ b.tables(tables) }}
{{ b.pictures(pictures) }}
{% endcall %}
{% call section("More") %}{% endcall %}
{% call section(word) %}
{{ b.text([word]) }}
{% endcall %}
{% endblock %}
"""


def _page(word: str, title: str = "A report", shared: str = "") -> str:
    pictures = [Picture(svg_of(_figure(), name), word, word) for name in ("one", "two")]
    tables = [Table(word, [word, word], [[word, "0.5"], [word, word]], word)]
    data = {"word": word, "tables": tables, "pictures": pictures}
    template = environment().from_string(_TEMPLATE)
    return render_page(template, title, data, subtitle=shared, foot=shared)


def test_a_page_is_whole_and_escapes_all_that_it_is_given() -> None:
    html = _page(_NASTY, _NASTY, _NASTY)
    outline = _Outline(html)
    assert outline.open == []
    assert "script" not in outline.tags
    assert outline.tags.count("svg") == 2
    assert sum(_NASTY in text for text in outline.text) == 23
    assert html.count("&lt;script&gt;") == 26  # also in names for who cannot see the thing


def test_ids_are_there_once_and_every_reference_stays_in_the_page() -> None:
    outline = _Outline(_page("word"))
    assert len(outline.ids) == len(set(outline.ids))
    inside = [to.removeprefix("#") for to in outline.references if to.startswith("#")]
    assert set(inside) <= set(outline.ids)
    assert {to for to in outline.references if not to.startswith("#")} == {"data:,"}
    assert [name for name in outline.ids if name.startswith(("what", "more"))] == [
        "what-is-shown",
        "more",
    ]


def test_the_same_content_gives_the_same_bytes() -> None:
    assert _page("word") == _page("word")


@pytest.mark.parametrize("template", sorted(environment().list_templates(["html"])))
def test_a_template_takes_nothing_as_markup_but_the_svg_of_a_picture(template: str) -> None:
    source = (_TEMPLATES / template).read_text()
    assert environment().autoescape is True
    assert set(re.findall(r"[\w.]+ *\| *safe", source)) <= {"picture.svg | safe"}
    assert "autoescape" not in source
    assert "__" not in source, "a template asks for values, not for their class"


@pytest.mark.parametrize("template", sorted(environment().list_templates(["html"])))
def test_a_page_extends_the_base_which_has_the_only_stylesheet(template: str) -> None:
    source = (_TEMPLATES / template).read_text()
    base = ""
    if template in _LIVE:
        base = "live.html"
    elif template == "live.html" or ("{% block main %}" in source and template != "base.html"):
        base = "base.html"
    extended = re.match(r'{% extends "(.*)" %}\n', source)
    assert (extended.group(1) if extended else "") == base
    assert ("<style" in source) == (template == "base.html")
    assert ("<script" in source) == (template == "live.html")


def test_a_picture_has_room_for_its_panel_below_long_names() -> None:
    names = {f"{start}-hospital-of-the-region-with-a-long-name-{start}": 0.5 for start in "ab"}
    found = {name: Estimate(value) for name, value in names.items()}
    line = {name: {0: value, 1: value} for name, value in names.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns where the panel has no room
        rows = estimates("rows", {"mean": found}, "share")
        curve = curves("lines", line, line_styles(list(line)), "share")
    for svg in (rows, curve):
        assert "a-hospita … -long-name-a" in svg
        assert "b-hospita … -long-name-b" in svg


def test_letters_of_a_picture_stay_letters_and_it_brings_no_style_of_the_whole_page() -> None:
    svg = svg_of(_figure(), "curve")
    assert ">round &amp; more<" in svg
    assert svg.startswith("<svg")
    assert not any(word in svg for word in ("<style", "<metadata", "<?xml"))


@pytest.mark.parametrize("cell", ["0.81 (0.70 to 0.90)", "12", "-3", "< 10", "-", "n/a", ""])
def test_cells_that_read_as_numbers(cell: str) -> None:
    assert is_number(cell)


@pytest.mark.parametrize("cell", ["va", "no samples", "epoch 3", "- a dash"])
def test_cells_of_words(cell: str) -> None:
    assert not is_number(cell)


def test_svg_has_no_more_of_a_name_than_a_name_in_html_may_have() -> None:
    svgs = [svg_of(_figure(), name) for name in ('by-a"><b>\\1', "by-a-b-1")]
    ids = [set(re.findall(r'id="(.*?)"', svg)) for svg in svgs]
    assert all(re.fullmatch(r"by-a-b-1-[\w.-]+", one) for one in ids[0])
    assert not ids[0] & ids[1]


_DATA = {
    "verdict": "One sentence.",
    "alarm": True,
    "facts": [("run", "a run")],
    "checks": [("a check", "0.1", "above 0.25", "ok")],
    "missing": ["coverage: no calibration"],
}
_PAGE = render_page("monitor.html", "A title", _DATA)


def test_a_printed_page_has_its_text_and_no_navigation() -> None:
    text = printed_text(_PAGE)
    assert "A title" in text
    assert "One sentence." in text
    # The table of contents names it once more, and is not printed
    assert _PAGE.count("What was not checked") == 2
    assert text.count("What was not checked") == 1


def test_a_page_is_written_where_no_file_is(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert write_page(out, lambda: "one") == out
    with pytest.raises(SettingError, match="--overwrite"):
        write_page(out, lambda: "two")
    assert out.read_text() == "one"
    write_page(out, lambda: "two", overwrite=True)
    assert out.read_text() == "two"
    with pytest.raises(SettingError, match="is a folder"):
        write_page(tmp_path, lambda: "three", overwrite=True)


def test_a_file_that_would_be_written_twice_is_refused(tmp_path: Path) -> None:
    refuse_twice([tmp_path / "a", tmp_path / "b"], "--out")
    with pytest.raises(SettingError, match="b would be written twice: give --out another name"):
        refuse_twice([tmp_path / "a", tmp_path / "b", tmp_path / "b"], "--out")
