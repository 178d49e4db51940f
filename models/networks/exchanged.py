"""What of a network crosses the wire: its float arrays by name, but no frozen part's."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from fedsilo.models.contract.errors import SettingError


class FrozenPart(nn.Module):
    """Weights that every site has from elsewhere and none trains: they are never exchanged."""


def exchanged_arrays(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and float buffers of ``module`` by name, sorted, but no frozen part's.

    Integer buffers (batch norm's step counters) have no mean and no effect here: they stay home.
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
    """Copy ``arrays`` into ``module``; the names must be those of ``exchanged_arrays``."""
    wanted = exchanged_arrays(module)
    if arrays.keys() != wanted.keys():
        missing = _few(wanted.keys() - arrays.keys())
        surplus = _few(arrays.keys() - wanted.keys())
        raise SettingError(f"weights do not fit the network: missing {missing}, surplus {surplus}")
    for name, target in wanted.items():
        if arrays[name].shape != target.shape:
            raise SettingError(
                f"weights do not fit the network: '{name}' is {tuple(arrays[name].shape)}, "
                f"not {tuple(target.shape)}"
            )
    with torch.no_grad():
        for name, target in wanted.items():
            target.copy_(arrays[name])


def _few(names: AbstractSet[str]) -> str:
    """Name three of the names and count the others."""
    first = sorted(names)[:3]
    return f"{first} and {len(names) - 3} more" if len(names) > 3 else f"{first}"
