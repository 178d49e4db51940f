"""The arithmetic of secure aggregation: sums that reveal no summand (Bonawitz et al. 2017).

Equations (section 4 of the paper, numbers modulo 2^32):
  (weighted) w_k = n_k / B, B = 'secure-samples' of every site file, a bound on n_k -> weigh_site
  (quantised) q_k = round((w_k u_k + R) / step), step = 2R / (2^bits - 1) -> Quantisation.quantise
  (masked) y_k = q_k + PRG(b_k) + sum_{j > k} PRG(s_kj) - sum_{j < k} PRG(s_kj) -> mask_arrays
  (sum) sum_k w_k u_k = step * sum_k q_k - n R -> Quantisation.total
  (theorem 6.5) 2t > n + c: every opened sum has t - c honest sites -> tolerated_colluders

The mean is sum_k w_k u_k over sum_k w_k. The sites mask n_k too, because a server that chose the
weights could leave a single site in the mean. For the same reason a run cannot set B or the bits:
min(n_k, B) / B changes differently at each site when B changes, so a few runs with different B
would reveal every single u_k.

Flower's own masks (``secaggplus_utils.pseudo_rand_gen``) have a seed of 32 bits, which anyone can
find by trying all seeds. Here masks come from AES-256 in counter mode.
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

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings

WORD = 32  # bits of a number on the wire
KEY = 32  # bytes of a mask's key
_FEWEST = 3  # sites in a sum; of two sites each could subtract its own part from the mean
_COARSEST = 0.01  # largest rounding error of the mean, as a share of 'secure.clip-norm'
SAMPLES = 16384  # B, unless the site files say otherwise

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Quantisation:
    """Maps numbers from -limit to limit to integers from 0 to 2^bits - 1.

    Attributes:
        limit: R; numbers outside -R..R are clipped.
        bits: number of bits per integer.
        samples: B; a site with more samples counts as a site with B samples.
    """

    limit: float
    bits: int
    samples: int = SAMPLES

    @property
    def step(self) -> float:
        """The distance between two neighbouring levels, in units of the values."""
        return 2 * self.limit / float(2**self.bits - 1)

    def quantise(self, values: Floats) -> Words:
        """Round values of any shape to integer levels, uint32.

        Values are clipped to -``limit``..``limit``. Level 0 stands for -limit, and level 2^``bits``
        - 1 for limit. Neighbouring levels are one ``step`` apart. A NaN or infinite value is
        replaced by the value 0, because an error would tell the server about it.
        """
        finite = np.where(np.isfinite(values), values, 0.0)
        cut = np.clip(finite, -self.limit, self.limit)
        return np.asarray(np.rint((cut + self.limit) / self.step), np.uint32)

    def total(self, sums: Words, sites: int) -> Floats:
        """Convert the sum of the levels of ``sites`` sites to the sum of their values, float64."""
        # Every site has added R to each value, hence the subtraction
        return np.asarray(sums.astype(np.float64) * self.step - sites * self.limit)


def quantisation(common: CommonSettings, sites: int, samples: int = SAMPLES) -> Quantisation:
    """Choose how finely numbers are rounded, so that their sum over all sites fits into 32 bits.

    The result has as many levels as possible, between -'secure.clip-norm' and 'secure.clip-norm'.

    Args:
        common: the run's settings.
        sites: the number of summed sites, at least 1.
        samples: 'secure-samples' from the site files, the same at each site. A site with more
            samples is weighted as if it had only this number.

    Raises:
        SettingError: ``sites`` times ``samples`` does not fit into 32 bits.
    """
    if sites * samples >= 2**WORD:
        raise SettingError(
            f"'secure-samples' is {samples} in the site files, but the samples of {sites} sites "
            f"must stay below 2^{WORD}: lower it in all of them"
        )
    # The sum of n integers of b bits must not wrap around: b + log2 n <= 32
    return Quantisation(common.clip_norm, WORD - math.ceil(math.log2(sites)), samples)


def weigh_site(levels: Quantisation, samples: int) -> float:
    """Return the weight of a site in a secret sum: ``samples`` / ``levels.samples``, at most 1.

    A site with more than ``levels.samples`` samples is weighted as if it had only this number. It
    is not refused, because a refusal would reveal its size.
    """
    return min(samples, levels.samples) / levels.samples


def why_too_coarse(
    numbers: int, levels: Quantisation, sites: int = 1, samples: int = 0
) -> str | None:
    """Return an error message if rounding would distort the mean too much, otherwise None.

    The expected norm of the rounding error may be 1 % of 'secure.clip-norm'. It is step *
    sqrt(sites * numbers / 12) * B / ``samples``, where B is ``levels.samples``.

    Args:
        numbers: the number of elements of an update.
        levels: the rounding of the secret sum. ``levels.samples`` is 'secure-samples'.
        sites: the number of summed sites. With 1, the error is that of a single site.
        samples: the number of samples at all these sites together. 0 means B.
    """
    # A rounding error is uniform over a step and has variance step^2 / 12. Its norm grows with the
    # square root of the numbers in an update and of the sites
    share = levels.samples / (samples or levels.samples)
    error = share * levels.step * math.sqrt(sites * numbers / 12)
    if error <= _COARSEST * levels.limit:
        return None
    return (
        f"rounding {numbers} numbers to {levels.bits} bits moves the mean by {error:.3g}, but "
        f"'secure.clip-norm' is {levels.limit:g}: lower 'secure-samples' in all site files, or let "
        "sites with more samples take part"
    )


def needed_sites(common: CommonSettings, sites: int) -> int:
    """Return the number of sites, out of ``sites``, that must stay connected to the end of a round.

    The number is 'secure.threshold'. If the setting is 0, it is the smallest whole number above two
    thirds of the sites, but at least three.

    Raises:
        SettingError: there are fewer than three sites, or the threshold is set but below three, at
            most half of the sites, or above the number of sites.
    """
    if sites < _FEWEST:
        raise SettingError(
            f"'secure.aggregation' needs at least three sites, but there are {sites}: of two each "
            "knows the other's part of the sum; set it to 'none', or let more sites take part"
        )
    # The least threshold is that of theorem 6.5 without colluding sites, 2t > n. The default of two
    # thirds tolerates as many colluding sites as missing ones: a third
    least = max(_FEWEST, sites // 2 + 1)
    threshold = common.secure_threshold or max(_FEWEST, 2 * sites // 3 + 1)
    if not least <= threshold <= sites:
        raise SettingError(
            f"setting 'secure.threshold' must be from {least} to {sites} for {sites} sites, but is "
            f"{threshold}: change it, or set it to 0"
        )
    return threshold


def tolerated_colluders(threshold: int, sites: int) -> int:
    """Compute how many sites may collude with the server without revealing another site's update.

    The result is the smaller of 2t - n - 1 and t - 2. The first term is the limit of Bonawitz et
    al. (2017, theorem 6.5). The second makes sure that each opened sum has at least two honest
    sites. A negative result means that even the server alone may learn an update.

    Args:
        threshold: t, the fewest sites that must stay to the end of a round.
        sites: n, the number of sites in the round.
    """
    return min(2 * threshold - sites - 1, threshold - 2)


class MaskStream:
    """A stream of pseudorandom uint32 numbers from a secret key; use each key only once."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY:
            raise ValueError(f"a mask's key has {KEY} bytes, not {len(key)}")
        # A constant nonce is safe only because no key is used twice
        self._stream = Cipher(AES(key), CTR(bytes(16))).encryptor()

    def words(self, shape: tuple[int, ...]) -> Words:
        """Return the stream's next numbers, uint32 of ``shape``."""
        # The byte order is fixed: sites with other processors must compute the same mask
        stream = self._stream.update(bytes(4 * math.prod(shape)))
        return np.frombuffer(stream, "<u4").astype(np.uint32).reshape(shape)


def mask_arrays(
    arrays: Mapping[str, Words], plus: Iterable[bytes], minus: Iterable[bytes] = ()
) -> dict[str, Words]:
    """Return copies of arrays with masks added and subtracted, modulo 2^32.

    ``plus`` holds the secret keys of masks to add, ``minus`` the keys of masks to subtract. A key
    determines its mask's numbers (``MaskStream``), in the order of the arrays' names. If one site
    adds a mask and another subtracts it, the mask cancels in their sum. The result is sorted by
    name.
    """
    # uint32 wraps around in numpy, which is the addition modulo 2^32 that masks need
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
