"""Updates of arrays in fewer bytes than their numbers have: 'wire-precision' and 'wire-top-k'.

What a site makes of an array that it was sent travels as an update, the difference to what was
sent. Running statistics of batch norm, whole numbers and arrays of other names travel as they are.
An update is an array of bytes under the array's name, of a length that settings and shape decide:

    scale    int8: float32
    places   of the entries that are kept, where not all are: a bit for each entry, or, where that
             is shorter, rising indexes, uint32
    values   of those entries in order: float32, bfloat16 or int8

All are little-endian. So what a server opens can be no larger than what it expects.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import Array, RecordDict

from fedsilo.models.contract.array_names import is_statistic
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.compression import (
    MOST_STEPS,
    Floats,
    from_bf16,
    from_int8,
    largest,
    to_bf16,
    to_int8,
)
from fedsilo.strategies.wire.records import ArrayError, NDArray, Packed
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Reply, Specs, decode

_VALUES: Mapping[str, np.dtype[Any]] = {
    "fp32": np.dtype("<f4"),
    "bf16": np.dtype("<u2"),
    "int8": np.dtype("i1"),
}
_INDEX, _SCALE = np.dtype("<u4"), np.dtype("<f4")

Uniform = Callable[[int], Floats]  # so many random numbers from 0 to 1, exclusive


@dataclass(frozen=True)
class Compression:
    """How updates travel; both ends make it of the run's settings."""

    precision: str = "fp32"  # of the values, "fp32", "bf16" or "int8"
    share: float = 1.0  # of an update's entries that are sent, above 0 and at most 1
    feedback: bool = True  # whether a site adds what it left out to its next update
    # Of the weights that sites are sent to train, "fp32" or "bf16". What comes back is added to the
    # server's own weights, so that nothing is lost by rounding them
    down: str = "fp32"

    @property
    def kind(self) -> str:
        """The settings that decide what an update leaves out."""
        return f"{self.precision}-{self.share!r}"

    def disclosure(self) -> str:
        """Say what fewer bytes hide, which is nothing; empty if updates leave as they are."""
        if self.kind == Compression().kind:
            return ""
        kept = f"'wire-precision' {self.precision}, 'wire-top-k' {self.share:g}"
        said = f"of weights the updates, in fewer bytes ({kept}), which gives no privacy"
        if self.precision != "fp32":
            said += "; rounding promises nothing"
        if self.share < 1:
            said += "; which entries are sent reveals which the site's patients moved most"
            said += "; what is left out follows later" if self.feedback else ""
        return said

    def pack(self, arrays: Arrays, packed: Packed) -> None:
        """Add to ``packed``, what is packed for sites, weights as bfloat16's bits, if so sent."""
        for name, array in arrays.items() if self.down == "bf16" else ():
            is_weight = _is_update(name, ArraySpec(array.shape), arrays)
            if is_weight and id(array) not in packed:
                packed[id(array)] = array, Array(to_bf16(np.ascontiguousarray(array)))

    def received(self, arrays: Arrays) -> dict[str, NDArray]:
        """Return arrays as a site uses them: what ``pack`` made bits of as float32 again."""
        bits = np.uint16 if self.down == "bf16" else None
        return {name: from_bf16(a) if a.dtype == bits else a for name, a in arrays.items()}

    def packed(
        self, leaving: Arrays, sent: Arrays, memory: Arrays, uniform: Uniform
    ) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        """Return arrays as they travel, and by name what was left out of their updates.

        Args:
            leaving: what a site made, by name.
            sent: what it was sent.
            memory: what was left out before, which is added.
            uniform: returns random numbers for the rounding of int8, those of an array at once.

        Raises:
            ArrayError: an update is not finite; it names the array.
        """
        travelling: dict[str, NDArray] = {}
        left: dict[str, NDArray] = {}
        for name, array in sorted(leaving.items()):
            travelling[name] = array
            if not _is_update(name, ArraySpec(array.shape, str(array.dtype)), sent):
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                update = (array - sent[name] + memory.get(name, np.float32(0))).reshape(-1)
            if not np.isfinite(update).all():
                raise ArrayError(
                    f"the update of '{one_line(name, 80)}' contains non-finite values, which "
                    f"cannot travel as {self.precision}: if training has diverged, lower "
                    "'learning-rate'"
                )
            data = self._bytes(update, uniform)
            travelling[name] = np.frombuffer(data, np.uint8)
            if self.feedback and (self.share < 1 or self.precision != "fp32"):
                left[name] = (update - self._update(data, update.size)).reshape(array.shape)
        return travelling, left

    def reply(self, site: str, content: RecordDict, expected: Specs, sent: Arrays) -> Reply:
        """Return what a reply holds, as ``reply.decode`` does, its updates added to ``sent``.

        Raises:
            SiteError: it is no such reply; one line.
        """
        updates = {name for name, spec in expected.items() if _is_update(name, spec, sent)}
        travelling = {
            name: ArraySpec((self._size(sent[name].size),), "uint8") if name in updates else spec
            for name, spec in expected.items()
        }
        reply = decode(site, content, travelling)
        arrays = dict(reply.arrays)
        for name in updates:
            try:
                with np.errstate(over="ignore"):
                    update = self._update(arrays[name].tobytes(), sent[name].size)
                    arrays[name] = sent[name] + update.reshape(sent[name].shape)
                if not np.isfinite(arrays[name]).all():
                    raise ArrayError("it leads to non-finite values")
            except ArrayError as error:
                raise SiteError(
                    f"the update of '{name}' cannot be opened: {error}; was it altered?"
                ) from None
        return replace(reply, arrays=arrays)

    def _kept(self, size: int) -> int:
        """Return how many of ``size`` entries are sent."""
        return min(size, max(1, math.ceil(self.share * size - 1e-9)))

    def _size(self, size: int) -> int:
        """Return the bytes of an update of ``size`` entries."""
        kept = self._kept(size)
        scale = _SCALE.itemsize * (self.precision == "int8")
        return scale + _place_bytes(size, kept) + kept * _VALUES[self.precision].itemsize

    def _bytes(self, update: Floats, uniform: Uniform) -> bytes:
        """Return an update (n,) as bytes."""
        kept, places = self._kept(update.size), b""
        if kept < update.size:
            chosen = largest(update, kept)
            places = _places(chosen, kept)
            update = update[chosen]
        if self.precision == "int8":
            scale, steps = to_int8(update, uniform(kept))
            return scale.astype(_SCALE).tobytes() + places + steps.tobytes()
        values: NDArray = to_bf16(update) if self.precision == "bf16" else update
        return places + values.astype(_VALUES[self.precision]).tobytes()

    def _update(self, data: bytes, size: int) -> Floats:
        """Return the update (size,) of which ``data`` are the bytes, as many as it needs.

        Raises:
            ArrayError: no site makes such bytes.
        """
        kept, scale = self._kept(size), np.float32(1)
        if self.precision == "int8":
            scale = np.frombuffer(data, _SCALE, 1)[0].astype(np.float32)
            if not (np.isfinite(scale) and scale >= 0):
                raise ArrayError(f"its scale is {scale:g}")
            data = data[_SCALE.itemsize :]
        offset = _place_bytes(size, kept)
        values = self._values(np.frombuffer(data, _VALUES[self.precision], offset=offset), scale)
        if kept == size:
            return values
        update = np.zeros(size, np.float32)
        update[_chosen(data[:offset], size, kept)] = values
        return update

    def _values(self, packed: NDArray, scale: np.float32) -> Floats:
        """Return the numbers of packed values.

        Raises:
            ArrayError: one is not finite, or a step that no rounding makes.
        """
        if self.precision == "int8":
            if (packed < -MOST_STEPS).any():
                raise ArrayError(f"a value is below -{MOST_STEPS}")
            return from_int8(scale, packed)
        values = from_bf16(packed) if self.precision == "bf16" else packed.astype(np.float32)
        if not np.isfinite(values).all():
            raise ArrayError("it contains non-finite values")
        return values


