"""What a notebook shows: the lines of the command line as HTML, every text escaped."""

from pathlib import Path

from rich.table import Table
from rich.text import Text

from fedsilo import load_run, predict
from fedsilo.pages.notebook import html_of_lines

ATTACK = "<img src=x onerror=alert(1)>"


def test_every_text_is_escaped_and_control_characters_go() -> None:
    table = Table("site", ATTACK, title=ATTACK)
    table.add_row(ATTACK, Text(ATTACK))
    table.add_row("a\x1b[31m\u202eb", "&")
    html = html_of_lines([table, ATTACK, "[bold]as it is[/bold]"])
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") == 5
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert "<td>&amp;</td>" in html
    assert "[bold]as it is[/bold]" in html


def test_a_long_table_says_how_many_rows_are_left_out() -> None:
    table = Table("site")
    for number in range(75):
        table.add_row(str(number))
    html = html_of_lines([table])
    assert html.count("<td>") == 60
    assert "15 more rows" in html


def test_a_run_shows_its_table_but_not_what_its_pages_must_not_show(hearts: Path) -> None:
    run = load_run(hearts / "fedavg-seed0")
    html = run._repr_html_()
    values = run.summary["sites"]["cleveland"]
    assert f"<td>{values['accuracy']:.3f}</td>" in html
    assert "<td>all</td>" in html
    assert "4 more rows" not in html
    # An accuracy of 1 says that the few patients of the hidden class are right, so it is hidden
    assert run.summary["sites"]["switzerland"]["accuracy"] == 1
    row = html.partition("<td>switzerland</td>")[2].partition("</tr>")[0]
    assert row.startswith("<td>n/a</td><td>n/a</td><td>n/a</td>")
    assert "switzerland" in html.partition("are not shown")[0].rpartition("Some metrics")[2]


def test_predictions_show_a_table_by_class(hearts: Path) -> None:
    found = predict(hearts / "fedavg-seed0", site="va", split="test")
    html = found._repr_html_()  # type: ignore[union-attr]
    for name in found.classes:  # type: ignore[union-attr]
        assert f"<td>{name}</td>" in html
    assert f"{len(found.own)} predicted" in html  # type: ignore[union-attr]
