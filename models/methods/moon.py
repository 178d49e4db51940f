"""MOON, model-contrastive learning (Li, He and Song 2021): features stay near the global model's.

A sample's representation is pulled towards that of the global model and away from that of the
site's own model after its last round (eq. 3, with cosine similarity). The representation is a
projection head's output for the mean of the encoder's tokens. The paper puts the projection head
between encoder and classifier. Here it is next to the classifier, so the classifier is the same as
in every other method and starts from the same weights. Its wire names are ``projection/<name>``.

Equations (arXiv:2103.16257):
  (3) model-contrastive loss -> models.methods.moon.contrastive_loss
  (4) total loss -> client_app.methods.moon.MoonSite.train
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import SEGMENTATION, tasks_except

PROJECTION = "projection/"
PROJECTION_SIZE = 256  # length of a representation, as in the paper


@dataclass(frozen=True)
class MoonSettings(OwnSettings):
    """Settings of MOON; mu 0, which is ``fedavg``, is not allowed."""

    title = "MOON"
    tasks = tasks_except(SEGMENTATION)
    why_tasks = "needs one embedding per sample, which a prediction for each pixel does not have"
    server = "fedsilo.strategies.methods.drift_correction:Moon"
    site = "fedsilo.client_app.methods.moon:MoonSite"
    sums_suffice = True

    contrast_mu: float = setting(5.0, "weight mu of the model-contrastive loss", gt=0.0)
    contrast_temperature: float = setting(
        0.5, "temperature tau that the cosine similarities are divided by", gt=0.0
    )


class Projection(nn.Module):
    """Two linear layers with ReLU between, as wide as the encoder, as in the authors' code."""

    def __init__(self, *, channels: int, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, size)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Map an encoder's tokens (batch, l, channels) to representations (batch, size)."""
        projected: Tensor = self.layers(tokens.mean(dim=1))
        return projected


def build_projection(seed: int, channels: int) -> Projection:
    """Build the projection head with initial weights drawn from ``seed``."""
    with seed_generators(seed, "projection"):
        return Projection(channels=channels, size=PROJECTION_SIZE)


def contrastive_loss(
    z: Tensor,
    z_global: Tensor,
    z_previous: Tensor,
    temperature: float,
    mean: Callable[[Tensor], Tensor] = torch.mean,
) -> Tensor:
    """Compute MOON's contrastive loss (eq. 3), which pulls a site's network to the global network.

    It also pushes the network away from its state after the site's last round. For each sample it
    is -log(exp(s_g / T) / (exp(s_g / T) + exp(s_p / T))). Here s_g and s_p are the cosine
    similarities of ``z`` with ``z_global`` and ``z_previous``.

    Args:
        z: representations by the network in training, (batch, size).
        z_global: representations by the global network, (batch, size).
        z_previous: representations by the site's network after its last round, (batch, size).
        temperature: T.
        mean: maps the samples' losses (batch,) to the result. By default this is their mean, a
            scalar.
    """
    near = nn.functional.cosine_similarity(z.float(), z_global.float(), dim=1)
    far = nn.functional.cosine_similarity(z.float(), z_previous.float(), dim=1)
    # This is -log(exp(near / tau) / (exp(near / tau) + exp(far / tau))) without its overflow
    return mean(nn.functional.softplus((far - near) / temperature))
