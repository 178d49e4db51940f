"""What enters the attention buffer, by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.models.methods.fedevprompt import (
    FedEvPromptSettings,
    any_of_class,
    map_fault,
    most_certain,
    shared_names,
)

VACUITIES = torch.tensor([0.9, 0.2, 0.5, 0.2, 0.1, 0.2])
LABELS = torch.tensor([0, 1, 1, 1, 0, 1])
NAMES = ["head.1.bias", "head.1.weight", "prompts.b", "prompts.t"]


@pytest.mark.parametrize(
    ("label", "count", "chosen"),
    [
        (1, 1, [1]),
        (1, 2, [1, 3]),  # equal ones by their order
        (1, 4, [1, 3, 5, 2]),
        (1, 9, [1, 3, 5, 2]),  # there are no more
        (0, 1, [4]),
        (0, 2, [4, 0]),
        (2, 3, []),
    ],
)
def test_the_samples_of_the_lowest_vacuity_are_chosen(
    label: int, count: int, chosen: list[int]
) -> None:
    assert most_certain(VACUITIES, LABELS, label, count).tolist() == chosen


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=1, max_size=30), st.integers(1, 6))
def test_of_equal_vacuities_the_first_are_chosen(values: list[float], count: int) -> None:
    found = most_certain(torch.tensor(values), torch.zeros(len(values)), 0, count)
    expected = sorted(range(len(values)), key=lambda at: (values[at], at))[:count]
    assert found.tolist() == expected


def test_any_samples_of_the_class_are_drawn_by_the_generator() -> None:
    labels = torch.arange(300) % 3
    first, again, other = (
        any_of_class(labels, 1, 5, torch.Generator().manual_seed(seed)).tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) == 5
    assert all(index % 3 == 1 for index in first + other)


def test_most_certain_of_few_samples_returns_all_and_of_none_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    assert sorted(any_of_class(LABELS, 0, 5, draw).tolist()) == [0, 4]
    assert any_of_class(LABELS, 2, 5, draw).tolist() == []


@pytest.mark.parametrize(
    ("maps", "fault"),
    [
        ([[0.25, 0.75], [0.5, 0.5]], None),
        ([[1.0, 0.0]], None),
        ([[0.5, 0.5004]], None),  # float32 sums of many cells are not exact
        ([[0.5, 0.5], [-0.25, 1.25]], r"a map has a negative value (-0.25)"),
        ([[0.5, 0.5], [0.5, 0.625]], "a map sums to 1.125, not to 1"),
        ([[0.5, 0.375]], "a map sums to 0.875, not to 1"),
        ([[0.0, 0.0]], "a map sums to 0, not to 1"),
        ([[float("nan"), 0.5]], "a map contains non-finite values"),
        ([[0.5, 0.5], [float("inf"), 0.5]], "a map contains non-finite values"),
    ],
)
def test_map_fault_of_an_impossible_map_names_the_fault(
    maps: list[list[float]], fault: str | None
) -> None:
    assert map_fault(torch.tensor(maps)) == fault


def test_no_map_has_no_fault() -> None:
    assert map_fault(torch.zeros(0, 4)) is None


@given(st.integers(1, 5), st.integers(1, 400), st.integers(0, 99))
def test_what_softmax_gives_is_a_map(count: int, cells: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    assert map_fault((5 * torch.randn(count, cells, generator=draw)).softmax(dim=1)) is None


@pytest.mark.parametrize(("shared", "names"), [("none", []), ("b", ["prompts.b"]), ("all", NAMES)])
def test_what_is_averaged_follows_from_the_setting(shared: str, names: list[str]) -> None:
    assert shared_names(FedEvPromptSettings(shared_prompts=shared), NAMES) == names
