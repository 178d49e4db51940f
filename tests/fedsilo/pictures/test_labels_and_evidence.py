"""Pictures of certainty and of who holds what, looked at by what stands in their axes."""

import io
from typing import Any

import pytest

from fedsilo.pictures.labels_and_evidence import draw_distribution, draw_evidence
from fedsilo.server_app.run.ending import evidence_document


def bins_of(*rows: tuple[float, float, float]) -> dict[str, dict[str, float]]:
    """Return bins of (count, right, mean)."""
    parts = ("count", "right", "mean")
    return {str(i): dict(zip(parts, row, strict=True)) for i, row in enumerate(rows)}


# s2a holds nothing in the first bin of confidence
DOCUMENT: dict[str, Any] = {
    "reliability": {
        "s1a": bins_of((2, 1, 0.25), (4, 4, 0.9)),
        "s2a": bins_of((0, 0, 0.0), (2, 0, 0.6)),
    },
    "certainty": {
        "s1a": bins_of((6, 5, 0.4), (0, 0, 0.0)),
        "s2a": bins_of((1, 0, 0.1), (1, 0, 0.8)),
    },
}


def points(line: Any) -> list[list[float]]:
    return [list(map(float, pair)) for pair in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def test_a_line_per_site_goes_through_its_bins_that_hold_samples() -> None:
    left, right = draw_evidence(DOCUMENT)["evidence.png"].axes
    told = {line.get_label(): points(line) for line in left.lines}
    assert told == {
        "s1a": [[0.25, 0.5], [0.9, 1.0]],
        "s2a": [[0.6, 0.0]],
        "perfectly calibrated": [[0, 0], [1, 1]],
    }
    assert {line.get_label(): points(line) for line in right.lines} == {
        "s1a": [[0.4, 5 / 6]],
        "s2a": [[0.1, 0.0], [0.8, 0.0]],
    }


def bars(axes: Any) -> list[list[float]]:
    """Return left edge, width and height of each bar."""
    return [[bar.get_x(), bar.get_width(), bar.get_height()] for bar in axes.patches]


def test_bars_are_the_accuracy_of_all_sites_samples_in_the_middle_of_their_bin() -> None:
    left, right = draw_evidence(DOCUMENT)["evidence.png"].axes
    # Two bins, each 0.5 wide and drawn 0.45: 1 of 2, and 4 of 4 + 2
    assert bars(left) == [
        pytest.approx([0.025, 0.45, 0.5]),
        pytest.approx([0.525, 0.45, 4 / 6]),
    ]
    assert bars(right) == [
        pytest.approx([0.025, 0.45, 5 / 7]),
        pytest.approx([0.525, 0.45, 0.0]),
    ]


def numbers(axes: Any) -> dict[str, float]:
    """Return the texts of axes with their horizontal places."""
    return {text.get_text(): text.get_position()[0] for text in axes.texts}


def test_the_numbers_of_samples_stand_at_their_mean() -> None:
    left, right = draw_evidence(DOCUMENT)["evidence.png"].axes
    assert numbers(left) == pytest.approx({"2": 0.25, "6": (4 * 0.9 + 2 * 0.6) / 6})
    assert numbers(right) == pytest.approx({"7": (6 * 0.4 + 0.1) / 7, "1": 0.8})


def test_a_bin_that_no_site_fills_has_no_bar() -> None:
    none = {kind: {"s1a": bins_of((0, 0, 0.0), (3, 2, 0.7))} for kind in DOCUMENT}
    left, _ = draw_evidence(none)["evidence.png"].axes
    assert bars(left) == [pytest.approx([0.525, 0.45, 2 / 3])]
    assert [text.get_text() for text in left.texts] == ["3"]


def test_axes_and_legend_say_what_is_shown_and_the_metrics_can_be_saved() -> None:
    found = draw_evidence(DOCUMENT)
    assert list(found) == ["evidence.png"]
    left, right = found["evidence.png"].axes
    assert (left.get_title(), left.get_xlabel()) == ("Reliability", "confidence; numbers: samples")
    assert right.get_title() == "Accuracy against vacuity"
    assert right.get_xlabel() == "vacuity (1: no evidence); numbers: samples"
    for axes in (left, right):
        assert axes.get_ylabel() == "accuracy"
        assert axes.get_xlim() == (0, 1)
    (both,) = found["evidence.png"].legends
    assert [text.get_text() for text in both.texts] == ["s1a", "s2a", "perfectly calibrated"]
    colours = [[line.get_color() for line in axes.lines[:2]] for axes in (left, right)]
    assert colours[0] == colours[1], "one legend is for both"
    picture = io.BytesIO()
    found["evidence.png"].savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")


def test_a_site_without_bins_has_no_line_and_the_others_are_drawn() -> None:
    values = {"s3a": {"accuracy": 1.0}} | {
        site: {
            f"{kind}.{place}.{part}": value
            for kind, sites in DOCUMENT.items()
            for place, found in sites[site].items()
            for part, value in found.items()
        }
        for site in ("s1a", "s2a")
    }
    document = evidence_document(values)
    assert document == DOCUMENT
    left, _ = draw_evidence(document)["evidence.png"].axes
    assert [line.get_label() for line in left.lines] == ["s1a", "s2a", "perfectly calibrated"]


SILOS = {
    "bcn": {
        "label_counts": {"train": [4, 2], "val": [1, 0], "test": [2, 1]},
        "classes": ["other", "nevus"],
    },
    "msk4": {
        "label_counts": {"train": [3, 0], "val": [0, 0], "test": [1, 0]},
        "classes": ["other", "nevus"],
    },
}


def test_hospitals_are_bars_of_their_classes_over_all_splits() -> None:
    found = draw_distribution(SILOS)
    assert list(found) == ["distribution.png"]
    (axes,) = found["distribution.png"].axes
    lower, upper = axes.containers
    assert [bar.get_height() for bar in lower] == [7, 4]
    assert [bar.get_y() for bar in lower] == [0, 0]
    assert [bar.get_height() for bar in upper] == [3, 0]
    assert [bar.get_y() for bar in upper] == [7, 4]
    assert (lower.get_label(), upper.get_label()) == ("other", "nevus")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["bcn", "msk4"]
    assert [(text.get_text(), text.get_position()) for text in axes.texts] == [
        ("10", (0, 10)),
        ("4", (1, 4)),
    ]
    assert axes.get_ylabel() == "samples, all splits"


@pytest.mark.parametrize("named", [{}, {"classes": []}])
def test_classes_without_names_are_numbered(named: dict[str, Any]) -> None:
    silos = {"s1a": {"label_counts": {"train": [4, 2, 1]}, **named}}
    (legend,) = draw_distribution(silos)["distribution.png"].legends
    assert [text.get_text() for text in legend.texts] == ["class 2", "class 1", "class 0"]


def test_of_many_classes_as_many_names_stand_beside_the_picture_as_fit() -> None:
    silos = {"s1a": {"label_counts": {"train": [1] * 43}}}
    (legend,) = draw_distribution(silos)["distribution.png"].legends
    named = [text.get_text() for text in legend.texts]
    assert named == [f"class {label}" for label in range(42, -1, -3)]


def test_of_many_sites_sizes_and_spreads_are_drawn() -> None:
    counts = [{"train": [place, 1], "test": [0, 1]} for place in range(50)]
    silos = {f"s{place:03}": {"label_counts": of_site} for place, of_site in enumerate(counts)}
    (figure,) = draw_distribution(silos).values()
    left, right = figure.axes
    assert [bar.get_height() for bar in left.patches] == list(range(51, 1, -1))  # type: ignore[attr-defined]
    assert left.get_xlabel() == "50 sites, largest first"
    assert [tick.get_text() for tick in right.get_xticklabels()] == ["class 0", "class 1"]


def test_of_many_sites_the_five_that_are_most_often_wrong_have_lines() -> None:
    sites = {f"s{place:03}": bins_of((100, place, 0.5)) for place in range(50)}
    (figure,) = draw_evidence({"reliability": sites, "certainty": sites}).values()
    named = [line.get_label() for line in figure.axes[1].lines]
    assert named == [f"s{place:03}" for place in range(5)]
