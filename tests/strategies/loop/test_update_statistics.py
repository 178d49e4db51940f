"""How far a reply is from what was sent, who is too far out, and what is said of each site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import TRAIN
from fedsilo.strategies.loop.update_statistics import (
    far_out,
    in_kinds,
    update_norm,
    update_statistics,
)
from fedsilo.strategies.wire.reply import Reply

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
    found = far_out(100.0, dict.fromkeys(replies, BEFORE), replies)
    assert found == {
        "s3a": "the update of its weights has norm 2e+03, 1e+03 times the median, more than "
        "'max-update-norm' (100)"
    }
    statistics = _replies(site_reply, [2, 1], [1, 3], [1, 2], statistic=(1, 500, 2))
    found = far_out(100.0, dict.fromkeys(statistics, BEFORE), statistics)
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
    assert far_out(100.0, dict.fromkeys(replies, BEFORE), replies) == {}


def test_of_two_sites_none_is_odd(site_reply: Replies) -> None:
    replies = _replies(site_reply, [2, 1], [1, 3], [1, 2001])
    del replies["s1a"]
    assert far_out(100.0, dict.fromkeys(replies, BEFORE), replies) == {}


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
    assert "more than 'max-update-norm' (100)" in reason
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
    assert in_kinds(BEFORE) == {"weights": ["w"], "statistics": ["n.running_mean"]}
    assert in_kinds({}) == {}


def test_what_is_no_update_has_no_statistics(site_reply: Replies) -> None:
    replies = _replies(site_reply, [1, 4], [5, 1], [1, 1])
    assert update_statistics({}, BEFORE, replies) == {}
    assert far_out(100.0, {}, replies) == {}
