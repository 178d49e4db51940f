"""CDL, the contrastive divergence loss (Do, Nguyen et al. 2023, arXiv:2303.06305).

"Reducing non-IID effects in federated autonomous driving with contrastive divergence loss": a silo
has a main model (the paper's backbone), which is averaged with the neighbours', and a support model
(its sub-network), which never leaves it. The paper takes the divergence of features; here, as in
the authors' code, it is that of class probabilities.

Equations (arXiv:2303.06305):
  (H) divergence -> models.methods.cdl.divergence
  (objective) contrastive divergence -> models.methods.cdl.contrastive_divergence
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.methods.decentralised import MatchaSettings, Topology


@dataclass(frozen=True)
class CDLSettings(MatchaSettings):
    """Settings of CDL; beta is above 0, because at 0 the support model has no effect."""

    title = "CDL"
    tasks = (CLASSIFICATION,)
    why_tasks = "compares class probabilities"
    server = "fedsilo.strategies.methods.decentralised:CDL"
    site = "fedsilo.client_app.methods.cdl:CDLSite"
    why_not_private = "trains a second model by the same batches, whose gradients are not bounded"

    divergence_beta: float = setting(
        0.5,
        "weight beta of the main model's divergence from the support model; the support model's "
        "from the main one has 1 - beta",
        gt=0.0,
        le=1.0,
    )
    divergence_topology: Topology = setting(
        "ring", "cdl: who is whose neighbour; the authors' code is of a ring"
    )


def divergence(
    predicted: Tensor, target: Tensor, mean: Callable[[Tensor], Tensor] = torch.mean
) -> Tensor:
    """Compute the batch mean of the divergence KL(predicted || target) of class probabilities.

    Args:
        predicted: logits of the first distribution, (batch, classes), which get gradients.
        target: logits of the second distribution, (batch, classes), which get gradients too.
        mean: maps the samples' divergences (batch,) to the result. By default this is their mean, a
            scalar.
    """
    own, other = predicted.float().log_softmax(dim=1), target.float().log_softmax(dim=1)
    # The expectation is over ``predicted``; torch's kl_div takes it over the target
    return mean((own.exp() * (own - other)).sum(dim=1))


def contrastive_divergence(
    main: Tensor, support: Tensor, beta: float, mean: Callable[[Tensor], Tensor] = torch.mean
) -> Tensor:
    """Compute the loss by which a silo's main model and its support model learn from each other.

    The loss is beta * KL(main || support) + (1 - beta) * KL(support || main), with KL as in
    ``divergence``. The first term has gradients only for the main model, the second only for the
    support model.

    Args:
        main: logits of the silo's main model, (batch, classes).
        support: logits of the silo's support model, (batch, classes).
        beta: the weight of the first term, above 0 and at most 1.
        mean: maps the samples' divergences (batch,) to the result. By default this is their mean.
    """
    # Each target is a constant for autograd. So the first term trains only the main model and the
    # second only the support model, as in the paper's updates
    positive = divergence(main, support.detach(), mean)
    negative = divergence(support, main.detach(), mean)
    return beta * positive + (1 - beta) * negative
