"""Temperature scaling (Guo et al. 2017): one number that makes probabilities less or more sure.

Probabilities p become p^(1/T), normalised, which divides a softmax's logits by T. The most probable
class stays the same.
"""

import math

import torch
from torch import Tensor

_LEAST, _MOST = 1 / 20, 20.0
_SMALLEST = 1e-12  # probability, as in the reported losses


def apply_temperature(probabilities: Tensor, temperature: float) -> Tensor:
    """Return probabilities (n, classes) at a temperature above 0, float64."""
    logits = probabilities.double().clamp_min(_SMALLEST).log() / temperature
    return torch.softmax(logits, dim=1)


def fit_temperature(probabilities: Tensor, labels: Tensor) -> float:
    """Return the temperature, 1/20 to 20, of highest likelihood of labels (n,) int64."""
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        return mean_loss(apply_temperature(probabilities, math.exp(log_temperature)), labels)

    bounds = (math.log(_LEAST), math.log(_MOST))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return math.exp(float(found.x))


def mean_loss(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean negative log-likelihood of labels (n,), in nats."""
    right = probabilities.gather(1, labels[:, None]).clamp_min(_SMALLEST)
    return float(-right.log().mean())
