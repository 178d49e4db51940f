"""How far sites are apart, by hand."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.survey import MeasuredFeature, Survey
from fedsilo.reports.survey.document import cell_names
from fedsilo.server_app.run.survey import distance, distances
from tests.fedsilo.core.test_survey import made


def _site(**parts: Any) -> Survey:
    return made().model_copy(update=parts)


def test_cells_that_a_site_suppressed_are_one_and_bring_the_sites_nearer() -> None:
    whole = distance([[30, 0, 10, 0], [0, 0, 20, 20]], [40, 40])
    merged = distance([[30, None, 10, None], [None, None, 20, 20]], [40, 40])
    assert whole is not None
    assert merged is not None
    assert merged <= whole
    assert merged == distance([[10, 30], [20, 20]], [40, 40])


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=2, max_size=8),
    st.sets(st.integers(0, 7)),
    st.sets(st.integers(0, 7)),
)
def test_whatever_is_suppressed_the_sites_are_at_least_so_far_apart(
    pairs: list[tuple[int, int]], first: set[int], second: set[int]
) -> None:
    sites = [[pair[place] for pair in pairs] for place in (0, 1)]
    totals = [sum(site) for site in sites]
    told = [
        [None if place in hidden else count for place, count in enumerate(site)]
        for site, hidden in zip(sites, (first, second), strict=True)
    ]
    whole, merged = distance(sites, totals), distance(told, totals)
    assert merged is None or (whole is not None and merged <= whole + 1e-4)


@pytest.mark.parametrize(
    ("counts", "totals"),
    [
        ([None, [1, 2]], [3, 3]),
        ([[None, None], [1, 2]], [3, 3]),
        ([[30, None], [10, 10]], [None, 20]),
        ([[0, 0], [1, 2]], [0, 3]),
        ([[30, None], [10, 10]], [5, 20]),  # more than the total: no site counts so
    ],
)
def test_what_is_not_known_is_not_made_up(
    counts: list[list[int | None] | None], totals: list[int | None]
) -> None:
    assert distance(counts, totals) is None


def test_the_distance_is_jensen_shannons() -> None:
    assert distance([[20, 0], [0, 30]], [20, 30]) == 1.0
    assert distance([[20, 40], [10, 20]], [60, 30]) == 0.0
    middle = [0.75, 0.25]  # of (1, 0) and (1/2, 1/2)
    apart = (math.log2(1 / middle[0]) + sum(0.5 * math.log2(0.5 / share) for share in middle)) / 2
    assert distance([[10, 0], [5, 5]], [10, 10]) == round(math.sqrt(apart), 4)
    assert distance([[10, 0], None], [10, 10]) is None


def test_sites_are_compared_where_they_declare_alike() -> None:
    other = made().about.model_copy(
        update={
            "features": [MeasuredFeature(name="age", edges=[30.0, 60.0]), made().about.features[1]]
        }
    )
    answers = {
        "north": _site(),
        "south": _site(labels={"train": [20, 40]}),
        "west": _site(about=other, labels=None),
    }
    found = distances(answers, "train")
    assert [one["sites"] for one in found["labels"]] == [["north", "south"]]
    compared = {(one["feature"], *one["sites"]) for one in found["features"]}
    assert ("age", "north", "south") in compared
    assert ("age", "north", "west") not in compared
    assert ("ward", "north", "west") in compared
    assert distances(answers, "val") == {"labels": [], "features": []}


def test_cells_have_names() -> None:
    edges = MeasuredFeature(name="age", edges=[30.0, 50.5], lacking=True)
    assert cell_names(edges) == ["below 30", "30 to 50.5", "from 50.5", "no value"]
    assert cell_names(MeasuredFeature(name="ward", levels=["a", "b"])) == ["a", "b"]
    assert cell_names(MeasuredFeature(name="weight")) == []
