"""Lines on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from fedsilo.server_app.cli.printing import line_printer


def test_a_line_is_printed_as_it_is_however_long_and_whatever_its_brackets() -> None:
    output = io.StringIO()
    line = f"/runs/[bold]/{'x' * 100}: [3, 4]"
    line_printer(Console(file=output, width=40))(line)
    assert output.getvalue() == f"{line}\n"
