"""Sums that reveal no summand: the arithmetic of secure aggregation (Bonawitz et al. 2017, SecAgg).

Equations (section 4 of the paper, numbers modulo 2^32):
  (weighted) w_k = n_k / B, B = 'secure-samples' of every site file, a bound on n_k -> weigh_site
  (quantised) q_k = round((w_k u_k + R) / step), step = 2R / (2^bits - 1) -> Quantisation.quantise
  (masked) y_k = q_k + PRG(b_k) + sum_{j > k} PRG(s_kj) - sum_{j < k} PRG(s_kj) -> mask_arrays
  (sum) sum_k w_k u_k = step * sum_k q_k - n R -> Quantisation.total
  (theorem 6.5) 2t > n + c: every opened sum has t - c honest sites -> tolerated_colluders

The mean is sum_k w_k u_k over sum_k w_k, and the sites mask n_k with it: a server that named the
weights could name one that leaves a single site in the mean. B and the bits are no settings of a
run for the same reason: min(n_k, B) / B moves differently at each site when B changes, so a few
runs with different B would give every single u_k.

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
SAMPLES = 16384  # B, where no site file says otherwise

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Quantisation:
    """Numbers from -limit to limit as integers from 0 to 2^bits - 1."""

    limit: float  # R; numbers beyond are clipped
    bits: int  # of an integer
    samples: int = SAMPLES  # B: a site with more samples counts as one with B

    @property
    def step(self) -> float:
        """The distance between neighbouring levels."""
        return 2 * self.limit / float(2**self.bits - 1)

    def quantise(self, values: Floats) -> Words:
        """Quantise values of any shape; the error is at most half a step.

        A value that is not finite counts as 0: the cast of a nan to an integer is undefined, and an
        error would tell the server that this site alone has one.
        """
        finite = np.where(np.isfinite(values), values, 0.0)
        cut = np.clip(finite, -self.limit, self.limit)
        return np.asarray(np.rint((cut + self.limit) / self.step), np.uint32)

    def total(self, sums: Words, sites: int) -> Floats:
        """Return the sum of so many sites' values from that of their integers."""
        return np.asarray(sums.astype(np.float64) * self.step - sites * self.limit)


def quantisation(common: CommonSettings, sites: int, samples: int = SAMPLES) -> Quantisation:
    """Choose the quantisation of updates no longer than 'clip-norm': the most bits that fit.

    Args:
        common: the run's settings.
        sites: how many sites are summed.
        samples: B, the same in all their site files.

    Raises:
        SettingError: the samples of so many sites do not fit into 32 bits.
    """
    if sites * samples >= 2**WORD:
        raise SettingError(
            f"'secure-samples' is {samples} in the site files, but the samples of {sites} sites "
            f"must stay below 2^{WORD}: lower it in all of them"
        )
    # The sum of n integers of b bits must not wrap around: b + log2 n <= 32
    return Quantisation(common.clip_norm, WORD - math.ceil(math.log2(sites)), samples)


def weigh_site(way: Quantisation, samples: int) -> float:
    """Weigh a site by its samples, from 0 to 1.

    A site with more than B samples counts as one with B, because a refusal would tell its number.
    """
    return min(samples, way.samples) / way.samples


def why_too_coarse(numbers: int, way: Quantisation, sites: int = 1, samples: int = 0) -> str | None:
    """Say why rounding so many numbers would distort the mean; None if it would not.

    Args:
        numbers: of an update.
        way: how they are rounded.
        sites: how many are summed.
        samples: of all these sites together, or 0 for as many as one of them may have.
    """
    # A rounding error is uniform over a step, of variance step^2 / 12; over the numbers of an
    # update and over sites the norm grows with the square root
    share = way.samples / (samples or way.samples)
    error = share * way.step * math.sqrt(sites * numbers / 12)
    if error <= _COARSEST * way.limit:
        return None
    return (
        f"rounding {numbers} numbers to {way.bits} bits moves the mean by {error:.3g}, but "
        f"'clip-norm' is {way.limit:g}: lower 'secure-samples' in all site files, or let sites "
        "with more samples take part"
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


def tolerated_colluders(threshold: int, sites: int) -> int:
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


def mask_arrays(
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
