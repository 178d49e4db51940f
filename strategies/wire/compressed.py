"""Updates as bfloat16, two bytes a number: 'wire-precision' and 'wire-down'.

What a site makes of an array that it was sent travels as an update, the difference to what was
sent. Running statistics of batch norm, whole numbers and arrays of other names travel as they are.
An update is an array of bytes under the array's name: its numbers in order, float32 or bfloat16,
little-endian. Settings and shape decide how many bytes these are, so a reply can never open to more
than the server expects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Array, RecordDict

from fedsilo.models.contract.array_names import is_statistic
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.compression import Floats, from_bf16, to_bf16
from fedsilo.strategies.wire.records import ArrayError, NDArray, Packed
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Reply, Specs, decode

_VALUES: Mapping[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "bf16": np.dtype("<u2")}


@dataclass(frozen=True)
class Compression:
    """How updates travel; both ends make it of the run's settings."""

    precision: str = "fp32"  # of an update's numbers, "fp32" or "bf16"
    # Of the weights that sites are sent to train, "fp32" or "bf16". What comes back is added to the
    # server's own weights, so that nothing is lost by rounding them
    down: str = "fp32"

    def disclosure(self) -> str:
        """Say that fewer bytes hide nothing; empty if updates leave as they are."""
        if self.precision == "fp32":
            return ""
        return (
            f"of weights the updates, rounded to {self.precision} ('wire-precision'), which gives "
            "no privacy"
        )

    def pack(self, arrays: Arrays, packed: Packed) -> None:
        """Add to ``packed`` the weights as bfloat16's bits, if they are sent so."""
        if self.down != "bf16":
            return
        for name, array in arrays.items():
            is_weight = _is_update(name, ArraySpec(array.shape), arrays)
            if is_weight and id(array) not in packed:
                packed[id(array)] = array, Array(to_bf16(np.ascontiguousarray(array)))

    def received(self, arrays: Arrays) -> dict[str, NDArray]:
        """Return arrays as a site uses them: what ``pack`` made bits of as float32 again."""
        bits = np.uint16 if self.down == "bf16" else None
        return {name: from_bf16(a) if a.dtype == bits else a for name, a in arrays.items()}

    def packed(self, leaving: Arrays, sent: Arrays) -> dict[str, NDArray]:
        """Return arrays as they travel.

        Args:
            leaving: what a site made, by name.
            sent: what it was sent.

        Raises:
            ArrayError: an update is not finite; it names the array.
        """
        travelling: dict[str, NDArray] = {}
        for name, array in sorted(leaving.items()):
            travelling[name] = array
            if not _is_update(name, ArraySpec(array.shape, str(array.dtype)), sent):
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                update = (array - sent[name]).reshape(-1)
            if not np.isfinite(update).all():
                raise ArrayError(
                    f"the update of '{one_line(name, 80)}' contains non-finite values, which "
                    f"cannot travel as {self.precision}: if training has diverged, lower "
                    "'learning-rate'"
                )
            values: NDArray = to_bf16(update) if self.precision == "bf16" else update
            data = values.astype(_VALUES[self.precision]).tobytes()
            travelling[name] = np.frombuffer(data, np.uint8)
        return travelling

    def reply(self, site: str, content: RecordDict, expected: Specs, sent: Arrays) -> Reply:
        """Decode a reply as ``reply.decode`` does, and add its updates to ``sent``.

        Raises:
            SiteError: it is no such reply; one line.
        """
        kind = _VALUES[self.precision]
        travelling = dict(expected)
        updates = [name for name, spec in expected.items() if _is_update(name, spec, sent)]
        for name in updates:
            travelling[name] = ArraySpec((sent[name].size * kind.itemsize,), "uint8")
        reply = decode(site, content, travelling)
        arrays = dict(reply.arrays)
        for name in updates:
            update = self._update(arrays[name].tobytes())
            with np.errstate(over="ignore", invalid="ignore"):
                arrays[name] = sent[name] + update.reshape(sent[name].shape)
            if not np.isfinite(arrays[name]).all():
                raise SiteError(
                    f"the update of '{name}' cannot be opened: it leads to non-finite values; was "
                    "it altered?"
                )
        return replace(reply, arrays=arrays)

    def _update(self, data: bytes) -> Floats:
        """Return the numbers of an update, of which ``data`` are the bytes."""
        values = np.frombuffer(data, _VALUES[self.precision])
        return from_bf16(values) if self.precision == "bf16" else values.astype(np.float32)


def compression_of(common: CommonSettings) -> Compression | None:
    """Return how updates travel in a run, or None if sites send what they have."""
    if not common.compresses():
        return None
    return Compression(common.wire_precision, common.wire_down)


def _is_update(name: str, spec: ArraySpec, sent: Mapping[str, NDArray]) -> bool:
    """Tell whether an array of a reply travels as the update of one that was sent."""
    before = sent.get(name)
    if before is None or is_statistic(name) or spec.dtype != "float32":
        return False
    return before.size > 0 and before.dtype == np.float32 and before.shape == spec.shape