def compression_of(common: CommonSettings) -> Compression | None:
    """Return how updates travel in a run, or None if sites send what they have."""
    if not common.compresses():
        return None
    precision, share = common.wire_precision, common.wire_top_k
    return Compression(precision, share, common.wire_feedback, common.wire_down)


def _is_update(name: str, spec: ArraySpec, sent: Mapping[str, NDArray]) -> bool:
    """Tell whether an array of a reply travels as the update of one that was sent."""
    before = sent.get(name)
    if before is None or is_statistic(name) or spec.dtype != "float32":
        return False
    return before.size > 0 and before.dtype == np.float32 and before.shape == spec.shape


def _place_bytes(size: int, kept: int) -> int:
    """Return the bytes that say which ``kept`` of ``size`` entries are there."""
    return 0 if kept == size else min(-(-size // 8), kept * _INDEX.itemsize)


def _places(chosen: NDArray, kept: int) -> bytes:
    if _place_bytes(chosen.size, kept) < kept * _INDEX.itemsize:
        return np.packbits(chosen).tobytes()
    return np.flatnonzero(chosen).astype(_INDEX).tobytes()


def _chosen(data: bytes, size: int, kept: int) -> NDArray:
    """Return the indexes that ``data`` say, (kept,), rising.

    Raises:
        ArrayError: there are others than so many, beyond the array, or not in order.
    """
    if len(data) < kept * _INDEX.itemsize:
        bits = np.unpackbits(np.frombuffer(data, np.uint8))
        indexes: NDArray = np.flatnonzero(bits)
    else:
        indexes = np.frombuffer(data, _INDEX).astype(np.int64)
    if len(indexes) != kept:
        raise ArrayError(f"it names {len(indexes)} entries, not {kept}")
    if indexes.max() >= size:
        raise ArrayError(f"it names entry {indexes.max()} of {size}")
    if (np.diff(indexes) <= 0).any():
        raise ArrayError("its entries are not in order, or one is there twice")
    return indexes
