"""Noise on what is trained, as large as the change itself asks for; it is no differential privacy.

A unit's change is a sum over samples. Of sums that differ in one sample the difference is that
sample's row, however many samples stand behind each: noise in proportion to the sum hides it.
With k samples behind a unit and a blur b, the row that an attacker reads from two such sums after T
answers to the same weights is wrong by about b √(2k / T) standard deviations.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from models.privacy.gaussian_noise import normals

_VARIANCE = "running_var"


def blurred(
    arrays: Mapping[str, Tensor], reference: Mapping[str, Tensor], blur: float
) -> dict[str, Tensor]:
    """Return the arrays with noise on their change, by the operating system's random numbers.

    Args:
        arrays: what is to leave, of any shapes.
        reference: what came; an array that did not come in the same shape stays as it is.
        blur: the noise's standard deviation, in root mean squares of a unit's change. A unit is a
            row, a filter, or all of a vector.
    """
    return {
        name: _blurred(name, array, reference[name], blur)
        if name in reference and reference[name].shape == array.shape and array.is_floating_point()
        else array
        for name, array in arrays.items()
    }


def _blurred(name: str, array: Tensor, origin: Tensor, blur: float) -> Tensor:
    values = array.detach().cpu().double()
    change = values - origin.detach().cpu().double()
    units = change.reshape(len(change) if change.ndim > 1 else 1, -1)
    scale = units.square().mean(dim=1, keepdim=True).sqrt()
    noisy = values + (blur * scale * normals(units.shape, None)).reshape(values.shape)
    noisy = noisy.clamp(min=0) if name.endswith(_VARIANCE) else noisy
    return noisy.to(array.dtype)
