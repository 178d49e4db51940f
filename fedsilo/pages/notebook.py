"""Converts the lines that a command prints for a result to HTML for notebooks."""

from collections.abc import Iterable
from html import escape

from rich.table import Table

from fedsilo.core.one_line import terminal_text

_MOST = 60  # largest number of rows, because a notebook stores every output in its file


def html_of_lines(lines: Iterable[Table | str]) -> str:
    """Convert the output of a command, tables and lines of text, to HTML for a notebook.

    Each string becomes a paragraph. All text is escaped, because names of sites, classes and files
    may come from an untrusted source. Only the first 60 rows of a table are shown. A line below the
    table gives the number of further rows.
    """
    parts = []
    for line in lines:
        if isinstance(line, Table):
            parts.append(_table(line))
        else:
            parts.append(f"<p>{_text(line)}</p>")
    return "\n".join(parts)


def _table(table: Table) -> str:
    # Rich stores a table by columns
    cells_of_columns = [list(column.cells) for column in table.columns]
    rows = list(zip(*cells_of_columns, strict=True))
    parts = ["<table>"]
    if table.title:
        parts.append(f"<caption>{_text(table.title)}</caption>")
    parts.append(_row("th", [column.header for column in table.columns]))
    for row in rows[:_MOST]:
        parts.append(_row("td", row))
    parts.append("</table>")
    if len(rows) > _MOST:
        parts.append(f"<p>{len(rows) - _MOST} more rows</p>")
    return "".join(parts)


def _row(tag: str, contents: Iterable[object]) -> str:
    cells = ""
    for content in contents:
        cells += f"<{tag}>{_text(content)}</{tag}>"
    return f"<tr>{cells}</tr>"


def _text(content: object) -> str:
    # Rich's own texts have their characters in ``plain``
    plain = getattr(content, "plain", content)
    return escape(terminal_text(str(plain)))
