"""Whether one patient was trained on: nobody can tell it better than epsilon allows."""

import os
from pathlib import Path

import pytest

from fedsilo.models.privacy.accountant import epsilon
from tests.support.attackers.membership import DELTA, distinguished, made_up, real, settings_of

HEART = Path(os.environ.get("FEDSILO_DATA", ""), "heart_disease")


@pytest.mark.parametrize("budget", [2.0, pytest.param(0.5, marks=pytest.mark.soak)])
def test_membership_is_told_within_epsilon_on_a_table(budget: float) -> None:
    settings = settings_of(budget, "logistic")
    assert epsilon({(settings.noise_multiplier, 1.0): 10}, DELTA) <= budget
    assert distinguished(settings, made_up((13,))) <= budget


def test_the_attack_tells_membership_where_there_is_no_noise() -> None:
    assert distinguished(settings_of(0.0, "logistic"), made_up((13,))) > 2


@pytest.mark.soak
@pytest.mark.parametrize("budget", [0.5, 2.0])
def test_membership_is_told_within_epsilon_on_images(budget: float) -> None:
    assert distinguished(settings_of(budget, "conv"), made_up((1, 8, 8))) <= budget


needs_heart = pytest.mark.skipif(not HEART.is_dir(), reason="needs $FEDSILO_DATA/heart_disease")


@needs_heart
@pytest.mark.parametrize("budget", [2.0, pytest.param(0.5, marks=pytest.mark.soak)])
def test_membership_of_a_real_patient_is_told_within_epsilon(budget: float) -> None:
    assert distinguished(settings_of(budget, "logistic"), real("heart")) <= budget


@needs_heart
def test_membership_of_a_real_patient_is_told_where_there_is_no_noise() -> None:
    assert distinguished(settings_of(0.0, "logistic"), real("heart")) > 2


@pytest.mark.soak
@pytest.mark.parametrize("budget", [0.5, 2.0])
def test_membership_of_a_real_digit_is_told_within_epsilon(budget: float) -> None:
    assert distinguished(settings_of(budget, "conv"), real("digits")) <= budget


@pytest.mark.soak
def test_membership_of_a_real_digit_is_told_where_there_is_no_noise() -> None:
    assert distinguished(settings_of(0.0, "conv"), real("digits")) > 2
