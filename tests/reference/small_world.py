"""Three unequal sites of made-up samples and small smooth networks, as a plugin of a run.

A run names this file in 'plugin'. The networks have tanh and no dropout: they are smooth, so that
rounding stays rounding over twenty rounds.
"""

import torch
from torch import nn

from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import DataSet, Silo, Split, fingerprint
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier

SHAPE, CLASSES, TOKENS, CHANNELS = (1, 2, 3), 3, 2, 4
# With batches of eight: two, four and three steps an epoch. The last batch of 'b' is small
SAMPLES = {"a": 16, "b": 28, "c": 21}
MEASURED = 6  # validation and test samples of a site


class SmallWorld(DataSet):
    """Sites whose classes lie around other points, and of which none has many of every class."""

    origin = "made-up"

    @property
    def name(self) -> str:
        """The name for messages."""
        return "small-world"

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the names of the three sites."""
        return list(SAMPLES)

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        rng = torch.Generator().manual_seed(1 + list(SAMPLES).index(name))
        centres = torch.randn(CLASSES, *SHAPE, generator=torch.Generator().manual_seed(0))
        shift = 0.5 * torch.randn(CLASSES, *SHAPE, generator=rng)
        splits = {}
        for part, count in {"train": SAMPLES[name], "val": MEASURED, "test": MEASURED}.items():
            # Class 0 is twice as frequent as each other one
            labels = torch.tensor([0, 1, 0, 2]).repeat(count)[:count]
            noise = torch.randn(count, *SHAPE, generator=rng)
            splits[part] = Split((centres + shift)[labels] + 0.7 * noise, labels)
        prints = {part: fingerprint(split) for part, split in splits.items()}
        return Silo(name, name, NetworkShape(SHAPE, CLASSES), **splits, fingerprints=prints)


WORLD = SmallWorld()


class Encoder(nn.Sequential):
    """Maps samples (batch, 1, 2, 3) to maps (batch, 4, 1, 2)."""

    def __init__(self, normed: bool) -> None:
        layers = [nn.Flatten(), nn.Linear(6, TOKENS * CHANNELS)]
        if normed:
            layers.append(nn.BatchNorm1d(TOKENS * CHANNELS))
        super().__init__(*layers, nn.Tanh(), nn.Unflatten(1, (CHANNELS, 1, TOKENS)))


def build(input_shape: tuple[int, ...], classes: int) -> TokenClassifier:
    """Return the network without batch norm: a hidden layer of eight numbers in two tokens."""
    head = nn.Sequential(nn.Linear(TOKENS * CHANNELS, classes))
    return TokenClassifier(Encoder(normed=False), head, tokens=TOKENS, channels=CHANNELS)


def build_normed(input_shape: tuple[int, ...], classes: int) -> TokenClassifier:
    """Return the network with a batch norm."""
    head = nn.Sequential(nn.Linear(TOKENS * CHANNELS, classes))
    return TokenClassifier(Encoder(normed=True), head, tokens=TOKENS, channels=CHANNELS)
