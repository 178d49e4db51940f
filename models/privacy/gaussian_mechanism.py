"""Differential privacy of what a site sends: clipping and Gaussian noise.

The Gaussian mechanism on whole messages (McMahan et al. 2018, at the site instead of the server):
all arrays of one message are one vector, clipped to L2 norm C, with noise N(0, (zC)²) on every
coordinate. ``fedsilo.models.privacy.accountant`` adds messages up.

C is the sensitivity of "a site's message against an update of zero". Two data sets of one site may
give clipped vectors 2C apart: for a change of the data, epsilon is that of z / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedsilo.models.contract.errors import SettingError, SiteError
from fedsilo.models.contract.settings import NOBODY, SERVER, SUMS, CommonSettings
from fedsilo.models.privacy.gaussian_noise import normals

_VARIANCE = "running_var"
_ZERO = {  # by whether the run clips
    False: "'clip-norm' is 0: without clipping",
    True: "'noise-multiplier' is 0: without noise",
}


def clip_and_noise(
    values: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    clip_norm: float,
    noise_multiplier: float,
    rng: torch.Generator | None,
    summed: bool = False,
) -> dict[str, Tensor]:
    """Return the arrays of one message, clipped together and noised.

    Args:
        values: what is to leave the site, of any shapes.
        reference: what the site received. For an array of the same name and shape the difference is
            clipped and noised, and then added back; for others the array itself.
        clip_norm: C, the largest L2 norm of all differences as one vector.
        noise_multiplier: z; the noise's standard deviation is z * C.
        rng: source of the noise, or None for noise that nobody can repeat.
        summed: whether they are a part of a secure sum, and stay as the noise leaves them.

    Returns:
        Arrays of the same names and shapes, float64 on the CPU.

    Raises:
        SiteError: a value is not finite.
    """
    origins = {name: _origin(value, reference.get(name)) for name, value in values.items()}
    steps = {name: values[name].detach().cpu().double() - origins[name] for name in sorted(values)}
    # One norm over all arrays: with a bound for each, the message's sensitivity would be the root
    # of their sum of squares, and the same epsilon would need more noise
    norm = math.sqrt(sum(step.square().sum().item() for step in steps.values()))
    if not math.isfinite(norm):
        raise SiteError(
            "the arrays received or to be sent hold values that are not finite: nothing left "
            "the site; lower 'learning-rate'"
        )
    scale = clip_norm / norm if norm > clip_norm else 1.0
    deviation = noise_multiplier * clip_norm
    arrays = {}
    for name, step in steps.items():
        noisy_step = scale * step + deviation * normals(step.shape, rng)
        noised = origins[name] + noisy_step
        arrays[name] = noised if summed else _plausible(name, noised, values[name])
    return arrays


def _origin(value: Tensor, reference: Tensor | None) -> Tensor:
    if reference is None or reference.shape != value.shape:
        return torch.zeros(value.shape, dtype=torch.float64)
    return reference.detach().cpu().double()


def _plausible(name: str, noised: Tensor, value: Tensor) -> Tensor:
    # Post-processing costs no privacy: variances become non-negative, and whole numbers, which are
    # counts, whole and at least 1. In a part of a sum it would bias the sum
    if name.endswith(_VARIANCE):
        return noised.clamp(min=0)
    return noised if value.is_floating_point() else noised.round().clamp(min=1)


def check_privacy_settings(common: CommonSettings, table: bool = False) -> None:
    """Refuse settings of differential privacy that contradict each other, by a ``SettingError``.

    ``table`` says whether the data are a table, whose pooled statistics leave without noise.
    """
    clip, noise = common.clip_norm, common.noise_multiplier
    _check_trust(common, table)
    if common.secure_aggregation != "none":
        _check_secure_settings(common)
    elif bool(clip) != bool(noise):
        raise SettingError(
            f"setting 'clip-norm' is {clip:g} and 'noise-multiplier' is {noise:g}: differential "
            "privacy needs both above 0; set both, or neither"
        )
    if common.max_epsilon and not noise:
        raise SettingError(
            f"setting 'max-epsilon' is {common.max_epsilon:g} and {_ZERO[bool(clip)]} there is no "
            "epsilon; set 'clip-norm' and 'noise-multiplier', or remove it"
        )
    if common.delta != CommonSettings().delta and not noise:
        raise SettingError(
            f"setting 'delta' is {common.delta:g} and {_ZERO[bool(clip)]} there is no (epsilon, "
            "delta); set 'clip-norm' and 'noise-multiplier', or remove it"
        )
    if clip and table and common.standardise == "pooled":
        raise SettingError(
            f"setting 'clip-norm' is {clip:g} and 'standardise' is 'pooled': the sums that a site "
            "sends to be pooled leave without noise; set 'standardise' to 'declared' or 'site'"
        )


def _check_trust(common: CommonSettings, table: bool) -> None:
    """Refuse a run that is made for a level of trust whose promise its settings break."""
    if common.trust == SERVER:
        return
    said = f"setting 'trust' is '{common.trust}' and"
    if common.trust == SUMS and common.secure_aggregation == "none":
        raise SettingError(
            f"{said} 'secure-aggregation' is 'none': the server would see what single sites "
            "answer; set it to 'secagg'"
        )
    if common.trust == NOBODY and not common.noise_multiplier:
        raise SettingError(
            f"{said} {_ZERO[bool(common.clip_norm)]} nothing that leaves is differentially "
            "private; set 'clip-norm' and 'noise-multiplier'"
        )
    if table and common.standardise == "pooled":
        raise SettingError(
            f"{said} 'standardise' is 'pooled': a site would send exact sums of its own rows; set "
            "it to 'declared' or 'site'"
        )


def _check_secure_settings(common: CommonSettings) -> None:
    if not common.clip_norm:
        raise SettingError(
            "setting 'secure-aggregation' is 'secagg' and 'clip-norm' is 0: a sum has room for "
            "numbers of a known size alone; set 'clip-norm'"
        )
    if common.noise_multiplier:
        raise SettingError(
            f"setting 'secure-aggregation' is 'secagg' and 'noise-multiplier' is "
            f"{common.noise_multiplier:g}: a sum has no room for noise on whole messages; set "
            "'noise-multiplier' to 0"
        )
    if common.aggregation != "mean":
        raise SettingError(
            f"setting 'aggregation' is '{common.aggregation}' and 'secure-aggregation' is "
            "'secagg': of a sum only the mean is known; set one of the two back"
        )
