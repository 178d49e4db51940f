"""FedEFM: neighbours train a silo's model; the silo distils from it by earth mover's closeness.

Paper: "FedEFM: Federated Endovascular Foundation Model with Unseen Data", section 3. A silo's model
is trained at its neighbours (eq. 1), who return the trained models as experts. The silo's model is
then distilled from the experts on the silo's own data (eq. 2, 11). Each expert is weighted by the
closeness of its feature map to that of the silo's model (eq. 3).

Equations (arXiv:2501.16992):
  (1) training overseas -> client_app.methods.fedefm.FedEFMSite.overseas
  (2) multishot distillation -> models.methods.fedefm.multishot_loss
  (3) earth mover's closeness -> models.maths.earth_movers.closeness
  (c) cost of moving mass -> models.maths.earth_movers.transport_costs
  (x) optimal flow -> models.maths.earth_movers.optimal_flow
  (11) distillation loss -> models.methods.fedefm.distillation
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.maths.earth_movers import Solver, closeness, pooled_tokens
from fedsilo.models.maths.mc_dropout import only_dropout_active
from fedsilo.models.methods.decentralised import TopologySettings
from fedsilo.models.networks.site_network import TokenClassifier

OVERSEAS = "overseas"
VISITOR = "visitor/"  # visitor/<owner>/<array>, at a host
EXPERT = "expert/"  # expert/<host>/<array>, back at its owner
CLOSENESS = "closeness"


@dataclass(frozen=True)
class FedEFMSettings(TopologySettings):
    """Settings of FedEFM; beta and the temperature are not published."""

    title = "FedEFM"
    tasks = (CLASSIFICATION,)
    why_tasks = "distils class probabilities"
    server = "fedsilo.strategies.methods.fedefm:FedEFM"
    site = "fedsilo.client_app.methods.fedefm:FedEFMSite"
    why_not_private = "weighs its neighbours by whole batches, in which patients meet"

    distillation_beta: float = setting(
        0.5, "beta: weight of distillation, 1 - beta of the labels", gt=0.0, le=1.0
    )
    temperature: float = setting(3.0, "T that softens teachers and student", gt=0.0)
    overseas_steps: int = setting(
        0, "optimiser steps of a model at each neighbour, or 0 for as many as at home", ge=0
    )
    emd_solver: Solver = setting(
        "pot", "pot: exact; sinkhorn: regularised, batched; cvxpylayers: a reference"
    )
    emd_gradient: bool = setting(
        False, "true: the closeness has gradients too (part 3); false: a constant, as in eq. 2"
    )
    emd_grid: int = setting(
        7, "side that feature maps are pooled to, or 0 to keep them as they are", ge=0
    )
    continue_from: Literal["own", "mean"] = setting(
        "own", "what a silo continues from: own, as in the paper, or the mean of all silos"
    )
    visit: Literal["train", "average"] = setting(
        "train",
        "what comes of visits: train, experts that go home to distil from; or average, the "
        "host's start is half its own model, half the mean of the visitors (the authors' public "
        "code)",
    )


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Compute FedEFM's distillation loss (eq. 11): the batch mean of T^2 KL(teacher || student).

    The two distributions are the softmax of ``student`` and of ``teacher``, logits (batch,
    classes), divided by the ``temperature`` T.
    """
    # The paper's cross-entropy of softened outputs has the same gradient, but the divergence
    # is 0 where student and teacher agree. T^2 compensates for the factor 1 / T^2 in the gradients
    # (Hinton et al. 2015)
    own = functional.log_softmax(student / temperature, dim=1)
    other = functional.log_softmax(teacher / temperature, dim=1)
    divergence = functional.kl_div(own, other, reduction="batchmean", log_target=True)
    return temperature**2 * divergence


