"""Differential privacy of what a site sends: clipping, Gaussian noise, and what they add up to.

The Gaussian mechanism on whole messages (McMahan et al. 2018, at the site instead of the server):
all arrays of one message are one vector, of which at most L2 norm C is told, with noise N(0, (zC)²)
on every coordinate. Messages compose by Rényi differential privacy (Mironov 2017), converted to
(epsilon, delta) by Canonne, Kamath and Steinke 2020; no site is sampled, so nothing is amplified.

C is the sensitivity of "a site's message against an update of zero". Two data sets of one site may
give clipped vectors 2C apart: of a change of the data epsilon is that of z / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from models.contract.errors import SettingError, SiteError
from models.contract.settings import CommonSettings
from models.privacy.gaussian_noise import normals

SPENT = "epsilon is spent"  # begins a site's refusal; the server knows it by these words
_VARIANCE = "running_var"
# From just above 1 (nearly no noise) to what tiny epsilons need; the conversion takes none <= 1.01
_ORDERS = [1 + 2 ** (step / 32) for step in range(-208, 449)]


def clip_and_noise(
    values: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    clip_norm: float,
    noise_multiplier: float,
    draw: torch.Generator | None,
) -> dict[str, Tensor]:
    """Return the arrays of one message, clipped together and noised.

    Args:
        values: what is to leave the site, of any shapes.
        reference: what came. Of an array with the same name and shape the difference is clipped
            and noised and then added back; of others the array itself.
        clip_norm: C, the largest L2 norm of all differences as one vector.
        noise_multiplier: z; the noise's standard deviation is z * C.
        draw: source of the noise; None: the operating system, so that nobody can draw it again.

    Returns:
        Arrays of the same names and shapes, float64 on the CPU. Variances are not negative, and
        whole numbers, which are counts, whole and at least 1: what is done after the noise is free.

    Raises:
        SiteError: a value is not finite: it has no norm to clip.
    """
    origins = {name: _origin(value, reference.get(name)) for name, value in values.items()}
    steps = {name: values[name].detach().cpu().double() - origins[name] for name in sorted(values)}
    norm = math.sqrt(sum(step.square().sum().item() for step in steps.values()))
    if not math.isfinite(norm):
        raise SiteError(
            "the arrays that came or were to leave hold values that are not finite: nothing left "
            "the site; lower 'learning-rate'"
        )
    scale = clip_norm / norm if norm > clip_norm else 1.0
    deviation = noise_multiplier * clip_norm
    found = {}
    for name, step in steps.items():
        told = scale * step + deviation * normals(step.shape, draw)
        noised = origins[name] + told
        found[name] = _as_what_it_was(name, noised, values[name])
    return found


def _origin(value: Tensor, came: Tensor | None) -> Tensor:
    if came is None or came.shape != value.shape:
        return torch.zeros(value.shape, dtype=torch.float64)
    return came.detach().cpu().double()


def _as_what_it_was(name: str, noised: Tensor, value: Tensor) -> Tensor:
    if name.endswith(_VARIANCE):
        return noised.clamp(min=0)
    return noised if value.is_floating_point() else noised.round().clamp(min=1)


@lru_cache(maxsize=4096)
def epsilon(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return the epsilon of ``releases`` messages at ``delta``, by the accountant of dp-accounting.

    0 of none, infinite without noise. It is an upper bound: the exact one is up to a tenth lower.
    """
    if not releases:
        return 0.0
    if not noise_multiplier:
        return math.inf
    # Takes a second, and only private runs need it
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(_ORDERS)
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise_multiplier), releases))
    return float(accountant.get_epsilon(delta))


def combined_multiplier(releases: Mapping[float, int]) -> float:
    """Return the noise multiplier of one message that tells as much as ``releases`` (z -> count).

    Gaussian mechanisms compose to one: their 1/z² add up. 0 stands for no noise at all.
    """
    told = sum(count / z**2 for z, count in releases.items())
    return 1 / math.sqrt(told) if told else math.inf


def epsilon_of_a_change(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return the epsilon of any change of a site's data: clipped vectors may be 2C apart."""
    return epsilon(noise_multiplier / 2, releases, delta)


def check_privacy_settings(common: CommonSettings, table: bool = False) -> None:
    """Refuse settings of differential privacy that contradict each other.

    Args:
        common: the settings.
        table: whether the data are a table, whose pooled figures would leave without noise.

    Raises:
        SettingError: it names the settings and says what to set.
    """
    clip, noise = common.clip_norm, common.noise_multiplier
    if bool(clip) != bool(noise):
        raise SettingError(
            f"setting 'clip-norm' is {clip:g} and 'noise-multiplier' is {noise:g}: differential "
            "privacy needs both above 0; set both, or neither"
        )
    if common.max_epsilon and not clip:
        raise SettingError(
            f"setting 'max-epsilon' is {common.max_epsilon:g} and 'clip-norm' is 0: without "
            "clipping there is no epsilon; set 'clip-norm' and 'noise-multiplier', or remove it"
        )
    if common.delta != CommonSettings().delta and not clip:
        raise SettingError(
            f"setting 'delta' is {common.delta:g} and 'clip-norm' is 0: without clipping there is "
            "no (epsilon, delta); set 'clip-norm' and 'noise-multiplier', or remove it"
        )
    if clip and table and common.standardise == "pooled":
        raise SettingError(
            f"setting 'clip-norm' is {clip:g} and 'standardise' is 'pooled': the sums that a site "
            "sends to be pooled leave without noise; set 'standardise' to 'declared' or 'site'"
        )
