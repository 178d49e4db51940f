"""The one gate by which anything leaves under differential privacy, in whole numbers.

A patient's part is a vector of numbers. Here it is clipped to a norm C and written in whole units
of C / 2^24; the parts are added as whole numbers, and so is the noise. What follows, multiplying by
the unit and dividing by an expected batch, is of numbers that are private already.

Why one patient moves the sum by at most C, whatever the numbers are:

- The norm is taken in float64 of the vector divided by its largest number. So it is between 1 and
  the root of the length, and neither overflows nor vanishes, as the norm of (1e-24, 1e-24) in
  float32 does.
- Scaled numbers are cut off towards zero, which makes none larger. Rounded to the nearest, each
  could be half a unit larger, and the bound would have to be (Casacuberta et al. 2022).
- The whole numbers are then measured again, without any error: units below 2^24 have squares below
  2^48, and a float64 adds whole numbers up to 2^53 exactly. A longer part counts as 0.
- Whole numbers are added exactly, in any order. Sums of floats move by more than C with one number
  (Casacuberta et al. 2022), and noise of floats tells what it was added to (Mironov 2012).

``rounded_gaussian`` says why rounding the noise costs nothing, ``accountant`` adds releases up.
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
    """Sums of patients' parts that have been paid for: bound, noise and how many may leave.

    Attributes:
        bound: C, the largest norm of a patient's part.
        noise: z; the noise's deviation is zC, or up to a unit more.
        releases: how many the ledger has been charged for.
        source: a simulation's, or None for the operating system's noise.
        made: of these, so far.
    """

    bound: float
    noise: float
    releases: int
    source: torch.Generator | None
    made: int = field(default=0, init=False)

    @property
    def alone(self) -> bool:
        """Whether each patient's part must be computed apart from all others'.

        In one batch a sample's last bits depend on how many others there are, and weights made for
        the purpose let them decide everything. The noise of a simulation protects nobody.
        """
        return self.source is None

    def parts(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write patients' parts in units of the bound, none longer than it.

        Args:
            rows: arrays (n, ...) by name; those of one patient are one vector together. What is
                not finite counts as 0: by it one patient would be seen.

        Returns:
            The same in units, int64.
        """
        shapes = {name: array.shape for name, array in rows.items()}
        flat = {
            name: _finite(array).reshape(len(array), math.prod(array.shape[1:]))
            for name, array in rows.items()
        }
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
        # The first is infinite for a tiny bound; then the second, which clips, is less
        scale = torch.minimum(largest * (UNITS / self.bound), UNITS / squares.sqrt())
        scale = torch.where(largest > 0, scale, 0.0)
        whole = {name: (values * scale[:, None]).trunc() for name, values in scaled.items()}
        length = torch.zeros_like(largest)
        for values in whole.values():
            length = length + values.square().sum(dim=1)
        within = length <= float(UNITS**2)
        return {
            name: torch.where(within[:, None], values, 0.0).long().reshape(shapes[name])
            for name, values in whole.items()
        }

    def sums(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add up the parts of patients, int64, in units; ``rows`` are as of ``parts``."""
        return {name: part.sum(dim=0) for name, part in self.parts(rows).items()}

    def with_noise(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add noise to sums of parts and return them in the parts' own measure.

        Args:
            sums: int64, in units.

        Returns:
            The same arrays, float64, on the CPU.

        Raises:
            RuntimeError: nobody has paid for it; a fault of the program.
        """
        if self.made >= self.releases:
            raise RuntimeError(f"{self.releases} release(s) were paid for, and one more is made")
        self.made += 1
        deviation = math.ceil(self.noise * UNITS)
        left = {}
        for name, total in sorted(sums.items()):
            if total.dtype != torch.int64:
                raise RuntimeError(f"'{name}' is a sum of {total.dtype}, not of whole units")
            noise = rounded_normals(deviation, total.numel(), self.source).reshape(total.shape)
            left[name] = (total.cpu() + noise).double() * (self.bound / UNITS)
        return left


def apart(samples: Tensor, number: int) -> Tensor:
    """Return a sample (1, ...) in memory of its own.

    Libraries may compute other last bits where memory begins at another place, and where a sample
    is in a batch depends on who comes before it.
    """
    return samples[number : number + 1].clone()


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values.detach().double(), nan=0.0, posinf=0.0, neginf=0.0)
