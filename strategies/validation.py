"""A message is a contract: a reply is checked before any of it is used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

from models.contract import ARRAYS, METRICS, NUM_EXAMPLES, PEAK_MEMORY, SECONDS
from strategies.state import ArraySpec

_ALWAYS = (NUM_EXAMPLES, SECONDS, PEAK_MEMORY)


def refusal(
    content: RecordDict, expected: Mapping[str, ArraySpec], metrics: Iterable[str] = ()
) -> str | None:
    """Return why a reply cannot be used, None if it can.

    Checks that ``metrics`` and those of every reply are there and finite, and that the arrays
    have exactly the expected names, float32, the expected shapes and finite values.
    """
    return _bad_metrics(content, metrics) or _bad_arrays(content, expected)


def _bad_metrics(content: RecordDict, wanted: Iterable[str]) -> str | None:
    if METRICS not in content.metric_records:
        return "the reply has no metrics"
    metrics = content.metric_records[METRICS]
    for key in (*_ALWAYS, *wanted):
        if key not in metrics:
            return f"metric '{key}' is missing"
    for key, value in metrics.items():
        if isinstance(value, list) or not math.isfinite(value):
            return f"metric '{key}' is {value}, not a finite number"
    if float(str(metrics[NUM_EXAMPLES])) < 1:
        return f"metric '{NUM_EXAMPLES}' is {metrics[NUM_EXAMPLES]}, less than 1"
    return None


def _bad_arrays(content: RecordDict, expected: Mapping[str, ArraySpec]) -> str | None:
    record = content.array_records.get(ARRAYS, ArrayRecord())
    missing = sorted(expected.keys() - record.keys())
    surplus = sorted(record.keys() - expected.keys())
    if missing or surplus:
        return f"arrays do not match: missing {missing}, surplus {surplus}"
    faults = (_bad_array(name, record[name], spec) for name, spec in expected.items())
    return next((fault for fault in faults if fault), None)


def _bad_array(name: str, packed: Array, spec: ArraySpec) -> str | None:
    try:
        array = packed.numpy()  # what counts is the payload, not what the record says of it
    except Exception as error:  # numpy's reader fails in any way that bad bytes can make it
        return f"array '{name}' cannot be unpacked: {' '.join(str(error).split())}"
    if not isinstance(array, np.ndarray):
        return f"array '{name}' is a {type(array).__name__}, not an array"
    fits = array.ndim == len(spec.shape) and all(
        want is None or want == have for want, have in zip(spec.shape, array.shape, strict=True)
    )
    if array.dtype != np.float32 or not fits:
        shape = tuple("any" if length is None else length for length in spec.shape)
        return f"array '{name}' is {array.dtype} {array.shape}, expected float32 {shape}"
    if not np.isfinite(array).all():
        return f"array '{name}' holds values that are not finite"
    return None
