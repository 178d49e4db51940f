"""A mixture of the class probabilities of several sites' experts (PICSR, eq. 1).

On the wire the arrays of an expert are named ``expert/<site>/<array>``.
"""

from collections.abc import Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from fedsilo.core.array_names import arrays_below, by_site
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier, load_exchanged

EXPERT = "expert/"

A = TypeVar("A")


def expert_array(site: str, name: str) -> str:
    """Return the wire name of an expert's array, ``expert/<site>/<name>``."""
    return f"{EXPERT}{site}/{name}"


def by_expert(arrays: Mapping[str, A]) -> dict[str, dict[str, A]]:
    """Group the experts' arrays by site: site -> name -> array, sorted by site.

    Names in ``arrays`` that do not begin with ``expert/`` are ignored.
    """
    return by_site(arrays_below(EXPERT, arrays))


def open_experts(
    settings: CommonSettings, shape: NetworkShape, arrays: Mapping[str, Tensor]
) -> dict[str, TokenClassifier]:
    """Build the expert network of each site from received arrays: site -> network, sorted by site.

    An expert is the classifier that one site has trained. The networks are in training mode, and
    their parameters have gradients. If no expert's arrays came, the result is empty.

    Args:
        settings: the run's settings, which name the network.
        shape: the shape of an input and the number of classes.
        arrays: arrays named ``expert/<site>/<array>``. Arrays with other names are ignored.

    Raises:
        SettingError: the arrays of an expert do not fit the network of ``settings``.
    """
    experts = {}
    for site, own in by_expert(arrays).items():
        experts[site] = build_classifier(settings, shape)
        load_exchanged(experts[site], own)
    return experts


class Mixture(SiteNetwork):
    """The weighted mean of the experts' class probabilities; this base class weighs all equally.

    The tokens of a mixture are (batch, experts, l * c + 1): the flattened tokens of each expert
    and, in the last place, the logarithm of the expert's weight. These numbers do not depend on
    dropout, so Monte Carlo dropout computes them only once.
    """

    def __init__(self, experts: Mapping[str, TokenClassifier]) -> None:
        super().__init__()
        self.sites = list(experts)
        self.experts = nn.ModuleList(experts.values())

    def log_weights(self, inputs: Tensor) -> Tensor:
        """Return the logarithm of each expert's weight, (batch, experts); weights sum to 1."""
        count = torch.tensor(float(len(self.sites)))
        # len(inputs) would become a constant under torch.export; the shape stays a variable
        return -torch.log(count).expand(inputs.shape[0], len(self.sites)).to(inputs.device)

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens (batch, experts, l * c + 1)."""
        tokens = [expert.encode(inputs).flatten(1) for expert in self._experts()]
        return torch.cat([torch.stack(tokens, dim=1), self.log_weights(inputs)[..., None]], dim=-1)

    def classify(self, features: Tensor) -> Tensor:
        """Compute the log of the class probabilities that the experts give as a weighted mixture.

        The result (batch, classes) can be used as logits, because its softmax is the mixture.

        Args:
            features: a row for each sample and expert, (batch, experts, tokens * channels + 1). The
                row holds the expert's flattened tokens, and in the last column the logarithm of its
                weight.
        """
        logits = []
        for index, expert in enumerate(self._experts()):
            # Columns :-1 are the expert's tokens, column -1 is the logarithm of its weight
            tokens = features[:, index, :-1]
            logits.append(expert.classify(tokens.reshape(-1, expert.tokens, expert.channels)))
        return mixed_log_probabilities(features[..., -1], torch.stack(logits, dim=1))

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean negative log-likelihood of the labels (batch,) under the mixture."""
        return nn.functional.nll_loss(self(inputs), labels)

    def _experts(self) -> list[TokenClassifier]:
        return cast(list[TokenClassifier], list(self.experts))


def mixed_log_probabilities(log_weights: Tensor, logits: Tensor) -> Tensor:
    """Compute the logarithm of the weighted mixture of the experts' class probabilities.

    Args:
        log_weights: the logarithm of each expert's weight h, (batch, experts). For probabilities,
            the weights of a sample must sum to 1.
        logits: each expert's logits, (batch, experts, classes).

    Returns:
        log sum_i h_i softmax(logits_i), (batch, classes).
    """
    # Everything stays in logarithms: a tiny probability of an expert would underflow to 0 before
    # the loss takes its logarithm
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    return torch.logsumexp(log_weights.float()[..., None] + log_probabilities, dim=1)
