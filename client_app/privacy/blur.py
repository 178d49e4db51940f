"""Noise on what is trained, as large as the change itself asks for; it is no differential privacy.

A unit's change is a sum over samples. Of sums that differ in one sample the difference is that
sample's row, however many stand behind each, and where all others cancel out so is the sum: noise
in proportion to the sum and to what the samples add to it hides the row. What it hides, and what
not, is measured in docs/results/inversion.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsilo.models.privacy.gaussian_noise import normals

_STATISTICS = ("running_mean", "running_var")  # of batch norm: of batches, not of gradients


def blurred(
    arrays: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    shares: Mapping[str, Tensor],
    blur: float,
) -> dict[str, Tensor]:
    """Return the arrays with noise on their change, by the operating system's random numbers.

    Args:
        arrays: what is to leave, of any shapes.
        reference: what came; an array that did not come in the same shape stays as it is.
        shares: by the end of an array's name, how much larger than a unit's change what its samples
            added to it is, (units,).
        blur: the noise's standard deviation, in root mean squares of a unit's change and of what
            its samples added. A unit is a row, a filter, or all of a vector that has no shares.
    """
    return {
        name: _blurred(name, array, reference[name], _share_of(name, shares), blur)
        if name in reference
        and reference[name].shape == array.shape
        and array.is_floating_point()
        and not name.endswith(_STATISTICS)
        else array
        for name, array in arrays.items()
    }


def _share_of(name: str, shares: Mapping[str, Tensor]) -> Tensor | None:
    own = name.rpartition("/")[2]
    return next((s for key, s in shares.items() if key == own or key.endswith(f".{own}")), None)


def _blurred(name: str, array: Tensor, origin: Tensor, share: Tensor | None, blur: float) -> Tensor:
    values = array.detach().cpu().double()
    change = values - origin.detach().cpu().double()
    rows = len(change) if change.ndim > 1 or share is not None else 1
    units = change.reshape(rows, -1)
    square = units.square().mean(dim=1, keepdim=True)
    if share is not None:
        square = square * (1 + share.square().unsqueeze(1))
    noise = blur * square.sqrt() * normals(torch.Size(units.shape), None)
    noisy = values + noise.reshape(values.shape)
    return noisy.to(array.dtype)
