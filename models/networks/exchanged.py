"""The arrays of a network that sites exchange: floating-point arrays outside its frozen parts."""

import torch
from torch import Tensor, nn

from fedsilo.models.contract.errors import SettingError


class FrozenPart(nn.Module):
    """Base of modules with pretrained weights that every site has and no site trains or sends."""


def exchanged_arrays(module: nn.Module) -> dict[str, Tensor]:
    """Return the exchanged parameters and float buffers of ``module``, by name, sorted.

    Integer buffers stay at the site: a mean of batch norm's step counters makes no sense, and the
    counters have no effect, because every batch norm here has a fixed momentum.
    """
    # The '.' ends the name of the part: without it "head" would freeze "head2" as well
    parts = module.named_modules()
    frozen = tuple(f"{name}." for name, part in parts if isinstance(part, FrozenPart))
    state = module.state_dict()
    return {
        name: state[name]
        for name in sorted(state)
        if state[name].is_floating_point() and not name.startswith(frozen)
    }


def load_exchanged(module: nn.Module, arrays: dict[str, Tensor]) -> None:
    """Copy ``arrays`` into ``module``, either all of them or none.

    Raises:
        SettingError: the names or shapes differ from those of ``exchanged_arrays``.
    """
    targets = exchanged_arrays(module)
    if arrays.keys() != targets.keys():
        missing, surplus = (
            f"{sorted(names)[:3]}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            for names in (targets.keys() - arrays.keys(), arrays.keys() - targets.keys())
        )
        raise SettingError(f"weights do not fit the network: missing {missing}, surplus {surplus}")
    for name, target in targets.items():
        if arrays[name].shape != target.shape:
            raise SettingError(
                f"weights do not fit the network: '{name}' is {tuple(arrays[name].shape)}, "
                f"not {tuple(target.shape)}"
            )
    # The arrays are copied in place: an optimiser keeps its references to the parameters
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(arrays[name])


def last_layers(module: nn.Module, count: int) -> list[str]:
    """Return the names of the exchanged arrays in the last ``count`` layers that are trained."""
    parts = {
        name: part
        for name, part in module.named_modules()
        if any(p.requires_grad for p in part.parameters(recurse=False))
    }
    return _below(module, list(parts)[-count:])


def batch_norms(module: nn.Module) -> list[str]:
    """Return the names of batch norms' exchanged arrays: weights, running means and variances."""
    # The common base of all batch norms; torch's own checks use this private name too
    kinds = nn.modules.batchnorm._BatchNorm
    return _below(module, [n for n, part in module.named_modules() if isinstance(part, kinds)])


def _below(module: nn.Module, parts: list[str]) -> list[str]:
    return [name for name in exchanged_arrays(module) if name.rpartition(".")[0] in parts]
