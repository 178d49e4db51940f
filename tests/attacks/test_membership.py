"""Whether one patient was trained on: nobody can tell it better than epsilon allows."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import beta

from fedsilo.client_app.training.compute import choose_compute
from fedsilo.client_app.training.loop import train_locally
from fedsilo.client_app.training.private import PrivateTraining
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.seeding import generator
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.privacy.accountant import epsilon, noise_for

DELTA, SHADOWS = 1e-5, 120
SIZE = 60
Score = Callable[[bool, int], float]


def certainty(
    settings: CommonSettings, with_patient: bool, seed: int, shape: tuple[int, ...]
) -> float:
    """Return how sure a model, trained with an odd patient or not, is of the patient's label.

    The attacker knows all others, the initial weights and the settings, and has chosen a patient
    who pulls hard: far out, with a label that the others contradict.
    """
    rng = torch.Generator().manual_seed(5)
    inputs = torch.randn(SIZE, *shape, generator=rng)
    labels = (inputs.flatten(1).sum(dim=1) > 0).long()
    patient, label = torch.full((1, *shape), 2.0), torch.tensor([0])
    if with_patient:
        inputs, labels = torch.cat([inputs, patient]), torch.cat([labels, label])
    network = build_classifier(settings, Task(shape, 2))
    compute = choose_compute("cpu", "fp32", 1)
    private = None
    if settings.is_private():
        noise, drawn = generator(seed, "noise"), generator(seed, "batches")
        private = PrivateTraining(settings, SIZE, noise, drawn)
    key = (1, f"shadow{seed}")
    train_locally(network, Split(inputs, labels), settings, compute, key, private=private)
    network.eval()
    with torch.no_grad():
        return float(torch.log_softmax(network(patient), dim=1)[0, 0])


def distinguished(settings: CommonSettings, shape: tuple[int, ...], shadows: int) -> float:
    """Return epsilon's lower bound, at 95 %, that the best threshold on the score shows.

    Half of the shadow models choose the threshold, the other half are judged by it (Jagielski et
    al. 2020); bounds of both error rates are Clopper and Pearson's.
    """
    seeds = range(shadows)
    inside = np.array([certainty(settings, True, seed, shape) for seed in seeds])
    outside = np.array([certainty(settings, False, 10_000 + seed, shape) for seed in seeds])
    half = shadows // 2
    thresholds = np.concatenate([inside[:half], outside[:half]])
    gaps = [(inside[:half] >= t).mean() - (outside[:half] >= t).mean() for t in thresholds]
    best = thresholds[int(np.argmax(gaps))]
    hits, alarms = (int((part[half:] >= best).sum()) for part in (inside, outside))
    least = float(beta.ppf(0.025, hits, half - hits + 1)) if hits else 0.0
    most = float(beta.ppf(0.975, alarms + 1, half - alarms)) if alarms < half else 1.0
    return max(0.0, math.log(max(least - DELTA, 1e-12) / most))


def settings_of(budget: float, network: str) -> CommonSettings:
    """Return a training of ten full batches within a budget; 0: without differential privacy."""
    noise = noise_for(budget, DELTA, lambda z: {(z, 1.0): 10}) if budget else 0.0
    return CommonSettings(
        network=network,
        width=8,
        dropout=0.0,
        optimiser="sgd",
        learning_rate=1.0,
        batch_size=10_000,
        local_steps=10,
        sample_clip_norm=1.0 if budget else 0.0,
        noise_multiplier=noise,
    )


@pytest.mark.parametrize("budget", [0.5, 2.0])
def test_membership_is_told_within_epsilon_on_a_table(budget: float) -> None:
    settings = settings_of(budget, "logistic")
    assert epsilon({(settings.noise_multiplier, 1.0): 10}, DELTA) <= budget
    assert distinguished(settings, (13,), SHADOWS) <= budget


def test_the_attack_tells_membership_where_there_is_no_noise() -> None:
    assert distinguished(settings_of(0.0, "logistic"), (13,), SHADOWS) > 2


@pytest.mark.soak
@pytest.mark.parametrize("budget", [0.5, 2.0])
def test_membership_is_told_within_epsilon_on_images(budget: float) -> None:
    assert distinguished(settings_of(budget, "conv"), (1, 8, 8), SHADOWS) <= budget
