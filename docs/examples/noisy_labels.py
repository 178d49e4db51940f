"""A data set of your own: training labels flipped at random, to see what a method makes of noise.

fedsilo simulate fed-cl-shifted --plugin docs/examples/noisy_labels.py \
    --set dataset=noisy_labels:FMNIST_40
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedsilo.core.files.locations import Places
from fedsilo.core.seeding import generator
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.silo.silos import DataSet, Silo, Split, fingerprint


def flipped(labels: Tensor, classes: int, share: float, rng: torch.Generator) -> Tensor:
    """Return labels (n,) of which ``share`` are another class, each other class equally likely."""
    rows = torch.randperm(len(labels), generator=rng)[: round(share * len(labels))]
    noisy = labels.clone()
    noisy[rows] += torch.randint(1, classes, rows.shape, generator=rng)
    return noisy % classes


class NoisyLabels(DataSet):
    """Another data set with noise on its training labels, by the run's seed; no other part has any.

    Args:
        base: the name of the other data set.
        share: of the training labels that are flipped, 0 to 1.
    """

    def __init__(self, base: str, share: float) -> None:
        self.base, self.share = data_set(base), share
        self.settings, self.headline = self.base.settings, self.base.headline  # type: ignore[misc]

    @property
    def name(self) -> str:
        """The other's name, and the share in percent."""
        return f"{self.base.name}-noisy-{100 * self.share:.0f}"

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the names of the other's silos."""
        return self.base.silo_names(settings, places)

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        silo = self.base.load(name, settings, places)
        rng = generator(settings.seed, "noisy-labels", name)
        labels = flipped(silo.train.labels, silo.shape.outputs, self.share, rng)
        train = Split(silo.train.inputs, labels)
        return replace(
            silo, train=train, fingerprints={**silo.fingerprints, "train": fingerprint(train)}
        )


FMNIST_20, FMNIST_40 = NoisyLabels("fmnist", 0.2), NoisyLabels("fmnist", 0.4)
DIGITS_20, DIGITS_40 = NoisyLabels("digits", 0.2), NoisyLabels("digits", 0.4)
