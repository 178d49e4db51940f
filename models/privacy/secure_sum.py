"""Sums that tell no summand: the arithmetic of secure aggregation (Bonawitz et al. 2017, SecAgg).

Equations (section 4 of the paper, numbers modulo 2^32):
  (quantised) q_k = round((w_k u_k + R) / step), step = 2R / (2^bits - 1) -> Quantisation.whole
  (masked) y_k = q_k + PRG(b_k) + sum_{j > k} PRG(s_kj) - sum_{j < k} PRG(s_kj) -> masked
  (sum) sum_k w_k u_k = step * sum_k q_k - n R -> Quantisation.total

What n sites send is summed in 32 bits, so that 2^bits * n must not exceed 2^32. Flower's own masks
(``secaggplus_utils.pseudo_rand_gen``) come from a seed of 32 bits, which anyone can try out: here
they are AES-256 in counter mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings

WORD = 32  # bits of a number on the wire
KEY = 32  # bytes of a mask's key
_FEWEST = 3  # sites of a sum: of two, each that gets the mean knows the other's part
_TAIL = 9.0  # standard deviations of the noise that are told: one in 1e18 numbers is beyond
_COARSEST = 0.01  # of 'clip-norm': the rounding of one site's update, as a norm

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Quantisation:
    """Numbers from -limit to limit as whole numbers from 0 to 2^bits - 1.

    Attributes:
        limit: R; what is beyond is cut.
        bits: of a whole number.
    """

    limit: float
    bits: int

    @property
    def step(self) -> float:
        """The distance of two numbers that can be told apart."""
        return 2 * self.limit / float(2**self.bits - 1)

    def whole(self, values: Floats) -> Words:
        """Return values of any shape as whole numbers; each is at most half a step off."""
        cut = np.clip(values, -self.limit, self.limit)
        return np.asarray(np.rint((cut + self.limit) / self.step), np.uint32)

    def total(self, sums: Words, sites: int) -> Floats:
        """Return the sum of the values of so many sites from that of their whole numbers."""
        return np.asarray(sums.astype(np.float64) * self.step - sites * self.limit)


def quantisation(common: CommonSettings, sites: int, threshold: int) -> Quantisation:
    """Return how numbers of updates no longer than 'clip-norm' travel.

    Raises:
        SettingError: 'secure-bits' of so many sites do not fit into 32.
    """
    fitting = WORD - math.ceil(math.log2(sites))
    if common.secure_bits > fitting:
        raise SettingError(
            f"setting 'secure-bits' is {common.secure_bits}, and the sum of {sites} sites has room "
            f"for {fitting}: set it to {fitting} or less, or to 0"
        )
    noise = noise_of(common, threshold) * common.clip_norm
    return Quantisation(common.clip_norm + _TAIL * noise, common.secure_bits or fitting)


def noise_of(common: CommonSettings, threshold: int) -> float:
    """Return the noise of one site's weighted update, as a multiple of 'clip-norm'.

    With 'secure-noise' "spread" each of ``threshold`` sites adds a part, and any so many make up
    the whole: z / sqrt(threshold).
    """
    parts = threshold if common.secure_noise == "spread" else 1
    return common.noise_multiplier / math.sqrt(parts)


def why_too_coarse(common: CommonSettings, numbers: int, way: Quantisation) -> str:
    """Say that the rounding of so many numbers is no small part of 'clip-norm'; empty: it is."""
    error = way.step * math.sqrt(numbers / 12)
    if error <= _COARSEST * common.clip_norm:
        return ""
    return (
        f"rounding {numbers} numbers to {way.bits} bits moves a site's update by {error:.3g}, and "
        f"'clip-norm' is {common.clip_norm:g}: raise 'secure-bits', or set it to 0"
    )


def needed_sites(common: CommonSettings, sites: int) -> int:
    """Return how many sites must stay to the end of a round: 'secure-threshold', else 2/3.

    Raises:
        SettingError: so few sites are no crowd, or the threshold does not fit their number.
    """
    if sites < _FEWEST:
        raise SettingError(
            f"'secure-aggregation' needs at least three sites, and there are {sites}: of two each "
            "knows the other's part of the sum; set it to 'none', or let more sites take part"
        )
    least = max(_FEWEST, sites // 2 + 1)  # with half a server could ask two halves for two sums
    threshold = common.secure_threshold or max(least, math.ceil(2 * sites / 3))
    if not least <= threshold <= sites:
        raise SettingError(
            f"setting 'secure-threshold' is {threshold}, and of {sites} sites it must be from "
            f"{least} to {sites}: change it, or set it to 0"
        )
    return threshold


class MaskStream:
    """Whole numbers below 2^32 that only those who hold a key can draw, each key used once."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY:
            raise ValueError(f"a mask's key has {KEY} bytes, not {len(key)}")
        self._stream = Cipher(AES(key), CTR(bytes(16))).encryptor()

    def words(self, shape: tuple[int, ...]) -> Words:
        """Return the next numbers, uint32 of ``shape``."""
        drawn = self._stream.update(bytes(4 * math.prod(shape)))
        return np.frombuffer(drawn, "<u4").astype(np.uint32).reshape(shape)


def masked(
    arrays: Mapping[str, Words], plus: Iterable[bytes], minus: Iterable[bytes] = ()
) -> dict[str, Words]:
    """Return arrays with the masks of ``plus`` added and those of ``minus`` taken off, mod 2^32.

    Args:
        arrays: by name; a mask runs through them by sorted names.
        plus: keys of ``KEY`` bytes.
        minus: the same.
    """
    added = [MaskStream(key) for key in plus]
    taken = [MaskStream(key) for key in minus]
    result: dict[str, Words] = {}
    for name in sorted(arrays):
        total: Any = arrays[name].copy()
        for stream in added:
            total += stream.words(total.shape)
        for stream in taken:
            total -= stream.words(total.shape)
        result[name] = total
    return result
