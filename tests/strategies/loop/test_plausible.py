from __future__ import annotations

import math

import numpy as np
import pytest

from fedsilo.strategies.loop.plausible import array_fault, metric_fault, metric_range


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [
        ("incoming.test.accuracy", 0, 1),
        ("incoming.val.balanced-accuracy-from-s1a", 0, 1),
        ("incoming.test.own-accuracy", 0, 1),
        ("incoming.test.calibration-error", 0, 1),
        ("incoming.test.routing.va.q05", 0, 1),
        ("incoming.test.routing.a.b.mean", 0, 1),  # a site's name may have dots
        ("incoming.test.reliability.3.mean", 0, 1),
        ("incoming.test.reliability.3.count", 0, 1e12),
        ("incoming.test.class.3.auc", 0, 1),
        ("incoming.test.class.3.false", 0, 1e12),
        ("incoming.test.uncertainty.3.mean", 0, 1),
        ("incoming.test.entropy", 0, math.log(10)),
        ("incoming.test.loss", 0, 1e9),
        ("trained.train.loss", -1e30, 1e30),
        ("trained.train.closeness-from-s1a", -1, 1),
        ("incoming.test.never-heard-of", -1e12, 1e12),
        ("seconds", 0, 1e9),
        ("peak-memory-bytes", 0, 2**50),
        ("kept-state", 0, 1),
        ("dp-releases", 0, 1e12),
    ],
)
def test_a_metric_has_the_range_of_its_name(key: str, low: float, high: float) -> None:
    found = metric_range(key, 10)
    assert (found.low, found.high) == (low, high)
    assert metric_fault(key, low, 10) is None
    assert metric_fault(key, high, 10) is None
    assert str(metric_fault(key, high * 1.01 + 0.01, 10)).startswith(f"metric '{key}' is ")
    assert str(metric_fault(key, low - 0.01 - abs(low) / 100, 10)).startswith(f"metric '{key}' is ")


def test_rounding_is_no_lie_and_half_a_message_is() -> None:
    assert metric_fault("incoming.test.accuracy", 1 + 1e-9, 2) is None
    assert metric_fault("incoming.test.entropy", math.log(2) + 1e-8, 2) is None
    assert "a whole number from 0" in str(metric_fault("dp-releases", 1.5, 2))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("head.weight", 1e6, ""),
        ("head.weight", -1.1e6, "beyond 1e+06"),
        ("norm.running_mean", -1e12, ""),
        ("norm.running_mean", 1.1e12, "beyond 1e+12"),
        ("norm.running_var", 0.0, ""),
        ("norm.running_var", -1e-6, "below 0, which no variance is"),
        ("visitor/s1a/norm.running_var", -1.0, "below 0"),
        ("counts", 1e7, ""),
        ("counts", -1.0, "below 0, which no count is"),
    ],
)
def test_an_array_holds_what_its_name_says(name: str, value: float, said: str) -> None:
    fault = array_fault(name, np.array([0.0, value], np.float32))
    assert said in str(fault or "")
    assert bool(fault) == bool(said)
    assert array_fault(name, np.zeros((0, 3), np.float32)) is None
