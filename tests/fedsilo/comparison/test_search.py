"""The points of a search: which are drawn, and what is said of the best and of equal ones."""

import pytest

from fedsilo.comparison.search import (
    Search,
    at_an_edge,
    refuse_small,
    without_effect,
)
from fedsilo.core.errors import SettingError
from fedsilo.core.settings_schema import SettingRule

GRID = {"seed": [1, 2, 3], "train.learning-rate": [0.1, 0.2]}
RANGES = {
    "train.learning-rate": [0.001, 0.1],
    "network.width": [4, 16],
    "network.name": ["mlp", "logistic"],
}
LONG = {"train.learning-rate": [0.12345, 0.00678912]}  # more digits than a drawn number keeps


def _rules(*keys: str) -> dict[str, SettingRule]:
    return dict.fromkeys(keys, SettingRule("", float, minimum=0.0))


@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_fewer_points_than_trials_are_refused_with_both_numbers(sampler: str) -> None:
    grid = {"seed": [1], "network": ["mlp", "logistic"]}
    with pytest.raises(SettingError, match=r"'x' declares a grid of 2 points.* tried at 3 "):
        refuse_small(grid, sampler, 3, "x")
    with pytest.raises(SettingError, match="a grid of 0 points"):
        refuse_small({}, sampler, 1, "x")
    refuse_small(grid, sampler, 2, "x")


def test_a_range_has_any_number_of_points() -> None:
    refuse_small(GRID, "tpe", 7, "x")
    with pytest.raises(SettingError, match="a grid of 6 points"):
        refuse_small(GRID, "grid", 7, "x")


def test_declared_values_are_tried_with_all_their_digits() -> None:
    (points,) = Search(LONG, "grid", 2).batches()
    assert sorted(point["train.learning-rate"] for point in points) == [0.00678912, 0.12345]


def test_grid_draws_each_point_once_and_the_same_each_time() -> None:
    (points,) = Search(GRID, "grid", 4).batches()
    assert [points] == [*Search(GRID, "grid", 4).batches()]
    assert len({tuple(point.items()) for point in points}) == 4
    for point in points:
        assert list(point) == ["seed", "train.learning-rate"], "as the grid has them"
        assert all(point[key] in values for key, values in GRID.items())
    (every,) = Search(GRID, "grid", 6).batches()
    assert len({tuple(point.items()) for point in every}) == 6


def _searched(best: float) -> list[float]:
    """Return the learning rates that tpe asks for where those next to ``best`` score best."""
    search, rates = Search(RANGES, "tpe", 30), list[float]()
    for batch in search.batches():
        assert len(batch) <= 4
        for point in batch:
            assert 0.001 <= float(str(point["train.learning-rate"])) <= 0.1
            assert isinstance(point["network.width"], int)
            assert 4 <= point["network.width"] <= 16
            assert point["network.name"] in ("mlp", "logistic")
        batch_rates = [float(str(point["train.learning-rate"])) for point in batch]
        search.tell([-abs(rate - best) for rate in batch_rates])
        rates += batch_rates
    return rates


def test_tpe_goes_where_points_were_good() -> None:
    low, high = _searched(0.002), _searched(0.09)
    assert low == _searched(0.002)
    assert len(low) == 30
    late = sorted(low[-10:])[5], sorted(high[-10:])[5]
    assert late[0] < 0.01 < 0.05 < late[1]


@pytest.mark.parametrize(
    ("best", "told"),
    [
        ({"train.learning-rate": 0.01, "network.width": 8, "network.name": "mlp"}, []),
        (
            {"train.learning-rate": 0.1, "network.width": 8, "network.name": "mlp"},
            ["upper end of 0.001 to 0.1"],
        ),
        # 0.00125 is 0.048 of the two decades, and 0.0013 is 0.057
        (
            {"train.learning-rate": 0.00125, "network.width": 8, "network.name": "mlp"},
            ["lower end of 0.001 to 0.1"],
        ),
        ({"train.learning-rate": 0.0013, "network.width": 8, "network.name": "mlp"}, []),
        (
            {"train.learning-rate": 0.01, "network.width": 4, "network.name": "logistic"},
            ["lower end of 4 to 16"],
        ),
    ],
)
def test_a_best_value_at_an_end_of_its_values_is_told(
    best: dict[str, float | int | str], told: list[str]
) -> None:
    found = [*at_an_edge(RANGES, best, "tpe", _rules("train.learning-rate", "network.width"))]
    assert len(found) == len(told)
    assert all(part in sentence for part, sentence in zip(told, found, strict=True))


def test_a_single_value_has_no_ends() -> None:
    grid = {"seed": [1], "flag": [True, False]}
    assert [*at_an_edge(grid, {"seed": 1, "flag": True}, "grid", {})] == []


@pytest.mark.parametrize(("best", "told"), [(0.0, 0), (0.001, 0), (0.01, 0), (0.1, 1)])
def test_of_a_grids_values_only_ends_with_something_beyond_are_told(best: float, told: int) -> None:
    values = [0.0, 0.001, 0.01, 0.1]
    rules = _rules("train.weight-decay")
    found = [
        *at_an_edge({"train.weight-decay": values}, {"train.weight-decay": best}, "grid", rules)
    ]
    assert len(found) == told
    higher = {"train.weight-decay": values[1:]}
    assert len([*at_an_edge(higher, {"train.weight-decay": 0.001}, "grid", rules)]) == 1


@pytest.mark.parametrize(("most", "told"), [(0.5, 1), (1.0, 0)])
def test_the_most_that_a_setting_may_be_is_no_end(most: float, told: int) -> None:
    grid = {"fraction": [0.25, most]}
    rules = {"fraction": SettingRule("", float, minimum=0.0, maximum=1.0)}
    for sampler in ("grid", "tpe"):
        assert len([*at_an_edge(grid, {"fraction": most}, sampler, rules)]) == told


def test_equal_bits_name_the_settings_that_changed_nothing() -> None:
    points = [{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 2, "b": 2}]
    (told,) = without_effect(["x", "x", "y"], points)
    assert told == "these settings had no effect, the metrics are equal to the last bit: b 2 and 3"
    assert [*without_effect(["x", "y", "z"], points)] == []
    assert [*without_effect(["", "", ""], points)] == [], "no digest is known"
