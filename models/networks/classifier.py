"""The network in two halves: an encoder that makes tokens, a head that classifies them."""

from __future__ import annotations

from torch import Tensor, nn

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.dirichlet import Evidence
from fedsilo.models.networks.kinds import Task, network_kind
from fedsilo.models.networks.site_network import SiteNetwork


class TokenClassifier(SiteNetwork):
    """Encoder, tokens and a head that holds all dropout; with ``evidence`` it is evidential."""

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        *,
        tokens: int,
        channels: int,
        evidence: Evidence | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokens = tokens
        self.channels = channels
        self.head = head
        self.evidence = evidence

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens z (batch, l, c)."""
        maps: Tensor = self.encoder(inputs)
        return maps.flatten(2).transpose(1, 2)

    def encode_with_map(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``encode`` of inputs and the last feature map (batch, rows, columns, channels)."""
        maps: Tensor = self.encoder(inputs)
        return maps.flatten(2).transpose(1, 2), maps.permute(0, 2, 3, 1)

    def classify(self, features: Tensor) -> Tensor:
        """Map what the head reads, (batch, l, c), to logits (batch, classes).

        Of an evidential network they are log alpha: its expected probabilities are their softmax.
        """
        logits: Tensor = self.head(features.flatten(1))
        return self.evidence(logits) if self.evidence else logits

    def criterion(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy, or the evidential loss, of a batch's logits."""
        if self.evidence:
            return self.evidence.loss(logits, labels)
        return nn.functional.cross_entropy(logits, labels)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the criterion of a batch."""
        return self.criterion(self(inputs), labels)


def build_evidence(settings: CommonSettings, task: Task) -> Evidence | None:
    """Return what makes the network of ``settings`` evidential, None if it is not."""
    evidential = settings.loss == "evidential" or (
        settings.loss == "auto" and network_kind(settings, task) == "vit"
    )
    return Evidence(task.classes, settings.evidence) if evidential else None
