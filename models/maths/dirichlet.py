"""Evidential learning: a Dirichlet distribution over class probabilities.

FedEvPrompt (arXiv:2411.10071), eq. 3 to 5, after Sensoy et al. 2018, for any number K of classes:
alpha = evidence + prior, expected probabilities alpha / S with S the sum of alpha, vacuity K / S.
"""

import torch
from torch import Tensor, nn

from fedsilo.models.contract.errors import SettingError

PRIOR_FLOOR = 0.01
ANNEALING_EPOCHS = 10


def evidence_of(logits: Tensor, kind: str = "softplus") -> Tensor:
    """Return evidence e, not negative, of ``logits``, same shape; ``kind`` is softplus or relu."""
    return nn.functional.softplus(logits) if kind == "softplus" else torch.relu(logits)


def skewed_prior(counts: Tensor) -> Tensor:
    """Return the prior weights W of eq. 3, (K,) float32, summing to K, from class counts (K,).

    W_k = K / (K - 1) * (1 - N_k / N), floored at ``PRIOR_FLOOR`` and rescaled.

    Raises:
        SettingError: there are fewer than two classes, or no samples.
    """
    classes, total = len(counts), counts.sum().item()
    if classes < 2 or total <= 0:
        raise SettingError(
            f"an evidential prior needs two classes and samples; the counts are {counts.tolist()}"
        )
    weights = classes / (classes - 1) * (1 - counts.double() / total)
    # Eq. 3 gives 0 to a class that has all samples of a site, and a Dirichlet's alpha is above 0
    floored = weights.clamp_min(PRIOR_FLOOR)
    return (floored * classes / floored.sum()).float()


def vacuity(alpha: Tensor) -> Tensor:
    """Return u = K / S, (..., K) to (...): 1 without evidence, as every prior sums to K."""
    return alpha.shape[-1] / alpha.sum(dim=-1)


def belief(alpha: Tensor, prior: Tensor) -> Tensor:
    """Return the belief masses b_k = e_k / S, (..., K); with the vacuity they sum to 1."""
    return (alpha - prior) / alpha.sum(dim=-1, keepdim=True)


def evidential_mse(alpha: Tensor, targets: Tensor) -> Tensor:
    """Return E |y - p|^2 under Dir(alpha) (eq. 4, first term), (batch,), of one-hot y."""
    # E (y - p)^2 = (y - E p)^2 + Var p. The variance term rewards more evidence; the squared error
    # keeps it from growing for a wrong class
    strength = alpha.sum(dim=-1, keepdim=True)
    mean = alpha / strength
    variance = mean * (1 - mean) / (strength + 1)
    return ((targets - mean).square() + variance).sum(dim=-1)


def dirichlet_kl(alpha: Tensor, prior: Tensor) -> Tensor:
    """Return KL(Dir(alpha) || Dir(prior)) (eq. 5): (..., K) to (...)."""
    strength, weight = alpha.sum(dim=-1), prior.sum(dim=-1)
    normalisers = torch.lgamma(strength) - torch.lgamma(weight)
    normalisers = normalisers + (torch.lgamma(prior) - torch.lgamma(alpha)).sum(dim=-1)
    surprise = torch.digamma(alpha) - torch.digamma(strength)[..., None]
    return normalisers + ((alpha - prior) * surprise).sum(dim=-1)


def annealing(epochs: int) -> float:
    """Return lambda_KL = min(1, t / 10) after t = ``epochs`` local epochs."""
    return min(1.0, epochs / ANNEALING_EPOCHS)


def evidential_loss(alpha: Tensor, labels: Tensor, prior: Tensor, kl_weight: float) -> Tensor:
    """Return the batch mean of eq. 4, of alpha (batch, K), labels (batch,) and prior W (K,).

    ``kl_weight`` is lambda_KL.
    """
    targets = nn.functional.one_hot(labels, alpha.shape[-1]).to(alpha.dtype)
    # alpha~ = y W + (1 - y) alpha: the true class's evidence is replaced by the prior, so that the
    # KL term penalises only evidence for wrong classes
    misleading = targets * prior + (1 - targets) * alpha
    kl = dirichlet_kl(misleading, prior.expand_as(misleading))
    return (evidential_mse(alpha, targets) + kl_weight * kl).mean()


class Evidence(nn.Module):
    """Turns a head's outputs into log alpha, whose softmax gives the expected probabilities.

    ``prior`` (K,) is the site's own and never leaves it; it and ``kl_weight`` are set before
    training and not exchanged.
    """

    prior: Tensor

    def __init__(self, classes: int, kind: str = "softplus") -> None:
        super().__init__()
        self.kind = kind
        self.kl_weight = 0.0
        self.register_buffer("prior", torch.ones(classes), persistent=False)

    def forward(self, outputs: Tensor) -> Tensor:
        """Map a head's outputs (batch, K) to log alpha (batch, K), float32."""
        return torch.log(evidence_of(outputs.float(), self.kind) + self.prior)

    def loss(self, log_alpha: Tensor, labels: Tensor) -> Tensor:
        """Return eq. 4 of a batch."""
        return evidential_loss(log_alpha.exp(), labels, self.prior, self.kl_weight)


def evidences(module: nn.Module) -> list[Evidence]:
    """Return every ``Evidence`` in ``module``, none if it is not evidential."""
    return [part for part in module.modules() if isinstance(part, Evidence)]
