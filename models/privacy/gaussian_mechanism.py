"""The Gaussian mechanism per patient: bounded parts, their sum, noise.

A patient has one sample. Its part in what leaves is clipped to a norm C, so that a sum of parts
moves by at most C with the patient; noise N(0, (zC)²) on each number of the sum makes it private
(Dwork and Roth 2014, theorem A.1). ``fedsilo.models.privacy.accountant`` adds such sums up.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.privacy.gaussian_noise import normals


def clipped_to(values: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    """Return arrays of any shapes scaled so that as one vector they are at most so long.

    Raises:
        SiteError: a value is not finite.
    """
    wide = {name: value.detach().cpu().double() for name, value in values.items()}
    norm = float(sum(value.square().sum() for value in wide.values())) ** 0.5
    if not norm < float("inf"):
        raise SiteError(
            "the arrays to be sent contain non-finite values: nothing left the site; lower "
            "'learning-rate'"
        )
    scale = clip_norm / norm if norm > clip_norm else 1.0
    return {name: scale * value for name, value in wide.items()}


def clipped_rows(rows: Tensor, clip_norm: float) -> Tensor:
    """Return rows (n, d), a patient's each, shortened to ``clip_norm``; float64, on the CPU."""
    # What overflows counts as 0: by a value that is not finite one patient would be seen
    wide = torch.nan_to_num(rows.detach().cpu().double(), nan=0.0, posinf=0.0, neginf=0.0)
    norms: Tensor = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    tiny = torch.finfo(norms.dtype).tiny
    return wide * (clip_norm / norms.clamp(min=tiny)).clamp(max=1.0)


def with_noise(values: Tensor, deviation: float, rng: torch.Generator | None) -> Tensor:
    """Return float64 values with Gaussian noise of a standard deviation.

    ``rng`` is its source, or None for noise that nobody can repeat.
    """
    noise: Tensor = deviation * normals(values.shape, rng)
    return values + noise