def batch_closeness(own: Tensor, other: Tensor, settings: FedEFMSettings) -> Tensor:
    """Compute the mean closeness of two models' feature maps over a batch, a scalar from 0 to 1.

    The maps are pooled, and ``closeness`` compares each sample's two maps. It is 1 for equal maps.
    If the mean over the samples is negative, the result is 0.

    Args:
        own: the feature maps of one model, (batch, rows, columns, channels). They get gradients if
            'emd-gradient' is true.
        other: the feature maps of the other model, of the same shape. They never get gradients.
        settings: 'emd-gradient', the length 'emd-grid' to which the sides of a map are pooled, and
            the solver 'emd-solver'.

    Raises:
        SiteError: the maps differ in shape, or values are not finite.
        SettingError: the pooled maps are too large for the solver 'cvxpylayers'.
    """
    if not settings.emd_gradient:
        own = own.detach()
    own_tokens = pooled_tokens(own.float(), settings.emd_grid)
    other_tokens = pooled_tokens(other.detach().float(), settings.emd_grid)
    values = closeness(
        own_tokens, other_tokens, settings.emd_solver, differentiable=settings.emd_gradient
    )
    return values.mean().clamp_min(0)


def map_tokens(
    network: TokenClassifier, input_shape: tuple[int, ...], settings: FedEFMSettings
) -> int:
    """Return the number of tokens that are compared for one input, after pooling the map."""
    feature_map = eval_mode_map(network, torch.zeros(1, *input_shape))
    return pooled_tokens(feature_map, settings.emd_grid).shape[1]


def eval_mode_map(network: TokenClassifier, inputs: Tensor, gradient: bool = False) -> Tensor:
    """Compute the last feature map of a network's encoder in eval mode.

    Dropout is then off, and batch norm uses its running statistics. Afterwards the modes of all
    layers are restored. The result, (batch, rows, columns, channels), has gradients only if
    ``gradient`` is True.
    """
    with torch.set_grad_enabled(gradient), only_dropout_active(network, dropout=False):
        return network.encode_with_map(inputs)[1]


def multishot_loss(
    network: TokenClassifier,
    experts: Mapping[str, TokenClassifier],
    inputs: Tensor,
    labels: Tensor,
    settings: FedEFMSettings,
) -> tuple[Tensor, dict[str, float]]:
    """Compute FedEFM's multishot distillation loss (eq. 2), by which experts teach a network.

    An expert is a copy of the silo's model, trained by a neighbour, its host. The loss is:

        (1 - beta) * criterion + sum over experts of c * beta * T^2 KL(expert || network)

    Here c is the closeness of the expert's and the network's feature maps over the batch, from 0 to
    1 (``batch_closeness``). Without experts only the first term remains.

    Args:
        network: the silo's network, in training mode.
        experts: host -> the expert from that host, in eval mode and without gradient. May be empty.
        inputs: (batch, *input_shape).
        labels: the true classes, (batch,) int64.
        settings: beta, the temperature T, and how the closeness is computed. c has gradients only
            if 'emd-gradient' is true.

    Returns:
        The loss, a scalar, and host -> c.

    Raises:
        SiteError: the feature maps differ in shape, or values are not finite.
        SettingError: the maps are too large for the solver 'cvxpylayers'.
    """
    # Both maps come from eval mode. With the batch's own statistics in one of them, a model's
    # closeness to itself would be 0.72 instead of 1. The map is computed first, because the batch
    # then changes the running statistics
    own_map = eval_mode_map(network, inputs, gradient=settings.emd_gradient)
    logits = network.classify(network.features(network.encode(inputs)))
    beta = settings.distillation_beta
    loss = (1 - beta) * network.criterion(logits, labels)
    weights: dict[str, float] = {}
    for host, expert in experts.items():
        with torch.no_grad():
            expert_tokens, expert_map = expert.encode_with_map(inputs)
            taught = expert.classify(expert.features(expert_tokens))
        # An expert whose features differ from the network's teaches it little
        weight = batch_closeness(own_map, expert_map, settings)
        term = distillation(logits, taught, settings.temperature)
        loss = loss + weight.to(loss.dtype) * beta * term
        weights[host] = float(weight.detach())
    return loss, weights
