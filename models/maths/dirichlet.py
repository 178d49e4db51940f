"""Evidential learning: a Dirichlet distribution over class probabilities.

FedEvPrompt (arXiv:2411.10071), eq. 3 to 5, after Sensoy et al. 2018, for any number K of classes:
alpha = evidence + prior, expected probabilities alpha / S with S the sum of alpha, vacuity K / S.
"""

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError

PRIOR_FLOOR = 0.01  # the least prior weight of a class
ANNEALING_EPOCHS = 10  # local epochs until the KL term has its full weight


def evidence_of(logits: Tensor, kind: str = "softplus") -> Tensor:
    """Map logits (...) to evidence e >= 0 of the same shape; ``kind`` is softplus or relu."""
    if kind == "softplus":
        return nn.functional.softplus(logits)
    return torch.relu(logits)


def skewed_prior(counts: Tensor) -> Tensor:
    """Compute FedEvPrompt's prior weights of the classes (eq. 3), larger for rare classes.

    The weight of class k is W_k = K / (K - 1) * (1 - N_k / N). Weights below ``PRIOR_FLOOR`` (0.01)
    are raised to it. Then all weights are scaled to sum to K.

    Args:
        counts: the number of samples N_k of each of the K classes, (K,). N is their sum.

    Returns:
        The weights, (K,) float32.

    Raises:
        SettingError: there are fewer than two classes, or all counts are 0.
    """
    classes, total = len(counts), counts.sum().item()
    if classes < 2 or total <= 0:
        raise SettingError(
            f"an evidential prior needs two classes and samples, but counts are {counts.tolist()}"
        )
    weights = classes / (classes - 1) * (1 - counts.double() / total)
    # Eq. 3 gives 0 to a class that has all samples of a site, but the alpha of a Dirichlet
    # distribution must be above 0
    floored = weights.clamp_min(PRIOR_FLOOR)
    return (floored * classes / floored.sum()).float()


def vacuity(alpha: Tensor) -> Tensor:
    """Compute the vacuity u = K / S, (...), which says how much evidence a prediction lacks.

    ``alpha`` (..., K) are the parameters of Dirichlet distributions over K classes, and S is their
    sum over the classes. The parameters are evidence plus a prior that sums to K. So the vacuity is
    1 without evidence, and falls towards 0 as evidence grows.
    """
    return alpha.shape[-1] / alpha.sum(dim=-1)


def belief(alpha: Tensor, prior: Tensor) -> Tensor:
    """Compute the belief masses b_k = e_k / S, (..., K); with the vacuity they sum to 1.

    The evidence e is ``alpha`` minus ``prior``, and S is the sum of alpha over the K classes.
    """
    return (alpha - prior) / alpha.sum(dim=-1, keepdim=True)


def evidential_mse(alpha: Tensor, targets: Tensor) -> Tensor:
    """Compute the expected squared error E |y - p|^2 for p ~ Dir(alpha), (batch,).

    This is the first term of FedEvPrompt's eq. 4. It equals the squared error of the mean of p plus
    the variance of p, summed over classes.

    Args:
        alpha: parameters of the Dirichlet distributions, (batch, K).
        targets: y, the true classes as one-hot rows, (batch, K).
    """
    # E (y - p)^2 = (y - E p)^2 + Var p. The variance falls with more evidence, which rewards
    # evidence; the squared error keeps evidence from growing for a wrong class
    strength = alpha.sum(dim=-1, keepdim=True)
    mean = alpha / strength
    variance = mean * (1 - mean) / (strength + 1)
    return ((targets - mean).square() + variance).sum(dim=-1)


def dirichlet_kl(alpha: Tensor, prior: Tensor) -> Tensor:
    """Compute the divergence KL(Dir(alpha) || Dir(prior)) of FedEvPrompt's eq. 5.

    ``alpha`` and ``prior`` are parameters of Dirichlet distributions over K classes, (..., K). All
    must be above 0. The result has one value for each distribution, (...), which is at least 0
    apart from rounding.
    """
    # The ratio of the two normalising constants, then the expectation of the remaining logarithm:
    # E ln p_k = digamma(alpha_k) - digamma(S)
    strength, weight = alpha.sum(dim=-1), prior.sum(dim=-1)
    normalisers = torch.lgamma(strength) - torch.lgamma(weight)
    normalisers = normalisers + (torch.lgamma(prior) - torch.lgamma(alpha)).sum(dim=-1)
    surprise = torch.digamma(alpha) - torch.digamma(strength)[..., None]
    return normalisers + ((alpha - prior) * surprise).sum(dim=-1)


def annealing(epochs: int) -> float:
    """Return the weight lambda_KL = min(1, t / 10) after t = ``epochs`` local epochs."""
    return min(1.0, epochs / ANNEALING_EPOCHS)


def evidential_loss(alpha: Tensor, labels: Tensor, prior: Tensor, kl_weight: float) -> Tensor:
    """Compute the batch mean of FedEvPrompt's evidential loss (eq. 4), a scalar.

    A sample's loss is ``evidential_mse`` plus ``kl_weight`` times KL(Dir(a) || Dir(prior)). The
    vector a equals ``alpha``, but has the prior weight at the true class. Therefore the divergence
    penalises only evidence for wrong classes.

    Args:
        alpha: parameters of the Dirichlet distributions, (batch, K).
        labels: the true classes, (batch,) int64.
        prior: the prior weights W, (K,).
        kl_weight: the weight of the divergence, from 0 to 1.
    """
    targets = nn.functional.one_hot(labels, alpha.shape[-1]).to(alpha.dtype)
    # alpha~ = y W + (1 - y) alpha: the true class's evidence is replaced by the prior, so the
    # KL term penalises only evidence for wrong classes
    misleading = targets * prior + (1 - targets) * alpha
    kl = dirichlet_kl(misleading, prior.expand_as(misleading))
    return (evidential_mse(alpha, targets) + kl_weight * kl).mean()


class Evidence(nn.Module):
    """Maps a head's outputs to log alpha, whose softmax gives the expected probabilities.

    ``prior`` (K,) and ``kl_weight`` are set before training and never exchanged: the prior would
    reveal the site's class counts.
    """

    prior: Tensor

    def __init__(self, classes: int, kind: str = "softplus") -> None:
        super().__init__()
        self.kind = kind
        self.kl_weight = 0.0
        # Not persistent: a state dict, and with it what is exchanged, must not contain the prior
        self.register_buffer("prior", torch.ones(classes), persistent=False)

    def forward(self, outputs: Tensor) -> Tensor:
        """Map a head's outputs (batch, K) to log alpha (batch, K), float32."""
        return torch.log(evidence_of(outputs.float(), self.kind) + self.prior)

    def loss(self, log_alpha: Tensor, labels: Tensor) -> Tensor:
        """Compute eq. 4 for log alpha (batch, K) and labels (batch,), a scalar."""
        return evidential_loss(log_alpha.exp(), labels, self.prior, self.kl_weight)
