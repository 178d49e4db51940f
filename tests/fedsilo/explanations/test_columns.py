"""An explanation by columns: its picture has the names of any table."""

import io

from fedsilo.explanations.columns import ColumnExplanation


def test_a_picture_takes_no_name_for_a_formula() -> None:
    columns = ["$x^$", "price in $ or \\frac$"]
    explanation = ColumnExplanation("va, $x^$.csv, row 0", columns, [0.1, -0.2], 0.6, 0.7)
    figure = explanation.figure()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")
