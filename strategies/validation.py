"""A message is a contract: a reply is checked before any of it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from models.contract import ARRAYS, METRICS, NUM_EXAMPLES, SECONDS
from strategies.state import ArraySpec


def refusal(content: RecordDict, expected: Mapping[str, ArraySpec]) -> str | None:
    """Return why a reply cannot be used, None if it can.

    Checks that the metrics are there and finite, and that the arrays have exactly the expected
    names, float32, the expected shapes and finite values.
    """
    return _bad_metrics(content) or _bad_arrays(content, expected)


def _bad_metrics(content: RecordDict) -> str | None:
    if METRICS not in content.metric_records:
        return "the reply has no metrics"
    metrics = content.metric_records[METRICS]
    for key in (NUM_EXAMPLES, SECONDS):
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
    for name, spec in expected.items():
        shape = tuple(record[name].shape)
        fits = len(shape) == len(spec.shape) and all(
            want is None or want == have for want, have in zip(spec.shape, shape, strict=True)
        )
        if record[name].dtype != "float32" or not fits:
            return (
                f"array '{name}' is {record[name].dtype} {shape}, "
                f"expected float32 {tuple('any' if w is None else w for w in spec.shape)}"
            )
        if not np.isfinite(record[name].numpy()).all():
            return f"array '{name}' holds values that are not finite"
    return None
