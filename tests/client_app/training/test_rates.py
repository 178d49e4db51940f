"""Learning rates over the steps of all rounds, by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsilo.client_app.training.rates import check_schedule, rate_setter
from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.engines.inline_engine import flower_identity
from tests.support.quadratic import HESSIANS, RATE, SAMPLES, SLOPES, START, rounds_of

COSINE_OF_FOUR = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]


def settings_of(schedule: str, rounds: int, arguments: str = "", **more: Any) -> CommonSettings:
    return CommonSettings(
        schedule=schedule, schedule_arguments=arguments, rounds=rounds, learning_rate=0.1, **more
    )


def rates(settings: CommonSettings, steps: int = 1, round_: int = 0) -> list[float]:
    """Return the learning rate of each step, over 0.1: of all rounds, or of one, from 1."""
    weight = nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weight], lr=0.1)
    before = max(0, round_ - 1) * steps
    set_rates = rate_setter([optimiser], settings, before, settings.rounds * steps)
    assert set_rates is not None
    found = []
    for _ in range(steps if round_ else settings.rounds * steps):
        set_rates()
        found.append(optimiser.param_groups[0]["lr"] / 0.1)
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (settings_of("cosine", 4), COSINE_OF_FOUR),
        (settings_of("cosine", 2, "{eta_min: 2e-2}"), [1, 0.2 + 0.8 / 2]),
        (settings_of("step", 5, "{step_size: 2, gamma: 0.5}"), [1, 1, 0.5, 0.5, 0.25]),
        (settings_of("constant", 5, warm_up=3.0), [0.25, 0.5, 0.75, 1, 1]),
        (settings_of("constant", 4, warm_up=0.5), [1 / 3, 2 / 3, 1, 1]),
        (settings_of("cosine", 6, warm_up=2.0), [1 / 3, 2 / 3, *COSINE_OF_FOUR]),
        # One step up from 1/25 to 1, then three down to 1/250000 by half a wave
        (
            settings_of("one-cycle", 5, "{pct_start: 0.4}"),
            [1 / 25, 1, *((1 + math.cos(math.pi * k / 3)) / 2 for k in (1, 2, 3))],
        ),
    ],
)
def test_the_rates_of_each_round_by_hand(settings: CommonSettings, expected: list[float]) -> None:
    check_schedule(settings)
    assert rates(settings) == pytest.approx(expected, abs=1e-5)


def test_a_site_of_more_steps_has_the_rates_of_others_at_the_beginning_of_each_round() -> None:
    settings = settings_of("cosine", 4)
    few, many = rates(settings, 1), rates(settings, 3)
    assert many[::3] == pytest.approx(few)
    assert many[1] == pytest.approx((1 + math.cos(math.pi / 12)) / 2)


def test_a_round_alone_has_the_rates_that_it_has_among_all() -> None:
    settings = settings_of("one-cycle", 6)
    together = rates(settings, 4)
    for round_ in range(1, 7):  # a site that joins late, or goes on after a death
        assert rates(settings, 4, round_) == together[(round_ - 1) * 4 : round_ * 4]


def test_a_slower_group_follows_by_the_same_factor() -> None:
    fast, slow = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimiser = torch.optim.SGD([{"params": [fast]}, {"params": [slow], "lr": 0.02}], lr=0.1)
    beside = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    set_rates = rate_setter([optimiser, beside], settings_of("cosine", 4), 2, 4)
    assert set_rates is not None
    set_rates()  # the third of four
    found = [group["lr"] for group in (*optimiser.param_groups, *beside.param_groups)]
    assert found == pytest.approx([0.05, 0.01, 0.5])


def test_without_a_schedule_no_rate_is_touched() -> None:
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert rate_setter([optimiser], CommonSettings(), 0, 0) is None
    uncounted = settings_of("cosine", 4)  # Fed-Align-CL's pre-training
    assert rate_setter([optimiser], uncounted, 0, 0) is None


def test_four_rounds_of_a_quadratic_are_those_of_cosine_rates_in_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site k takes k + 1 steps a round, each at its own place of the half wave."""
    own = {"schedule": "cosine"}
    with flower_identity():
        found = rounds_of("fedavg", tmp_path, monkeypatch, {}, rounds=4, **own)
    shares, w, expected = np.array(SAMPLES) / sum(SAMPLES), np.array(START), []
    for round_ in range(4):
        trained = []
        for site in range(3):
            y, steps = w, site + 1
            for step in range(steps):
                place = (round_ * steps + step) / (4 * steps)
                rate = RATE * (1 + math.cos(math.pi * place)) / 2
                y = y - rate * (HESSIANS[site] @ y - SLOPES[site])
            trained.append(y)
        w = shares @ np.array(trained)
        expected.append(w)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (settings_of("cosine", 4, "{T_max: 3}"), "schedule 'cosine' takes eta_min"),
        (settings_of("constant", 4, "{gamma: 3}"), "schedule 'constant' takes none"),
        (settings_of("step", 4, "{gamma: 0.1}"), "needs the rounds of a step"),
        (settings_of("step", 4, "{step_size: -1}"), "needs the rounds of a step, above 0"),
        (settings_of("step", 4, "{step_size: x}"), "cannot be made"),
        (settings_of("one-cycle", 4, "{anneal_strategy: up}"), "cannot be made"),
        (settings_of("cosine", 4, "{eta_min: -1}"), "negative or infinite"),
        (settings_of("cosine", 4, warm_up=4.0), "lower it below 'rounds'"),
        (settings_of("cosine", 4, rate_decay="inverse-sqrt"), "both set the learning rate"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(settings: CommonSettings, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        check_schedule(settings)
