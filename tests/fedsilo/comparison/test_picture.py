"""The picture of a comparison: which bars it has."""

import pytest

from fedsilo.comparison.picture import draw_comparison
from fedsilo.comparison.tables import tidy


def test_a_bar_is_the_mean_over_seeds_at_a_site_and_a_panel_a_metric() -> None:
    values = {"a": {"north": (0.8, 0.6), "all": (0.7, 0.7)}, "b": {"all": (0.5, 0.9)}}
    results = tidy(
        (name, name, seed, group, metric, value, None, None)
        for metric in ("accuracy", "entropy")
        for name, groups in values.items()
        for group, seeds in groups.items()
        for seed, value in enumerate(seeds)
    )
    figure = draw_comparison(results, "test")
    assert [axes.get_ylabel() for axes in figure.axes] == ["accuracy", "entropy (nats)"]
    a, b = (c for c in figure.axes[0].containers if len(getattr(c, "patches", ())))
    assert [bar.get_height() for bar in a.patches] == pytest.approx([0.7, 0.7])  # type: ignore[attr-defined]
    heights = [bar.get_height() for bar in b.patches]  # type: ignore[attr-defined]
    assert heights[0] != heights[0], "b was not measured at north"
    assert heights[1] == pytest.approx(0.7)
    deviations = [b.errorbar.lines[2][0].get_segments()[1][:, 1]]  # type: ignore[attr-defined]
    assert deviations[0].tolist() == pytest.approx([0.7 - 0.08**0.5, 0.7 + 0.08**0.5])
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["north", "all"]
