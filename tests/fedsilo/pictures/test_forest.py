"""The forest plot of a regression, drawn from a document made by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from fedsilo.core.errors import SettingError
from fedsilo.pictures import forest
from fedsilo.pictures.forest import draw_forest

DOCUMENT: dict[str, Any] = {
    "hospitals": ["north", "south"],
    "coefficients": [
        {"name": "age", "estimate": 0.1, "standard-error": 0.05},
        {"name": "dose", "estimate": -0.2, "standard-error": 0.1},
        {"name": "none", "estimate": 0.0, "standard-error": 1.0},
    ],
    "heterogeneity": [
        {
            "name": "age",
            "sites": {
                "north": {"estimate": 0.2, "standard-error": 0.1},
                "south": {"estimate": 0.0, "standard-error": 0.1},
            },
            "fixed": 0.1,
            "fixed-error": 0.07,
            "random": 0.1,
            "random-error": 0.1,
            "i-squared": 0.5,
        },
        # Only one hospital has a fit of its own, so there is nothing to combine
        {"name": "dose", "sites": {"north": {"estimate": -0.2, "standard-error": 0.1}}},
        {"name": "none", "sites": {}},
    ],
}


def odds(estimate: float, error: float) -> tuple[float, float, float]:
    return math.exp(estimate), math.exp(estimate - 2 * error), math.exp(estimate + 2 * error)


def plain(estimate: float, error: float) -> tuple[float, float, float]:
    return estimate, estimate - 2 * error, estimate + 2 * error


@pytest.mark.parametrize(("effect", "ratio"), [(odds, "odds ratio"), (plain, "")])
def test_each_row_has_its_estimate_and_interval(
    effect: forest.Effect, ratio: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(forest, "write_picture", lambda _, figure: drawn.append(figure))
    draw_forest(DOCUMENT, effect, ratio, tmp_path / "forest.png")
    age, dose = [axes for axes in drawn[0].axes if axes.get_visible() and axes.lines]
    names = ["north", "south", "fixed effect", "random effects", "pooled regression"]
    assert [label.get_text() for label in age.get_yticklabels()] == names
    assert [label.get_text() for label in dose.get_yticklabels()] == ["north", names[-1]]
    # An interval and a point for each row, then the line of no effect
    interval, point = age.lines[0], age.lines[1]
    middle, low, high = effect(0.2, 0.1)
    assert list(interval.get_xdata()) == [low, high]
    assert list(point.get_xdata()) == [middle]
    assert next(iter(age.lines[-1].get_xdata())) == (1.0 if ratio else 0.0)
    assert len(age.lines) == 2 * len(names) + 1
    assert age.get_xscale() == ("log" if ratio else "linear")


def test_a_picture_is_written_and_a_run_without_own_fits_has_none(tmp_path: Path) -> None:
    draw_forest(DOCUMENT, odds, "odds ratio", tmp_path / "forest.svg")
    assert b"north" in (tmp_path / "forest.svg").read_bytes()
    with pytest.raises(SettingError):
        draw_forest({**DOCUMENT, "heterogeneity": []}, odds, "", tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
