import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts
from fedsilo.strategies.loop.plausible import (
    array_fault,
    find_far_updates,
    group_by_kind,
    metric_fault,
    metric_range,
    most_counted,
    update_norm,
    update_statistics,
)
from fedsilo.strategies.wire.reply import Reply


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
        ("dp-epsilon", 0, 1e12),
    ],
)
def test_a_metric_has_the_range_of_its_name(key: str, low: float, high: float) -> None:
    found = metric_range(key, 10)
    assert (found.low, found.high) == (low, high)
    assert metric_fault(key, low, 10) is None
    assert metric_fault(key, high, 10) is None
    assert str(metric_fault(key, high * 1.01 + 0.01, 10)).startswith(f"metric '{key}' is ")
    assert str(metric_fault(key, low - 0.01 - abs(low) / 100, 10)).startswith(f"metric '{key}' is ")


@pytest.mark.parametrize("key", ["certainty.3.count", "reliability.9.right", "class.0.false"])
def test_no_bin_or_class_counts_more_than_the_split_has(key: str) -> None:
    facts = SiteFacts("a", "a", (2,), 4, {"train": [9] * 4, "test": [10, 20, 30, 40]}, {})
    most = most_counted(facts, CommonSettings())
    assert metric_fault(f"incoming.test.{key}", 100, 4, most) is None
    fault = f"metric 'incoming.test.{key}' is 1e+12, not a whole number from 0 to 100"
    assert metric_fault(f"incoming.test.{key}", 1e12, 4, most) == fault
    assert metric_fault(f"incoming.test.{key}", 101, 4, most)
    assert metric_fault(f"incoming.val.{key}", 1, 4, most), "it has told of no such sample"


def test_counts_that_were_told_with_noise_may_be_exceeded_by_noise() -> None:
    facts = SiteFacts("a", "a", (2,), 4, {"train": [9] * 4, "test": [10, 20, 30, 40]}, {})
    private = CommonSettings(sample_clip_norm=1.0, noise_multiplier=3.0, statistics_noise=2.0)
    assert most_counted(facts, private) == {"train": 76, "test": 140}  # 10 * 2 * sqrt(4) more


def test_rounding_is_no_lie_and_half_a_codeword_is() -> None:
    assert metric_fault("incoming.test.accuracy", 1 + 1e-9, 2) is None
    assert metric_fault("incoming.test.entropy", math.log(2) + 1e-8, 2) is None
    assert "a whole number from 0" in str(metric_fault("new-codewords", 1.5, 2))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("head.weight", 1e6, ""),
        ("head.weight", -1.1e6, "beyond 1e+06"),
        ("norm.running_mean", -1e12, ""),
        ("norm.running_mean", 1.1e12, "beyond 1e+12"),
        ("norm.running_var", 0.0, ""),
        ("norm.running_var", -1e-6, "below 0, but a variance cannot be negative"),
        ("visitor/s1a/norm.running_var", -1.0, "below 0"),
        ("counts", 1e7, ""),
        ("counts", -1.0, "below 0, but a count cannot be negative"),
    ],
)
def test_an_array_holds_what_its_name_says(name: str, value: float, said: str) -> None:
    fault = array_fault(name, np.array([0.0, value], np.float32))
    assert said in str(fault or "")
    assert bool(fault) == bool(said)
    assert array_fault(name, np.zeros((0, 3), np.float32)) is None


Replies = Callable[..., Reply]
BEFORE = {"w": np.float32([1, 1]), "n.running_mean": np.float32([0])}


def _replies(site_reply: Replies, *values: Any, statistic: Any = (1, 1, 1)) -> dict[str, Reply]:
    return {
        site: site_reply(site, {"w": np.float32(value), "n.running_mean": np.float32([mean])})
        for site, value, mean in zip(("s1a", "s2a", "s3a"), values, statistic, strict=True)
    }


