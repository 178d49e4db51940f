"""FedProto (Tan et al. 2022): sites share the mean embeddings of classes, not weights.

A site's prototype of a class is the mean embedding of its samples of that class (eq. 3). A global
prototype is the mean of the sites' prototypes, weighted by their counts (eq. 6). An embedding is
all tokens of a sample, flattened: (l * c,). The wire name is ``prototype/<class>``.

Equations (arXiv:2105.00243):
  (3) sums behind a site's prototypes -> models.maths.class_means.class_sums
  (6) global prototypes -> strategies.methods.class_means.FedProto.round
  (7) distance to the prototypes -> models.maths.class_means.matching_loss
  (inference) nearest prototype -> models.methods.fedproto.nearest_logits
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.maths.class_means import ClassTargets
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier

PROTOTYPE = "prototype/"


@dataclass(frozen=True)
class FedProtoSettings(OwnSettings):
    """Settings of FedProto; lambda 0, which is ``local``, is not allowed."""

    title = "FedProto"
    tasks = (CLASSIFICATION,)
    why_tasks = "sends the mean embedding of each class"
    server = "fedsilo.strategies.methods.class_means:FedProto"
    site = "fedsilo.client_app.methods.fedproto:FedProtoSite"

    prototype_weight: float = setting(
        1.0, "weight lambda of the distance to the prototypes", gt=0.0
    )
    inference: Literal["head", "prototype"] = setting(
        "head", "what classifies in evaluation: the head, or the nearest global prototype"
    )
    class_min_count: int = setting(
        10, "a class mean over fewer training samples does not leave its site", ge=1
    )


def nearest_logits(embeddings: Tensor, prototypes: ClassTargets) -> Tensor:
    """Compute logits (batch, classes): minus the squared distance to each class's prototype.

    The largest logit belongs to the nearest prototype, which is the paper's prediction.
    ``embeddings`` are (batch, d). A class without a prototype gets minus infinity.
    """
    wide = embeddings.float()
    # One class at a time, because (batch, classes, d) at once would take much more memory
    distances = [(wide - prototype).square().sum(dim=1) for prototype in prototypes.values]
    return (-torch.stack(distances, dim=1)).masked_fill(~prototypes.known, -torch.inf)


class NearestPrototype(SiteNetwork):
    """A network that is evaluated by the nearest prototype instead of its head.

    The head, which contains all dropout, is not used, so all Monte Carlo passes are the same.
    """

    def __init__(self, network: TokenClassifier, prototypes: ClassTargets) -> None:
        super().__init__()
        self.network = network
        self.prototypes = prototypes

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens (batch, l, c)."""
        return self.network.encode(inputs)

    def classify(self, features: Tensor) -> Tensor:
        """Map tokens (batch, l, c) to ``nearest_logits`` (batch, classes)."""
        return nearest_logits(features.flatten(1), self.prototypes)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the network's own loss: prototypes never classify in training."""
        return self.network.loss(inputs, labels)
