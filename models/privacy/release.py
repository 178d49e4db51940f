"""The only gate for differentially private releases; it computes in whole numbers.

One patient contributes a vector of numbers, the patient's part. It is clipped to a norm C and
written in whole units of C / 2^24. Parts and noise are added as whole numbers. The later steps,
multiplying by the unit and dividing by an expected batch, see only numbers that are private
already.

One patient moves the sum by at most C, for any numbers. The reasons are:

- The vector is divided by its largest number before its norm is taken in float64. The norm is then
  between 1 and the root of the length. It cannot overflow, nor vanish as the norm of (1e-24, 1e-24)
  does in float32.
- Scaled numbers are cut off towards zero, which makes no number larger. Rounding to the nearest
  could make each half a unit larger, and the bound with it (Casacuberta et al. 2022).
- The norm of the whole numbers is then computed again, without any error: units below 2^24 have
  squares below 2^48, and float64 adds whole numbers up to 2^53 exactly. A part that is still too
  long counts as 0.
- Whole numbers are added exactly, in any order. One number can move a sum of floats by more than C
  (Casacuberta et al. 2022), and floating-point noise reveals what it was added to (Mironov 2012).

``rounded_gaussian`` explains why rounding the noise costs nothing; ``accountant`` adds up releases.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedsilo.models.privacy.rounded_gaussian import rounded_normals

UNITS = 2**24  # a part of norm C is a vector of whole numbers of this norm


@dataclass
class Release:
    """Adds noise to sums of patients' contributions ("parts"), after their epsilon was charged.

    Attributes:
        bound: C, the largest L2 norm of a patient's part.
        noise: z; the standard deviation of the noise is zC, or up to a unit more.
        releases: the number of releases that the ledger has been charged for.
        source: generator of a simulation, or None for noise from the operating system.
        made: the number of releases made so far.
    """

    bound: float
    noise: float
    releases: int
    source: torch.Generator | None
    made: int = field(default=0, init=False)

    @property
    def alone(self) -> bool:
        """Tell whether each patient's contribution must be computed in a batch of one.

        This holds for real runs. In a larger batch, the rounding of a patient's numbers depends on
        the batch, so the clipping norm would not bound the patient's influence. A simulation, which
        sets ``source``, may use larger batches, because it protects no real patients.
        """
        # A server could craft weights that turn last bits into large differences
        return self.source is None

    def parts(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clip each patient's contribution to the L2 norm ``bound``, and round it to whole units.

        A unit is bound / 2^24, and numbers are rounded towards zero. If a floating-point error
        still leaves a contribution longer than the bound, it becomes 0. NaN and infinite numbers
        count as 0, because an error would reveal the patient.

        Args:
            rows: name -> array (n, ...), at least one array, all with the same n. Row i of all
                arrays together is the contribution of patient i.

        Returns:
            Name -> int64 array of the same shape, in units.
        """
        # Arrays (n, numbers) by name; one row of all arrays together is one patient's vector
        flat: dict[str, Tensor] = {}
        for name, array in rows.items():
            flat[name] = _finite(array).reshape(len(array), math.prod(array.shape[1:]))
        count = len(next(iter(flat.values())))
        device = next(iter(flat.values())).device
        largest = torch.zeros(count, dtype=torch.float64, device=device)
        for values in flat.values():
            if values.numel():
                largest = torch.maximum(largest, values.abs().amax(dim=1))
        divisor = torch.where(largest > 0, largest, 1.0)
        scaled = {name: values / divisor[:, None] for name, values in flat.items()}
        squares = torch.zeros_like(largest)
        for values in scaled.values():
            squares = squares + values.square().sum(dim=1)
        # The first factor keeps the norm, the second clips it to the bound. For a tiny bound the
        # first may be infinite, and the second is then the smaller one
        scale = torch.minimum(largest * (UNITS / self.bound), UNITS / squares.sqrt())
        scale = torch.where(largest > 0, scale, 0.0)
        whole = {name: (values * scale[:, None]).trunc() for name, values in scaled.items()}
        length = torch.zeros_like(largest)
        for values in whole.values():
            length = length + values.square().sum(dim=1)
        # Rounding in the factor may still leave a part too long; comparing whole numbers cannot err
        within = length <= float(UNITS**2)
        parts: dict[str, Tensor] = {}
        for name, values in whole.items():
            kept = torch.where(within[:, None], values, 0.0)
            parts[name] = kept.long().reshape(rows[name].shape)
        return parts

    def sums(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clip and round ``rows`` by ``parts``, and sum over patients: name -> int64 in units."""
        return {name: part.sum(dim=0) for name, part in self.parts(rows).items()}

    def with_noise(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add Gaussian noise to sums of patients' contributions, and convert the sums from units.

        A unit is ``bound`` / 2^24. The noise is a whole number of units. Its standard deviation is
        ``noise`` * ``bound``, rounded up to a whole unit. The call uses up one of the releases
        whose epsilon is already paid.

        Args:
            sums: sums of clipped contributions by name, int64 in units.

        Returns:
            Name -> noisy sum, sorted by name: float64, on the CPU.

        Raises:
            RuntimeError: all paid releases are used up, or a sum is not int64. These are bugs in
                the calling code.
        """
        if self.made >= self.releases:
            raise RuntimeError(f"{self.releases} release(s) were charged, but one more is made")
        self.made += 1
        # Rounded up, because less noise than charged would break the promise
        deviation = math.ceil(self.noise * UNITS)
        left = {}
        for name, total in sorted(sums.items()):
            if total.dtype != torch.int64:
                raise RuntimeError(f"'{name}' is a sum of {total.dtype}, not of whole units")
            noise = rounded_normals(deviation, total.numel(), self.source).reshape(total.shape)
            left[name] = (total.cpu() + noise).double() * (self.bound / UNITS)
        return left


def copy_alone(samples: Tensor, number: int) -> Tensor:
    """Copy sample ``number`` of a batch (batch, ...) to memory of its own, (1, ...).

    A result's last bits may depend on the memory address of its input. Inside a batch this address
    depends on the patients before the sample, so it could reveal them.
    """
    return samples[number : number + 1].clone()


def _finite(values: Tensor) -> Tensor:
    """Convert values to float64, and replace NaN and infinite values by 0."""
    return torch.nan_to_num(values.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)
