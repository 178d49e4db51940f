"""FedDBE (Zhang et al. 2023): FedAvg whose sites keep what is peculiar to their features.

A site adds a bias of its own to the encoder's tokens (the personalised representation bias memory,
PRBM), and the mean of its tokens is pulled to the mean over all sites (mean regularisation, MR).
The mean over all sites is made once, in round 1, which has neither; its wire name is
``mean/tokens``.

Equations (arXiv:2311.14975):
  (PRBM) tokens plus the bias -> models.methods.feddbe.BiasedNetwork.encode
  (MR) pull of the mean -> models.methods.feddbe.MeanPull.loss
  (global mean) weighted by samples -> strategies.methods.feddbe.FedDBE.round
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.core.site_facts import SiteFacts
from fedsilo.core.tasks import SEGMENTATION, tasks_except
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier

# The mean over all sites, (l, c); zeros until it is known
MEAN = "mean/tokens"
BIAS = "bias"


@dataclass(frozen=True)
class FedDBESettings(OwnSettings):
    """Settings of FedDBE; the defaults are those of the authors' script for Fashion-MNIST."""

    title = "FedDBE"
    tasks = tasks_except(SEGMENTATION)
    why_tasks = "needs one embedding per sample, which a prediction for each pixel does not have"
    server = "fedsilo.strategies.methods.feddbe:FedDBE"
    site = "fedsilo.client_app.methods.feddbe:FedDBESite"
    sums_suffice = True
    why_not_private = "pulls the mean over a whole batch, in which patients meet"

    mean_weight: float = setting(
        50.0, "kappa: pull of the mean of a site's features to the mean over all sites", ge=0.0
    )
    mean_momentum: float = setting(
        1.0, "mu: weight of a batch in the running mean of a round's features", gt=0.0, le=1.0
    )

    def why_unfit(self, facts: SiteFacts) -> str | None:
        """Return the reason why a site's mean feature must not leave it, or None if it may."""
        return why_mean_stays(facts.sizes.get("train", 0), facts.floor)


def why_mean_stays(samples: int, floor: int) -> str | None:
    """Return the reason why the mean of a site's features may not leave the site.

    A mean over few samples would reveal them.

    Args:
        samples: the number of the site's training samples.
        floor: the smallest number of samples for which the mean may leave
            ('privacy.sums-min-count').

    Returns:
        One clause, or None if the mean may leave.
    """
    if samples >= floor:
        return None
    return (
        f"its mean feature would rest on {samples} training samples, and {floor} are needed "
        "('privacy.sums-min-count')"
    )


class BiasedNetwork(SiteNetwork):
    """A network with a site's own bias on its tokens.

    Args:
        network: shared by all sites.
        bias: (l, c); None for zeros.
    """

    def __init__(self, network: TokenClassifier, bias: Tensor | None = None) -> None:
        super().__init__()
        self.network = network
        # A private run refuses the method, but other code asks every network
        self.views = network.views
        if bias is None:
            bias = torch.zeros(network.tokens, network.channels)
        self.bias = nn.Parameter(bias)

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens (batch, l, c) with the bias."""
        return self.network.encode(inputs) + self.bias

    def features(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, l, c) to the input of ``classify``, as the network does."""
        return self.network.features(tokens)

    def classify(self, features: Tensor) -> Tensor:
        """Map features to logits (batch, classes)."""
        return self.network.classify(features)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the network's criterion, a scalar, with the bias."""
        return self.network.criterion(self(inputs), labels)


class MeanPull:
    """The loss of one round at a site: the network's own, and the pull of the mean feature.

    Args:
        network: the network with the site's bias.
        mean: the mean over all sites, (l, c).
        settings: kappa and mu.
    """

    def __init__(self, network: BiasedNetwork, mean: Tensor, settings: FedDBESettings) -> None:
        self._network, self._mean, self._settings = network, mean, settings
        self._running = torch.zeros_like(mean)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute a batch's loss, a scalar: the network's criterion plus kappa times a pull.

        The pull is half the mean squared difference of ``mean``, the mean tokens of all sites, and
        the site's running mean r. Each call first changes r, which starts at 0, to (1 - mu) r + mu
        * (the batch's mean tokens). The tokens lack the site's trained bias. The pull has gradients
        only through the batch's tokens. The settings are 'mean-weight' for kappa and
        'mean-momentum' for mu.

        Args:
            inputs: (batch, *input_shape).
            labels: the true classes, (batch,).
        """
        network, momentum = self._network, self._settings.mean_momentum
        # The pull is on the tokens without the bias, which may take all that is peculiar to a site
        tokens = network.network.encode(inputs)
        logits = network.classify(network.features(tokens + network.bias))
        running = (1 - momentum) * self._running + momentum * tokens.mean(dim=0)
        # Earlier batches only shift the running mean: their graphs are gone
        self._running = running.detach()
        pull = (running - self._mean).square().mean() / 2
        return network.network.criterion(logits, labels) + self._settings.mean_weight * pull
