import math
import statistics

import pytest

from fedsilo.models.privacy.noisy_metrics import LOSS_BOUND, noisy_metrics

SIZES = {"train": 100, "val": 10, "test": 50}
METRICS = {
    "incoming.test.accuracy": 0.123456,
    "incoming.test.loss": 1.5,
    "incoming.test.auc": 0.9,
    "incoming.val.accuracy": 0.5,
    "trained.train.loss": 0.7,
    "new-codewords": 4.0,
}


def test_under_a_cap_only_bounded_means_of_what_came_leave() -> None:
    told, measured = noisy_metrics(METRICS, SIZES, SIZES, 2, 1.0)
    assert measured
    assert told.keys() == {
        *("incoming.test.accuracy", "incoming.test.loss", "incoming.val.accuracy"),
        "new-codewords",
    }
    assert noisy_metrics({"new-codewords": 4.0}, SIZES, SIZES, 2, 1.0) == (
        {"new-codewords": 4.0},
        False,
    )


@pytest.mark.parametrize(("metric", "range_"), [("accuracy", 1.0), ("loss", LOSS_BOUND)])
def test_the_noise_is_of_one_patients_part_of_all_means(metric: str, range_: float) -> None:
    metrics = {
        "incoming.test.accuracy": 0.5,
        "incoming.test.loss": 1.5,
        "incoming.test.entropy": 0.3,
    }
    key = f"incoming.test.{metric}"
    sizes = {"test": 1000}
    draws = [
        noisy_metrics(metrics, sizes, sizes, 2, 2.0)[0][key] - metrics[key] for _ in range(2000)
    ]
    expected = 2.0 * range_ * math.sqrt(3) / 1000
    assert statistics.pstdev(draws) == pytest.approx(expected, rel=0.1)
    assert abs(statistics.fmean(draws)) < expected / 8


def test_noise_leads_out_of_no_range() -> None:
    best, sizes = {"incoming.test.accuracy": 1.0}, {"test": 20}
    draws = [noisy_metrics(best, sizes, sizes, 2, 50.0)[0] for _ in range(50)]
    assert all(0.0 <= found["incoming.test.accuracy"] <= 1.0 for found in draws)


def test_a_mean_is_of_the_samples_that_were_told() -> None:
    told = noisy_metrics({"incoming.test.accuracy": 0.5}, {"test": 20}, {"test": 25}, 2, 1e-9)[0]
    assert told["incoming.test.accuracy"] == pytest.approx(10 / 25)
