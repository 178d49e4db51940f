"""Measure an evidential network's certainty over a split."""

import torch
from torch import Tensor

from fedsilo.core.metric_names import BINS, CERTAINTY, RELIABILITY
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.maths.mc_dropout import only_dropout_active
from fedsilo.models.measures.classification_metrics import bin_counts
from fedsilo.models.networks.site_network import SiteNetwork


class EvidenceProbe:
    """Measures mean vacuity; with ``binned`` also accuracy by confidence and by vacuity."""

    def __init__(self, network: SiteNetwork, labels: Tensor, binned: bool) -> None:
        self.network = network
        self.labels = labels
        self.binned = binned
        self.alphas: list[Tensor] = []

    def see(self, tokens: Tensor) -> None:
        """Store alpha (batch, classes) of a batch, from a pass without dropout.

        So the probe draws no random numbers.
        """
        self.alphas.append(_alpha(self.network, tokens))

    def values(self) -> dict[str, float]:
        """Return ``vacuity``; with bins also their samples, right ones and mean values."""
        alphas = torch.cat(self.alphas)
        uncertain = vacuity(alphas)
        metrics = {"vacuity": uncertain.double().mean().item()}
        if not self.binned:
            return metrics
        confidence, predicted = (alphas / alphas.sum(dim=1, keepdim=True)).max(dim=1)
        right = predicted == self.labels
        for name, values in ((RELIABILITY, confidence), (CERTAINTY, uncertain)):
            for key, value in bin_counts(values, right, BINS).items():
                metrics[f"{name}.{key}"] = value
        return metrics


def vacuity_of(network: SiteNetwork, tokens: Tensor) -> dict[str, Tensor]:
    """Return ``{"vacuity": (batch,)}`` for tokens (batch, l, c)."""
    return {"vacuity": vacuity(_alpha(network, tokens))}


def _alpha(network: SiteNetwork, tokens: Tensor) -> Tensor:
    """Return the concentration (batch, classes) of tokens, from a pass without dropout."""
    with only_dropout_active(network, dropout=False):
        logits = network.classify(network.features(tokens))
    return logits.float().exp().cpu()
