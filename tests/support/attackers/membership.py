"""Whether one patient was trained on: what the best threshold on shadow models shows."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy.stats import beta

from fedsilo.client_app.training.compute import choose_compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.client_app.training.private import PrivateTraining, private_steps
from fedsilo.core.seeding import generator
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.maths.standardisation import standardise
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.privacy.accountant import noise_for
from fedsilo.models.privacy.release import Release
from fedsilo.server_app.config.settings import resolve

DELTA, SHADOWS = 1e-5, 120
SIZE = 60


@dataclass(frozen=True)
class Population:
    """The others (n, ...) with their labels (n,), and the one whom the attacker is after."""

    inputs: torch.Tensor
    labels: torch.Tensor
    patient: torch.Tensor
    label: int
    classes: int = 2


def made_up(shape: tuple[int, ...]) -> Population:
    """Return an odd patient who pulls hard: far out, with a label that the others contradict."""
    inputs = torch.randn(SIZE, *shape, generator=torch.Generator().manual_seed(5))
    labels = (inputs.flatten(1).sum(dim=1) > 0).long()
    return Population(inputs, labels, torch.full((1, *shape), 2.0), 0)


@cache
def real(dataset: str) -> Population:
    """Return real patients or digits; the odd one is whom the others' model finds least likely."""
    heart = dataset == "heart"
    cut = (
        {} if heart else {"split.silos": 3, "split.silo-train-size": 40, "split.silo-test-size": 10}
    )
    silo = load_silo("cleveland" if heart else "s1a", resolve({"dataset": dataset} | cut).common)
    inputs, labels = silo.train.inputs, silo.train.labels
    if heart:
        assert silo.declared is not None
        inputs = torch.as_tensor(standardise(inputs, silo.declared), dtype=torch.float32)
    settings = settings_of(0.0, "logistic" if heart else "conv")
    everybody = Population(inputs, labels, inputs[:1], 0, silo.shape.outputs)
    network = trained(settings, everybody, inputs, labels, 0)
    with torch.no_grad():
        likely = -torch.nn.functional.cross_entropy(network(inputs), labels, reduction="none")
    odd = int(likely.argmin())
    others = torch.arange(len(labels)) != odd
    patient, label = inputs[odd : odd + 1], int(labels[odd])
    return Population(inputs[others], labels[others], patient, label, silo.shape.outputs)


def certainty(settings: CommonSettings, whole: Population, with_patient: bool, seed: int) -> float:
    """Return how sure a model, trained with an odd patient or not, is of the patient's label.

    The attacker knows all others, the initial weights and the settings.
    """
    inputs, labels = whole.inputs, whole.labels
    if with_patient:
        inputs = torch.cat([inputs, whole.patient])
        labels = torch.cat([labels, torch.tensor([whole.label])])
    network = trained(settings, whole, inputs, labels, seed)
    with torch.no_grad():
        return float(torch.log_softmax(network(whole.patient), dim=1)[0, whole.label])


def trained(
    settings: CommonSettings,
    whole: Population,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    seed: int,
) -> torch.nn.Module:
    """Return a network in eval mode, trained on inputs (n, ...) and labels (n,)."""
    network = build_classifier(
        settings, NetworkShape(tuple(whole.patient.shape[1:]), whole.classes)
    )
    compute = choose_compute("cpu", "fp32", 1)
    private = None
    if settings.is_private():
        noise, drawn = generator(seed, "noise"), generator(seed, "batches")
        told = len(whole.labels)
        bound, steps = settings.sample_clip_norm, private_steps(settings, told)
        release = Release(bound, settings.noise_multiplier, steps, noise)
        private = PrivateTraining(settings, told, release, drawn)
    key = (1, f"shadow{seed}")
    LocalTraining(network, Split(inputs, labels), settings, compute, key, private=private).run()
    return network.eval()


def distinguished(settings: CommonSettings, whole: Population, shadows: int = SHADOWS) -> float:
    """Return epsilon's lower bound, at 95 %, that the best threshold on the score shows.

    Half of the shadow models choose the threshold, the other half are judged by it (Jagielski et
    al. 2020); bounds of both error rates are Clopper and Pearson's.
    """
    seeds = range(shadows)
    inside = np.array([certainty(settings, whole, True, seed) for seed in seeds])
    outside = np.array([certainty(settings, whole, False, 10_000 + seed) for seed in seeds])
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
        width=2,
        dropout=0.0,
        optimiser="sgd",
        learning_rate=1.0,
        batch_size=10_000,
        local_steps=10,
        sample_clip_norm=1.0 if budget else 0.0,
        noise_multiplier=noise,
    )
