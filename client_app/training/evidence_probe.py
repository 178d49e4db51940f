"""What an evidential network says of its own certainty, measured over a split."""

import torch
from torch import Tensor

from fedsilo.models.contract.metric_names import BINS, CERTAINTY, RELIABILITY
from fedsilo.models.maths.dirichlet import vacuity
from fedsilo.models.maths.mc_dropout import only_dropout_active
from fedsilo.models.measures.classification_metrics import bin_counts
from fedsilo.models.networks.site_network import SiteNetwork


class EvidenceProbe:
    """Mean vacuity; with ``binned`` also how accuracy goes with confidence and with vacuity."""

    def __init__(self, network: SiteNetwork, labels: Tensor, binned: bool) -> None:
        self.network = network
        self.labels = labels
        self.binned = binned
        self.alphas: list[Tensor] = []

    def see(self, tokens: Tensor) -> None:
        """Keep alpha (batch, classes) of a batch, of a pass without dropout: it draws nothing."""
        self.alphas.append(_alpha(self.network, tokens))

    def values(self) -> dict[str, float]:
        """Return ``vacuity``, and per bin the number of samples, of right ones, and their mean."""
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
    """Return the vacuity (batch,), by its name, that ``network`` gives tokens (batch, l, c)."""
    return {"vacuity": vacuity(_alpha(network, tokens))}


def _alpha(network: SiteNetwork, tokens: Tensor) -> Tensor:
    """Return the concentration (batch, classes) of tokens, by a pass without dropout."""
    with only_dropout_active(network, dropout=False):
        logits = network.classify(network.features(tokens))
    return logits.float().exp().cpu()
