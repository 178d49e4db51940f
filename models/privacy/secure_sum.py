"""Sums that reveal no summand: the arithmetic of secure aggregation (Bonawitz et al. 2017, SecAgg).

Equations (section 4 of the paper, numbers modulo 2^32):
  (weighted) w_k = n_k / B, B = 'secure-samples', a bound on n_k that all know -> weight
  (quantised) q_k = round((w_k u_k + R) / step), step = 2R / (2^bits - 1) -> Quantisation.quantised
  (masked) y_k = q_k + PRG(b_k) + sum_{j > k} PRG(s_kj) - sum_{j < k} PRG(s_kj) -> masked
  (sum) sum_k w_k u_k = step * sum_k q_k - n R -> Quantisation.total
  (theorem 6.5) 2t > n + c: with c sites the server opens no sum of under t - c others -> tolerated

The mean is sum_k w_k u_k over sum_k w_k, and the sites mask n_k with it: a server that named the
weights could name one that leaves a single site in the mean.

Flower's own masks (``secaggplus_utils.pseudo_rand_gen``) have a seed of 32 bits, which anyone can
search; here they are AES-256 in counter mode.
"""

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
_FEWEST = 3  # sites of a sum: with two, each could subtract its own part from the mean
_COARSEST = 0.01  # of 'clip-norm': the rounding of the mean, as a norm

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Quantisation:
    """Numbers from -limit to limit as integers from 0 to 2^bits - 1."""

    limit: float  # R; numbers beyond are clipped
    bits: int  # of an integer

    @property
    def step(self) -> float:
        """The distance between neighbouring levels."""
        return 2 * self.limit / float(2**self.bits - 1)

    def quantised(self, values: Floats) -> Words:
        """Return values of any shape as integers; the error is at most half a step."""
        cut = np.clip(values, -self.limit, self.limit)
        return np.asarray(np.rint((cut + self.limit) / self.step), np.uint32)

    def total(self, sums: Words, sites: int) -> Floats:
        """Return the sum of so many sites' values from that of their integers."""
        return np.asarray(sums.astype(np.float64) * self.step - sites * self.limit)


def quantisation(common: CommonSettings, sites: int) -> Quantisation:
    """Return the quantisation of updates no longer than 'clip-norm'.

    Raises:
        SettingError: 'secure-bits' or 'secure-samples' of so many sites do not fit into 32.
    """
    if sites * common.secure_samples >= 2**WORD:
        raise SettingError(
            f"setting 'secure-samples' is {common.secure_samples}, and the samples of {sites} "
            f"sites must stay below 2^{WORD}: lower it"
        )
    # The sum of n integers of b bits must not wrap around: b + log2 n <= 32
    fitting = WORD - math.ceil(math.log2(sites))
    if common.secure_bits > fitting:
        raise SettingError(
            f"setting 'secure-bits' is {common.secure_bits}, and the sum of {sites} sites has room "
            f"for {fitting}: set it to {fitting} or less, or to 0"
        )
    return Quantisation(common.clip_norm, common.secure_bits or fitting)


def weight(common: CommonSettings, samples: int) -> float:
    """Return what a site of so many samples counts for, from 0 to 1.

    A site of more than 'secure-samples' counts as one of so many: a refusal would tell its number.
    """
    return min(samples, common.secure_samples) / common.secure_samples


def why_too_coarse(
    common: CommonSettings, numbers: int, way: Quantisation, sites: int = 1, samples: int = 0
) -> str | None:
    """Return why rounding so many numbers would distort the mean, or None if it would not.

    ``samples`` are those of all ``sites``, or 0 for as many as one may have.
    """
    # A rounding error is uniform over a step, of variance step^2 / 12; over the numbers of an
    # update and over sites the norm grows with the square root
    share = common.secure_samples / (samples or common.secure_samples)
    error = share * way.step * math.sqrt(sites * numbers / 12)
    if error <= _COARSEST * common.clip_norm:
        return None
    return (
        f"rounding {numbers} numbers to {way.bits} bits moves the mean by {error:.3g}, and "
        f"'clip-norm' is {common.clip_norm:g}: raise 'secure-bits', or set it to 0; or lower "
        "'secure-samples'"
    )


def needed_sites(common: CommonSettings, sites: int) -> int:
    """Return how many sites must stay to the end of a round: 'secure-threshold', else over 2/3.

    Raises:
        SettingError: there are fewer than three sites, or the threshold does not fit their number.
    """
    if sites < _FEWEST:
        raise SettingError(
            f"'secure-aggregation' needs at least three sites, and there are {sites}: of two each "
            "knows the other's part of the sum; set it to 'none', or let more sites take part"
        )
    # Theorem 6.5 with no colluding site. The default bears the most colluding sites for which as
    # many sites as dropped out may still be missing: a third
    least = max(_FEWEST, sites // 2 + 1)
    threshold = common.secure_threshold or max(_FEWEST, 2 * sites // 3 + 1)
    if not least <= threshold <= sites:
        raise SettingError(
            f"setting 'secure-threshold' is {threshold}, and of {sites} sites it must be from "
            f"{least} to {sites}: change it, or set it to 0"
        )
    return threshold


def tolerated(threshold: int, sites: int) -> int:
    """Return how many of ``sites`` may work with the server, and it still learns sums alone.

    Theorem 6.5 asks for 2t > n + c. Its sums are then over at least t - c of the other sites, which
    must be two: the sum of one is that site's own.
    """
    return min(2 * threshold - sites - 1, threshold - 2)


class MaskStream:
    """Integers below 2^32 that only those who know a key can compute; each key is used once."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY:
            raise ValueError(f"a mask's key has {KEY} bytes, not {len(key)}")
        # A constant nonce is safe only because no key is used twice
        self._stream = Cipher(AES(key), CTR(bytes(16))).encryptor()

    def words(self, shape: tuple[int, ...]) -> Words:
        """Return the next numbers, uint32 of ``shape``."""
        stream = self._stream.update(bytes(4 * math.prod(shape)))
        return np.frombuffer(stream, "<u4").astype(np.uint32).reshape(shape)


def masked(
    arrays: Mapping[str, Words], plus: Iterable[bytes], minus: Iterable[bytes] = ()
) -> dict[str, Words]:
    """Return arrays with the masks of keys ``plus`` added and of ``minus`` subtracted, mod 2^32.

    A mask runs through the arrays in the order of their names.
    """
    added = [MaskStream(key) for key in plus]
    removed = [MaskStream(key) for key in minus]
    result: dict[str, Words] = {}
    for name in sorted(arrays):
        total: Any = arrays[name].copy()
        for stream in added:
            total += stream.words(total.shape)
        for stream in removed:
            total -= stream.words(total.shape)
        result[name] = total
    return result
