import math

import pytest
import torch

from fedsilo.core.errors import SiteError
from fedsilo.models.maths.class_means import (
    ClassTargets,
    class_sums,
    class_targets,
    large_classes,
    matching_loss,
)

# Of three classes the second has no target
TARGETS = ClassTargets(
    torch.tensor([[1.0, 2.0], [0.0, 0.0], [4.0, 4.0]]), torch.tensor([True, False, True])
)


def test_the_sums_of_a_class_are_those_of_its_rows() -> None:
    rows, labels = torch.tensor([[1.0, 2.0], [5.0, 7.0], [3.0, 4.0]]), torch.tensor([2, 0, 2])
    found = class_sums(rows, labels, 4)
    assert found.tolist() == [[5, 7], [0, 0], [4, 6], [0, 0]]
    assert found.dtype == torch.float64


def test_sums_do_not_lose_what_float32_would() -> None:
    rows = torch.tensor([[2.0**24], [1.0], [1.0]])
    assert class_sums(rows, torch.tensor([0, 0, 0]), 1).item() == 2**24 + 2


@pytest.mark.parametrize(
    ("least", "found"), [(1, {0: 1, 2: 10, 3: 11}), (10, {2: 10, 3: 11}), (11, {3: 11}), (12, {})]
)
def test_a_mean_leaves_of_classes_of_enough_samples(least: int, found: dict[int, int]) -> None:
    assert large_classes([1, 0, 10, 11], least) == found


def test_the_loss_is_torchs_mse_where_all_classes_have_a_target() -> None:
    values, labels = torch.tensor([[2.0, 0.0], [4.0, 7.0]]), torch.tensor([0, 2])
    found = matching_loss(values, labels, TARGETS).item()
    assert found == (1 + 4 + 0 + 9) / 4
    assert found == torch.nn.functional.mse_loss(values, TARGETS.values[labels]).item()


def test_a_sample_whose_class_has_no_target_counts_with_nothing() -> None:
    values, labels = torch.tensor([[2.0, 0.0], [9.0, 9.0]]), torch.tensor([0, 1])
    assert matching_loss(values, labels, TARGETS).item() == (1 + 4) / 4


def test_the_loss_pulls_only_samples_whose_class_has_a_target() -> None:
    values = torch.tensor([[2.0, 0.0], [9.0, 9.0]], requires_grad=True)
    loss = matching_loss(values, torch.tensor([0, 1]), TARGETS)
    loss.backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.tolist() == [[0.5, -1.0], [0.0, 0.0]]  # 2 (v - t) / 4


def test_targets_are_read_by_their_names() -> None:
    arrays = {"prototype/2": torch.tensor([4.0, 4.0]), "prototype/0": torch.tensor([1.0, 2.0])}
    found = class_targets(arrays, "prototype/", 3, 2)
    assert found is not None
    assert torch.equal(found.values, TARGETS.values)
    assert torch.equal(found.known, TARGETS.known)
    assert class_targets({}, "prototype/", 3, 2) is None


@pytest.mark.parametrize(
    ("name", "array", "fault"),
    [
        ("prototype/3", [1.0, 2.0], "there are 3 classes, from 0"),
        ("prototype/-1", [1.0, 2.0], "there are 3 classes, from 0"),
        ("head.weight", [1.0, 2.0], "there are 3 classes, from 0"),
        ("prototype/1", [1.0], r"it is \(1,\), not \(2,\)"),
        ("prototype/1", [[1.0, 2.0]], r"it is \(1, 2\), not \(2,\)"),
        ("prototype/1", [1.0, math.nan], "non-finite values"),
    ],
)
def test_what_cannot_be_a_target_is_refused(name: str, array: list[float], fault: str) -> None:
    with pytest.raises(SiteError, match=f"array '{name}' from the server .* {fault}"):
        class_targets({name: torch.tensor(array)}, "prototype/", 3, 2)
