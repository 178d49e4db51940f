"""A site's reply, decoded once from Flower's records; its form is checked at the same time.

``strategies.loop.plausible`` checks the numbers of a reply, and ``strategies.loop.round`` whether
they fit the question.

The replies of a round are as many models as there are sites. So that a server's memory does not
grow with them, ``Spill`` writes everything beyond ``IN_MEMORY`` bytes to a file without a name,
which disappears with the round or with the process.
"""

import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from fedsilo.core.errors import RunDirectoryError, SiteError
from fedsilo.core.messages import ARRAYS, KEPT_STATE, METRICS
from fedsilo.core.metric_names import GRAMMAR, is_metric_key
from fedsilo.core.one_line import one_line, quote_value
from fedsilo.strategies.wire.records import (
    BUNDLE,
    ArrayError,
    Header,
    NDArray,
    open_bundle,
    packed_bytes,
    read_header,
    record_bytes,
    refuse_many_records,
    unpack,
)
from fedsilo.strategies.wire.secure_keys import SECURE

Arrays = Mapping[str, NDArray]

_ANY = 2**16  # the longest length in fedsilo's replies if a spec allows any length
_KEYS = 50_000  # metrics per site and per bin are thousands in a run of many sites


@dataclass(frozen=True)
class ArraySpec:
    """The required type and shape of a reply's array; None in a shape allows any length."""

    shape: tuple[int | None, ...]
    dtype: str = "float32"


Specs = Mapping[str, ArraySpec]


@dataclass(frozen=True)
class Reply:
    """A site's decoded reply to one question of the server."""

    site: str  # the name of the site
    arrays: Arrays = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # keys are those of the MetricRecord
    examples: int = 1  # the number of training samples that the site counts for in a mean
    # bytes_down is the size of the message to the site, bytes_up the size of the reply
    bytes_down: int = 0
    bytes_up: int = 0
    # The record of secure aggregation, as received
    secure: Mapping[str, Any] = field(default_factory=dict)
    keeps_state: bool = False  # whether the site has stored private state for this phase


Check = Callable[[Reply], str | None]


def decode(site: str, content: RecordDict, expected: Specs) -> Reply:
    """Decode a site's message into a reply, and check its metrics and its arrays.

    In the reply, ``examples``, the site's weight in means, is 1 until the caller sets it.
    ``bytes_up`` is the size of the message as if each array had travelled separately. This makes
    runs with and without bundles of arrays comparable.

    Args:
        site: the site that sent the reply.
        content: the content of the site's message.
        expected: name -> type and shape. The reply must have exactly these arrays.

    Raises:
        SiteError: in one of these cases:
            - The message has no metrics or too many records, or a bundle of arrays is damaged.
            - A metric has an invalid name or is not finite.
            - An array is missing, unexpected, not finite, or of another type or shape.
    """
    refuse_many_records(content.array_records)
    record = content.array_records.get(ARRAYS, ArrayRecord())
    metrics, arrays = _metrics(content), _unpack_arrays(record, expected)
    size = record_bytes(content)
    if list(record) == [BUNDLE]:
        # Counted as if the arrays were not bundled, so that a deployment and a simulation report
        # comparable numbers
        size -= record.count_bytes()
        for name, array in arrays.items():
            size += len(name) + packed_bytes(array)
    secure: Mapping[str, Any] = dict(content.config_records.get(SECURE, {}))
    # Sites report it as a metric, because metrics are the only values that every reply has
    keeps = metrics.get(KEPT_STATE, 0) == 1
    return Reply(site, arrays, metrics, bytes_up=size, secure=secure, keeps_state=keeps)


def _metrics(content: RecordDict) -> dict[str, float]:
    if METRICS not in content.metric_records:
        raise SiteError("the reply has no metrics")
    # Copied once, because Flower gathers the records at each access
    record = dict(content.metric_records[METRICS])
    if len(record) > _KEYS:
        raise SiteError(f"the reply has {len(record)} metrics, more than {_KEYS}")
    metrics: dict[str, float] = {}
    for key, value in record.items():
        if not is_metric_key(key):
            raise SiteError(f"a metric is called {quote_value(key, 80)}, but {GRAMMAR}")
        # A bool is an int in Python, but no metric is a truth value
        if isinstance(value, bool | list) or not isinstance(value, int | float):
            raise SiteError(f"metric '{key}' is not a finite number")
        try:
            metrics[key] = float(value)
        except OverflowError:
            metrics[key] = math.inf
        if not math.isfinite(metrics[key]):
            raise SiteError(
                f"metric '{key}' is {metrics[key]}, not a finite number: if training has diverged, "
                "lower 'train.learning-rate'"
            )
    return metrics


def _unpack_arrays(record: ArrayRecord, expected: Specs) -> dict[str, NDArray]:
    """Unpack the arrays of a reply, after checking that it has exactly the expected arrays.

    The record has either separate arrays or one bundle, which holds the bytes of all arrays. The
    arrays are returned by name, in the order of ``expected``.

    Raises:
        SiteError: an array is missing, unexpected, not finite, or does not fit its spec, or a
            bundle is damaged.
    """
    arrays: Mapping[str, Array | NDArray] = record
    if list(record) == [BUNDLE]:
        arrays = open_bundle(ARRAYS, record[BUNDLE], most_bytes(expected))
    if arrays.keys() != expected.keys():
        missing = sorted(expected.keys() - arrays.keys())
        surplus = sorted(arrays.keys() - expected.keys())
        raise SiteError(
            f"arrays do not match: missing {one_line(missing, 120)}, "
            f"surplus {one_line(surplus, 120)}"
        )
    return {name: _unpack_array(name, spec, arrays[name]) for name, spec in expected.items()}


