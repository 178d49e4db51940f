"""Updates as bfloat16, two bytes per number: 'server.wire-precision' and 'server.wire-down'.

A site returns an array that it received as an update: the difference to the array it received.
Batch norm's running statistics, whole numbers and arrays of other names travel unchanged. An update
is an array of bytes under the array's name: its numbers in order, float32 or bfloat16,
little-endian. The settings and the shape fix the number of bytes, so a reply can never decompress
to more than expected.

A bfloat16 is the upper half of a float32 (arXiv:1905.12322), rounded to nearest, ties to even.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, RecordDict

from fedsilo.core.array_names import is_statistic
from fedsilo.core.errors import SiteError
from fedsilo.core.one_line import one_line
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.strategies.wire.records import ArrayError, NDArray, Packed
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Reply, Specs, decode

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]


def to_bf16(values: Floats) -> Bits:
    """Round float32 values to the nearest bfloat16 (ties to even), and return the bits as uint16.

    The values must be finite, which is not checked. Values above bfloat16's maximum, about 3.39e38,
    become infinite.
    """
    # Adding just below half a unit, and one more if the kept part is odd, carries exactly when
    # "nearest, ties to even" rounds up. A NaN could become infinite here
    bits = values.view(np.uint32)
    # Just under half of the dropped bits, plus 1 if the last kept bit is odd: ties go to even
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: Bits) -> Floats:
    """Convert the bits of bfloat16 to float32, which is exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


_VALUES: Mapping[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "bf16": np.dtype("<u2")}


@dataclass(frozen=True)
class Compression:
    """The wire format of updates; server and site derive the same from the run's settings."""

    precision: str = "fp32"  # the precision of an update's numbers: "fp32" or "bf16"
    # The precision of weights sent to sites for training: "fp32" or "bf16". The server's own
    # weights do not lose precision, because it adds the sites' updates to them
    down: str = "fp32"

    def disclosure(self) -> str:
        """Return a sentence for ``privacy.json`` that rounded updates give no privacy.

        Updates, the changes of weights, are rounded to 'server.wire-precision'. If that is "fp32",
        nothing is rounded, and the sentence is empty.
        """
        if self.precision == "fp32":
            return ""
        return (
            f"the updates of weights are rounded to {self.precision} ('server.wire-precision'), "
            "which "
            "gives no privacy"
        )

    def pack_weights(self, arrays: Arrays, packed: Packed) -> None:
        """Put the weights into the cache ``packed`` as bfloat16 if 'server.wire-down' is "bf16".

        ``to_record``, which serialises arrays, then takes them from the cache. Some arrays are
        skipped: arrays in the cache already, empty arrays, arrays that are not float32, and batch
        norm statistics. If the setting is "fp32", the cache does not change.
        """
        if self.down != "bf16":
            return
        for name, array in arrays.items():
            is_weight = _is_update(name, ArraySpec(array.shape), arrays)
            if is_weight and id(array) not in packed:
                packed[id(array)] = array, Array(to_bf16(np.ascontiguousarray(array)))

    def unpack_received(self, arrays: Arrays) -> dict[str, NDArray]:
        """Return the received arrays, with bfloat16 bits converted back to float32.

        If 'server.wire-down' is "bf16", every uint16 array counts as bfloat16 bits and is
        converted. Otherwise all arrays are returned unchanged.
        """
        usable: dict[str, NDArray] = dict(arrays)
        if self.down == "bf16":
            for name, array in arrays.items():
                if array.dtype == np.uint16:
                    usable[name] = from_bf16(array)
        return usable

    def pack_updates(self, leaving: Arrays, sent: Arrays) -> dict[str, NDArray]:
        """Return a site's arrays in their wire format: updates as bytes, other arrays unchanged.

        An update is a float32 weight minus the received array of the same name and shape. Its
        values are rounded to 'server.wire-precision', and their bytes become a uint8 vector. Batch
        norm's statistics are never updates, and neither are arrays without a received one.

        Args:
            leaving: the arrays that the site returns, by name.
            sent: the arrays that the site received.

        Raises:
            ArrayError: an update is not finite. The error names the array.
        """
        travelling: dict[str, NDArray] = {}
        for name, array in sorted(leaving.items()):
            travelling[name] = array
            if not _is_update(name, ArraySpec(array.shape, str(array.dtype)), sent):
                continue
            # An overflow needs no warning here, because the check below raises a proper error
            with np.errstate(over="ignore", invalid="ignore"):
                update = (array - sent[name]).reshape(-1)
            if not np.isfinite(update).all():
                raise ArrayError(
                    f"the update of '{one_line(name, 80)}' contains non-finite values, which "
                    f"cannot travel as {self.precision}: if training has diverged, lower "
                    "'train.learning-rate'"
                )
            if self.precision == "bf16":
                update = to_bf16(update)
            data = update.astype(_VALUES[self.precision]).tobytes()
            travelling[name] = np.frombuffer(data, np.uint8)
        return travelling

    def decode_reply(self, site: str, content: RecordDict, expected: Specs, sent: Arrays) -> Reply:
        """Check and decode a reply, and add its updates to the arrays in ``sent``.

        An update is the difference between a returned and a sent array. The names, types and shapes
        of arrays are checked, and all values must be finite.

        Args:
            site: the site that sent the reply.
            content: the content of the site's message.
            expected: the type and shape of each array after updates are added.
            sent: the arrays that the server sent to the site.

        Raises:
            SiteError: the reply is malformed, or a resulting array is not finite.
        """
        kind = _VALUES[self.precision]
        travelling = dict(expected)
        updates: list[str] = []
        for name, spec in expected.items():
            if _is_update(name, spec, sent):
                updates.append(name)
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
        """Convert the bytes of an update, in 'server.wire-precision', to float32 numbers (n,)."""
        values = np.frombuffer(data, _VALUES[self.precision])
        if self.precision == "bf16":
            return from_bf16(values)
        return values.astype(np.float32)


def compression_of(common: CommonSettings) -> Compression | None:
    """Return the wire format of updates in a run, or None if the run does not compress updates."""
    if not common.compresses():
        return None
    return Compression(common.wire_precision, common.wire_down)


def _is_update(name: str, spec: ArraySpec, sent: Mapping[str, NDArray]) -> bool:
    """Tell whether an array of a reply travels as an update.

    An update is the difference from the array in ``sent``, which the site received. That array must
    have the same name and shape, and both must be float32 and not empty. Batch norm statistics
    never travel as updates.
    """
    before = sent.get(name)
    if before is None or is_statistic(name) or spec.dtype != "float32":
        return False
    return before.size > 0 and before.dtype == np.float32 and before.shape == spec.shape
