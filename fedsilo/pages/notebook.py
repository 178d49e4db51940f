"""HTML for notebooks: the lines that the command line prints of a result, as small tables."""

from collections.abc import Iterable
from html import escape

from rich.table import Table

from fedsilo.core.one_line import terminal_text

_MOST = 60  # rows of a table; a notebook keeps every output in its file


def html_of_lines(lines: Iterable[Table | str]) -> str:
    """Convert tables and lines of text to HTML.

    Every text is escaped, because names of sites, classes and files may come from somebody else. A
    table with more than 60 rows ends with a line that says how many are left out.
    """
    parts = []
    for line in lines:
        parts.append(_table(line) if isinstance(line, Table) else f"<p>{_text(line)}</p>")
    return "\n".join(parts)


def _table(table: Table) -> str:
    columns = [list(column.cells) for column in table.columns]
    rows = list(zip(*columns, strict=True))
    head = "".join(f"<th>{_text(column.header)}</th>" for column in table.columns)
    body = [f"<tr>{head}</tr>"]
    for row in rows[:_MOST]:
        body.append("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>")
    caption = f"<caption>{_text(table.title)}</caption>" if table.title else ""
    left = f"<p>{len(rows) - _MOST} more rows</p>" if len(rows) > _MOST else ""
    return f"<table>{caption}{''.join(body)}</table>{left}"


def _text(content: object) -> str:
    # Rich's own texts have their characters in ``plain``
    plain = getattr(content, "plain", content)
    return escape(terminal_text(str(plain)))
