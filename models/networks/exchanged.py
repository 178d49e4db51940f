"""Which arrays of a network are exchanged: the floating-point ones outside its frozen parts."""

import torch
from torch import Tensor, nn

from fedsilo.models.contract.errors import SettingError


class FrozenPart(nn.Module):
    """Pretrained weights that every site has and none trains: they are never exchanged."""


def exchanged_arrays(module: nn.Module) -> dict[str, Tensor]:
    """Return the exchanged parameters and float buffers of ``module`` by name, sorted.

    Integer buffers stay at the site: batch norm's step counters have no mean and no effect here.
    """
    parts = module.named_modules()
    frozen = tuple(f"{name}." for name, part in parts if isinstance(part, FrozenPart))
    state = module.state_dict()
    return {
        name: state[name]
        for name in sorted(state)
        if state[name].is_floating_point() and not name.startswith(frozen)
    }


def load_exchanged(module: nn.Module, arrays: dict[str, Tensor]) -> None:
    """Copy ``arrays`` into ``module``, all or none.

    Raises:
        SettingError: their names or shapes are not those of ``exchanged_arrays``.
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
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(arrays[name])


def last_layers(module: nn.Module, count: int) -> list[str]:
    """Return the exchanged arrays of the last ``count`` layers with weights of their own."""
    parts = {
        name: part
        for name, part in module.named_modules()
        if any(p.requires_grad for p in part.parameters(recurse=False))
    }
    return _below(module, list(parts)[-count:])


def batch_norms(module: nn.Module) -> list[str]:
    """Return the exchanged arrays of batch norms: weights, running means and variances."""
    kinds = nn.modules.batchnorm._BatchNorm  # what torch's own checks name
    return _below(module, [n for n, part in module.named_modules() if isinstance(part, kinds)])


def _below(module: nn.Module, parts: list[str]) -> list[str]:
    return [name for name in exchanged_arrays(module) if name.rpartition(".")[0] in parts]
