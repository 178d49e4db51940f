"""Table 3 of the UEFL paper: accuracy and predictive entropy over nine silos, by data set."""

from __future__ import annotations

from models.contract.settings import CommonSettings
from strategies.loop.reporting import Published

_PARTS = ("D1", "D2", "D3", "all")
_TABLE = {  # accuracy and entropy of each part
    ("FedAvg", "mnist"): ((0.874, 0.212), (0.848, 0.231), (0.618, 0.377), (0.780, 0.273)),
    ("FedAvg", "fmnist"): ((0.801, 0.246), (0.825, 0.232), (0.784, 0.341), (0.803, 0.273)),
    ("UEFL", "mnist"): ((0.951, 0.120), (0.885, 0.196), (0.924, 0.131), (0.920, 0.149)),
    ("UEFL", "fmnist"): ((0.857, 0.147), (0.848, 0.188), (0.845, 0.167), (0.850, 0.167)),
}


def shifted_digits(method: str, common: CommonSettings) -> Published:
    """Return a method's numbers, if the run has as many silos as the paper's."""
    if common.silos != 9 or (method, common.dataset) not in _TABLE:
        return {}
    values = zip(_PARTS, _TABLE[method, common.dataset], strict=True)
    return {part: {"accuracy": right, "entropy": entropy} for part, (right, entropy) in values}