def _unpack_array(name: str, spec: ArraySpec, given: Array | NDArray) -> NDArray:
    """Return an array of a reply, after checking its type, its shape and its values.

    All values must be finite. An array from a bundle is already unpacked. A serialised array is
    unpacked only if its header fits ``spec``, because bytes of another shape may need far more
    memory.

    Args:
        name: the array's name, for errors.
        spec: the expected type and shape. A dimension of None may have any length.
        given: the array, or its serialised form.

    Raises:
        SiteError: the type or shape differs, a value is not finite, or the bytes cannot be
            unpacked.
    """
    try:
        header: NDArray | Header = read_header(given) if isinstance(given, Array) else given
        fits = header.dtype == np.dtype(spec.dtype) and len(header.shape) == len(spec.shape)
        for wanted, length in zip(spec.shape, header.shape, strict=False):
            fits = fits and wanted in (None, length)
        if not fits:
            shape = str(spec.shape).replace("None", "'any'")
            raise SiteError(
                f"array '{name}' is {header.dtype} {header.shape}, expected {spec.dtype} {shape}"
            )
        # Only now, because bytes of another shape may need far more memory
        array = unpack(given) if isinstance(given, Array) else given
    except ArrayError as error:
        raise SiteError(f"array '{name}' cannot be unpacked: {error}") from None
    if not np.isfinite(array).all():
        raise SiteError(
            f"array '{name}' contains non-finite values: if training has diverged, lower "
            "'train.learning-rate'"
        )
    return array


def most_bytes(expected: Specs) -> int:
    """Return the largest size in bytes that a reply's arrays may have together.

    A number counts as 4 bytes. A dimension that may have any length, None in the spec, counts as
    65,536.
    """
    total = 0
    for spec in expected.values():
        size = 4
        for length in spec.shape:
            if length is None:
                size *= _ANY
            else:
                size *= length
        total += size
    return total


IN_MEMORY = 2**24  # bytes of all replies of a round


@dataclass
class Spill:
    """Keeps the arrays of a round's replies: in memory up to a limit, and in a file beyond it."""

    folder: str = ""  # the folder of the file; empty for the machine's temporary files
    in_memory: int = IN_MEMORY  # the bytes of further replies that may stay in memory
    _file: IO[bytes] | None = field(init=False, default=None)

    def keep(self, arrays: Mapping[str, NDArray]) -> Mapping[str, NDArray]:
        """Store the arrays of one reply in memory or, beyond the round's budget, in a file.

        The attribute ``in_memory`` is the rest of the budget in bytes. A reply that fits stays in
        memory and reduces it. Every other reply goes whole to the round's file. The file is in
        ``folder`` or, if that does not exist, in the system's temporary folder.

        Returns:
            The same ``arrays``, or a mapping that reads an array from the file at each access.

        Raises:
            RunDirectoryError: the file cannot be written, for example because the disk is full.
        """
        size = sum(array.nbytes for array in arrays.values())
        if size <= self.in_memory:
            self.in_memory -= size
            return arrays
        folder = self.folder
        if not folder or not Path(folder).is_dir():
            folder = tempfile.gettempdir()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            return SpilledArrays(self._file, arrays)
        except OSError as error:
            raise RunDirectoryError(
                f"the replies of a round cannot be kept in {folder} ({error.strerror}): make room "
                "there and resume"
            ) from None

    def close(self) -> None:
        """Close the file, if there is one. This deletes it, because it has no name."""
        if self._file:
            self._file.close()


class SpilledArrays(Mapping[str, NDArray]):
    """Arrays in a file; each access reads one array."""

    def __init__(self, file: IO[bytes], arrays: Mapping[str, NDArray]) -> None:
        self._file = file
        self._start = file.seek(0, os.SEEK_END)
        self._array_places = _array_places(tuple((n, a.dtype, a.shape) for n, a in arrays.items()))
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)
        file.flush()

    def __getitem__(self, name: str) -> NDArray:
        """Read an array from the file."""
        place, size, dtype, shape = self._array_places[name]
        self._file.seek(self._start + place)
        return np.frombuffer(self._file.read(size), dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the arrays."""
        return iter(self._array_places)

    def __len__(self) -> int:
        """Return the number of arrays."""
        return len(self._array_places)


@functools.lru_cache(maxsize=8)  # the replies of a thousand sites share one table
def _array_places(
    arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...],
) -> Mapping[str, tuple[int, int, np.dtype[Any], tuple[int, ...]]]:
    """Return the place of each array in a file: name -> (offset, size, type, shape).

    Offset and size are in bytes. Arrays follow one another without gaps, in the given order, from
    offset 0.

    Args:
        arrays: (name, type, shape) of each array.
    """
    found, place = {}, 0
    for name, dtype, shape in arrays:
        size = dtype.itemsize * math.prod(shape)
        found[name] = place, size, dtype, shape
        place += size
    return found
