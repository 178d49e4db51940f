import math
import statistics

import pytest
import torch

from fedsilo.models.privacy.noisy_metrics import (
    LOSS_BOUND,
    bounded_parts,
    noisy_metrics,
    parts_bound,
)
from fedsilo.models.privacy.release import Release

RANGES = {"accuracy": 1.0, "loss": LOSS_BOUND, "entropy": math.log(2)}


def told(
    parts: dict[str, torch.Tensor], reported: dict[str, int], noise: float
) -> dict[str, float]:
    release = Release(parts_bound(parts), noise, 1, None)
    return noisy_metrics(parts, reported, RANGES, release)


def test_parts_are_between_0_and_1_of_the_range() -> None:
    rows = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0], [math.nan, 0.5]], dtype=torch.float64)
    parts = bounded_parts(rows, torch.tensor([0, 0, 0, 0]))
    assert parts["accuracy"].tolist() == [1, 1, 0, 1]
    assert parts["loss"].tolist() == pytest.approx(
        [math.log(2) / LOSS_BOUND, 0, 1, math.log(2) / LOSS_BOUND]
    )
    assert parts["entropy"].tolist() == pytest.approx([1, 0, 0, 1])


def test_a_patient_is_in_one_split_alone() -> None:
    one = torch.ones(3)
    names = [f"incoming.{split}.{metric}" for split in ("val", "test") for metric in "ab"]
    assert parts_bound(dict.fromkeys(names, one)) == math.sqrt(2)
    assert parts_bound({"incoming.val.entropy": one}) == 1


@pytest.mark.parametrize(("metric", "range_"), [("accuracy", 1.0), ("loss", LOSS_BOUND)])
def test_the_noise_is_of_one_patients_part_of_all_means(metric: str, range_: float) -> None:
    parts = {
        f"incoming.test.{m}": torch.full((1000,), 0.5) for m in ("accuracy", "loss", "entropy")
    }
    key = f"incoming.test.{metric}"
    draws = [told(parts, {"test": 1000}, 2.0)[key] - 0.5 * range_ for _ in range(1000)]
    expected = 2.0 * range_ * math.sqrt(3) / 1000
    assert statistics.pstdev(draws) == pytest.approx(expected, rel=0.1)
    assert abs(statistics.fmean(draws)) < expected / 5


def test_noise_leads_out_of_no_range() -> None:
    best = {"incoming.test.accuracy": torch.ones(20)}
    draws = [told(best, {"test": 20}, 50.0) for _ in range(50)]
    assert all(0.0 <= found["incoming.test.accuracy"] <= 1.0 for found in draws)


def test_a_mean_is_of_the_samples_that_were_told() -> None:
    half = torch.tensor([0.0, 1.0] * 10)
    found = told({"incoming.test.accuracy": half}, {"test": 25}, 1e-9)
    assert found["incoming.test.accuracy"] == pytest.approx(10 / 25, abs=1e-5)


def test_a_split_without_samples_leaves_noise_like_any_other() -> None:
    found = told({"incoming.val.loss": torch.zeros(0)}, {"val": 25}, 4.0)
    assert 0 <= found["incoming.val.loss"] <= LOSS_BOUND
