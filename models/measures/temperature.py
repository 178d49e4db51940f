"""Temperature scaling (Guo et al. 2017): one number makes probabilities more or less certain.

Probabilities p become p^(1/T), normalised, which divides the logits of a softmax by T. The most
probable class stays the same.
"""

import math

import torch
from torch import Tensor

_LEAST, _MOST = 1 / 20, 20.0  # bounds of a fitted temperature
_SMALLEST = 1e-12  # least probability, as in the reported losses


def apply_temperature(probabilities: Tensor, temperature: float) -> Tensor:
    """Scale probabilities (n, classes) by a temperature above 0; the result is float64.

    Above 1 probabilities become less certain, below 1 more certain.
    """
    logits = probabilities.double().clamp_min(_SMALLEST).log() / temperature
    return torch.softmax(logits, dim=1)


def fit_temperature(probabilities: Tensor, labels: Tensor) -> float:
    """Fit the temperature, 1/20 to 20, under which the labels (n,) int64 are most likely.

    ``probabilities`` are (n, classes).
    """
    # The logarithm is searched, because 1/20 and 20 are then equally far from 1. Without bounds the
    # best temperature of a model that is always right would be 0
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        return mean_loss(apply_temperature(probabilities, math.exp(log_temperature)), labels)

    bounds = (math.log(_LEAST), math.log(_MOST))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return math.exp(float(found.x))


def mean_loss(probabilities: Tensor, labels: Tensor) -> float:
    """Compute the mean negative log-likelihood of the labels (n,), in nats."""
    right = probabilities.gather(1, labels[:, None]).clamp_min(_SMALLEST)
    return float(-right.log().mean())
