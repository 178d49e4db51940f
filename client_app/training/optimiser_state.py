"""An optimiser's moments as named arrays, so that it can continue in another round and process."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def moments_of(optimiser: Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """Return the moments of all parameters as ``<parameter>/<moment>``."""
    return {
        f"{name}/{moment}": torch.as_tensor(value)
        for name, parameter in module.named_parameters()
        for moment, value in optimiser.state[parameter].items()
    }


def restore_moments(optimiser: Optimizer, module: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Put back what ``moments_of`` gave; a parameter without any of its shape starts again."""
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in stored.items():
        name, _, moment = key.rpartition("/")
        moments.setdefault(name, {})[moment] = value
    for name, parameter in module.named_parameters():
        if name in moments and _fit(moments[name], parameter):
            optimiser.state[parameter] = {
                moment: value if moment == "step" else value.to(parameter.device)
                for moment, value in moments[name].items()
            }


def _fit(moments: Mapping[str, Tensor], parameter: Tensor) -> bool:
    """Tell whether the moments are of the parameter's shape; a count of steps has none."""
    return all(value.shape in (parameter.shape, torch.Size([])) for value in moments.values())
