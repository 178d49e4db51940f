import re

import pytest

from fedsilo import privacy_plan as plan
from fedsilo.core.errors import SettingError
from fedsilo.models.privacy.accountant import counts_noise_for, epsilon

SETTINGS = {"rounds": 3, "train.local-steps": 2, "train.batch-size": 50, "server.evaluate-every": 0}


def test_plan_tells_steps_rate_and_a_noise_that_stays_within_the_budget() -> None:
    head, line = plan("fedavg-heart", samples=[200], epsilon=[2.0], settings=SETTINGS)
    assert head.startswith("200 training samples: 6 steps in 3 rounds, each with 25.0% of the")
    assert "; 1 releases of metrics and, at a hospital, one of sample counts" in head
    found = re.search(r"epsilon 2 at delta 1e-05: .*privacy.noise-multiplier=([\d.]+)$", line)
    assert found is not None
    noise = float(found[1])
    counts = counts_noise_for(2.0, 1e-5)
    spent = epsilon({(noise, 0.25): 6, (noise, 1.0): 1, (counts, 1.0): 1}, 1e-5)
    assert 1.9 <= spent <= 2.0


def test_plan_of_full_batches_takes_all_samples_and_measured_rounds_cost() -> None:
    changes = SETTINGS | {"train.batch-size": 1000, "server.evaluate-every": 1}
    lines = list(plan("fedavg-heart", samples=[30, 200], epsilon=[1.0], settings=changes))
    assert [line.partition(":")[0] for line in lines[::2]] == [
        "200 training samples",
        "30 training samples",
    ]
    assert "each with all samples; 4 releases" in lines[0]
    assert lines[1] == lines[3], "with all samples in each step their number does not matter"


@pytest.mark.parametrize(
    ("samples", "budgets"),
    [
        *(([], [1.0]), ([0], [1.0]), ([5], [0.0]), ([5], [])),
        *(([5], [float("nan")]), ([5], [1.0, float("inf")])),
    ],
)
def test_plan_refuses_numbers_that_cannot_be(samples: list[int], budgets: list[float]) -> None:
    with pytest.raises(SettingError, match="must be numbers above 0"):
        list(plan("fedavg-heart", samples=samples, epsilon=budgets))


@pytest.mark.parametrize("noise", [-1.0, float("nan"), float("inf")])
def test_plan_refuses_a_noise_of_counts_that_cannot_be(noise: float) -> None:
    with pytest.raises(SettingError, match="--counts-noise must be 0 or a number above 0"):
        list(plan("fedavg-heart", samples=[5], counts_noise=noise))


@pytest.mark.parametrize("delta", [0.0, 1.0, 2.0, -1e-5, float("nan")])
def test_plan_refuses_a_delta_that_is_no_probability(delta: float) -> None:
    with pytest.raises(SettingError, match="must be above 0 and below 1, such as 1e-05, but is"):
        list(plan("fedavg-heart", samples=[5], delta=delta))