def test_a_site_far_beyond_the_median_is_named_with_its_norm(
    site_reply: Replies,
) -> None:
    replies = _replies(site_reply, [2, 1], [1, 3], [1, 2001])
    found = find_far_updates(100.0, dict.fromkeys(replies, BEFORE), replies)
    assert found == {
        "s3a": "the update of its weights has norm 2e+03, 1e+03 times the median, more than "
        "'server.max-update-norm' (100)"
    }
    statistics = _replies(site_reply, [2, 1], [1, 3], [1, 2], statistic=(1, 500, 2))
    found = find_far_updates(100.0, dict.fromkeys(statistics, BEFORE), statistics)
    assert found.keys() == {"s2a"}
    assert "update of its statistics has norm 500, 250 times" in found["s2a"]


@pytest.mark.parametrize(
    "values",
    [
        ([2, 1], [1, 3], [1, 101]),  # 100 times the least, not the median
        ([1, 1], [1, 1], [1, 2]),  # most have not moved: no median to measure by
    ],
)
def test_nobody_is_refused(values: Any, site_reply: Replies) -> None:
    replies = _replies(site_reply, *values)
    assert find_far_updates(100.0, dict.fromkeys(replies, BEFORE), replies) == {}


def test_of_two_sites_none_is_odd(site_reply: Replies) -> None:
    replies = _replies(site_reply, [2, 1], [1, 3], [1, 2001])
    del replies["s1a"]
    assert find_far_updates(100.0, dict.fromkeys(replies, BEFORE), replies) == {}


def test_statistics_are_norms_and_cosines_to_what_the_model_became(
    site_reply: Replies,
) -> None:
    replies = _replies(site_reply, [1, 4], [5, 1], [1, 1])
    after = BEFORE | {"w": np.float32([1, 3])}
    parts = update_statistics(dict.fromkeys(replies, BEFORE), after, replies)
    assert {site: part.norm for site, part in parts.items()} == {"s1a": 3, "s2a": 4, "s3a": 0}
    assert {site: part.cosine for site, part in parts.items()} == {"s1a": 1, "s2a": 0, "s3a": None}


def test_a_run_goes_on_without_a_site_that_is_far_out(
    started: Any, fake_app: Any, answering: Any, recorder: Any
) -> None:
    app = fake_app(answering(1.0), s2a=answering(5000.0))
    _, loop = started(app, min_sites=2, rounds=1)
    ((round_, phase, site, reason),) = recorder.failures
    assert (round_, phase, site) == (1, TRAIN, "s2a")
    assert "more than 'server.max-update-norm' (100)" in reason
    assert loop.state.arrays["w"].tolist() == [1, 1]
    with pytest.raises(SiteError, match="site s2a, round 1, phase train: the update of its"):
        started(app, rounds=1)
    _, held = started(app, max_update_norm=0.0, rounds=1)
    assert held.state.arrays["w"][0] > 1000


def test_a_robust_aggregation_needs_no_limit(started: Any, fake_app: Any, answering: Any) -> None:
    app = fake_app(answering(1.0), s2a=answering(5000.0))
    _, loop = started(app, max_update_norm=0.0, aggregation="median")
    assert loop.state.arrays["w"].tolist() == [1, 1]


def test_update_norm_is_of_all_named_arrays_together(site_reply: Replies) -> None:
    reply = site_reply("a", {"w": np.float32([4, 5]), "n.running_mean": np.float32([12])})
    assert update_norm(reply, BEFORE, ["w"]) == 5
    assert update_norm(reply, BEFORE, list(BEFORE)) == 13


def test_update_norm_is_computed_in_float64(site_reply: Replies) -> None:
    reply = site_reply("a", {"w": np.float32([1 + 2**-20])})
    assert update_norm(reply, {"w": np.float32([1])}, ["w"]) == 2**-20


def test_weights_and_running_statistics_are_apart() -> None:
    assert group_by_kind(BEFORE) == {"weights": ["w"], "statistics": ["n.running_mean"]}
    assert group_by_kind({}) == {}


def test_what_is_no_update_has_no_statistics(site_reply: Replies) -> None:
    replies = _replies(site_reply, [1, 4], [5, 1], [1, 1])
    assert update_statistics({}, BEFORE, replies) == {}
    assert find_far_updates(100.0, {}, replies) == {}
