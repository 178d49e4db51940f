"""Robust aggregation: by hand, and against what a few bad sites can do to it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.methods import METHODS
from fedsilo.core.settings.common_settings import AGGREGATIONS, CommonSettings
from fedsilo.strategies.loop.ask import weighted_mean
from fedsilo.strategies.loop.robust import chosen_by_krum, fewest_sites, robust_mean
from fedsilo.strategies.loop.round_loop import refuse_site_count
from fedsilo.strategies.methods.registry import strategy_class
from fedsilo.strategies.wire.reply import Reply

Replies = Callable[..., Reply]
ROBUST = [name for name in AGGREGATIONS if name != "mean"]


def _of(site_reply: Replies, *values: Any, counts: Any = None) -> dict[str, Reply]:
    weights = counts or [10] * len(values)
    return {
        f"s{place}": site_reply(f"s{place}", {"w": np.float32(value)}, num_examples=count)
        for place, (value, count) in enumerate(zip(values, weights, strict=True))
    }


def _mean(replies: Mapping[str, Reply], before: Any, **common: Any) -> list[float]:
    settings = CommonSettings(**common)
    mean = robust_mean(settings, replies, {"w": np.float32(before)})["w"]
    assert mean.dtype == np.float32
    return [float(value) for value in mean.ravel()]


def test_the_median_is_of_each_number_and_no_site_weighs_more(site_reply: Replies) -> None:
    replies = _of(site_reply, [1, 9], [2, 8], [900, -7], counts=[1, 1, 10_000])
    assert _mean(replies, [0, 0], aggregation="median") == [2, 8]


def test_the_trimmed_mean_drops_f_at_each_end(site_reply: Replies) -> None:
    replies = _of(site_reply, [1], [2], [3], [-50], [10])
    assert _mean(replies, [0], aggregation="trimmed") == [2]


@pytest.mark.parametrize("seed", [1, 2, 3, 7])
def test_of_three_sites_the_trimmed_mean_is_the_median(seed: int, site_reply: Replies) -> None:
    values = np.random.default_rng(seed).normal(size=(3, 4))
    replies = _of(site_reply, *values)
    trimmed = _mean(replies, np.zeros(4), aggregation="trimmed")
    assert trimmed == _mean(replies, np.zeros(4), aggregation="median")


def test_updates_longer_than_the_median_are_cut_to_it(site_reply: Replies) -> None:
    # From [1, 1]: updates of length 2, 4 and 400, so that the last two count as length 4
    replies = _of(site_reply, [3, 1], [1, 5], [401, 1], counts=[2, 1, 1])
    clipped = _mean(replies, [1, 1], aggregation="norm-clip")
    assert clipped == pytest.approx([1 + 0.5 * 2 + 0.25 * 4, 1 + 0.25 * 4])


def test_statistics_are_cut_by_their_own_norm(site_reply: Replies) -> None:
    replies = {
        site: site_reply(site, {"w": np.float32([w]), "n.running_var": np.float32([variance])})
        for site, w, variance in (("a", 1, 1000), ("b", 1, 1000), ("c", 100, 1000))
    }
    before = {"w": np.float32([0]), "n.running_var": np.float32([0])}
    mean = robust_mean(CommonSettings(aggregation="norm-clip"), replies, before)
    assert mean["w"] == pytest.approx([1])
    assert mean["n.running_var"] == pytest.approx([1000])


def test_krum_leaves_out_the_f_sites_that_are_farthest(site_reply: Replies) -> None:
    replies = _of(site_reply, [1.0], [1.1], [1.2], [1.05], [50.0], counts=[1, 1, 1, 1, 1000])
    before = {"w": np.float32([0])}
    assert chosen_by_krum(replies, before, 1) == ["s0", "s1", "s2", "s3"]
    assert _mean(replies, [0], aggregation="multikrum") == pytest.approx([1.0875])


def test_krum_adds_up_distances_over_arrays(site_reply: Replies) -> None:
    # s4 is odd in no array alone by more than another, and in both together by most
    values = [([0.0], [0.0])] * 3 + [([3.0], [0.0])] + [([2.5], [2.5])] + [([0.1], [0.0])]
    replies = {
        f"s{n}": site_reply(f"s{n}", {"a": np.float32(a), "b": np.float32(b)})
        for n, (a, b) in enumerate(values)
    }
    before = {"a": np.float32([0]), "b": np.float32([0])}
    assert "s4" not in chosen_by_krum(replies, before, 1)


@pytest.mark.parametrize("aggregation", ROBUST)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([-1000.0, 1000.0, 1e5]))
def test_one_bad_site_of_six_moves_no_number_beyond_the_honest_ones(
    aggregation: str, seed: int, scale: float
) -> None:
    honest = np.random.default_rng(seed).normal(1, 0.1, (5, 3)).astype(np.float32)
    sent = [*honest, np.full(3, scale, np.float32)]
    replies = {f"s{n}": Reply(f"s{n}", {"w": array}) for n, array in enumerate(sent)}
    mean = np.array(_mean(replies, np.zeros(3), aggregation=aggregation))
    # Norm-clip bounds how far one site moves the mean, and not in which direction
    slack = np.linalg.norm(honest, axis=1).max() / 2 if aggregation == "norm-clip" else 1e-6
    assert (mean >= honest.min(axis=0) - slack).all()
    assert (mean <= honest.max(axis=0) + slack).all()
    assert abs(weighted_mean(replies, ["w"])["w"]).max() > 100


@pytest.mark.parametrize(("aggregation", "needed"), [("trimmed", 3), ("multikrum", 5)])
def test_too_few_sites_are_told_in_a_line_before_and_during_a_run(
    aggregation: str, needed: int, site_reply: Replies
) -> None:
    common = CommonSettings(aggregation=aggregation)
    assert fewest_sites(common) == needed
    refuse_site_count(common, needed)
    told = f"'{aggregation}' needs at least {needed} sites, but there"
    with pytest.raises(SettingError, match=f"{told} are {needed - 1}"):
        refuse_site_count(common, needed - 1)
    replies = _of(site_reply, *([[1.0]] * (needed - 1)))
    with pytest.raises(SiteError, match=told):
        robust_mean(common, replies, {"w": np.float32([0])})


def test_a_draw_of_too_few_is_refused_too() -> None:
    common = CommonSettings(aggregation="multikrum", sites_per_round=4)
    with pytest.raises(SettingError, match="needs at least 5 sites, but there are 4"):
        refuse_site_count(common, 100)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_an_aggregation_or_refuses_it_in_a_line(method: str) -> None:
    takes = strategy_class(method).capabilities
    for aggregation in AGGREGATIONS:
        common = CommonSettings(method=method, aggregation=aggregation)
        if aggregation in takes.aggregations:
            takes.refuse_more(common, is_table=False)
        else:
            with pytest.raises(
                SettingError, match=f"does not take 'server.aggregation' '{aggregation}'"
            ):
                takes.refuse_more(common, is_table=False)


def test_only_methods_whose_rounds_can_do_without_a_site_may_ask_some() -> None:
    some = {name for name in METHODS if strategy_class(name).capabilities.some_sites}
    assert some == {
        *("fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "moon"),
        *("scaffold", "fednova", "feddyn", "fedswa", "cyclic", "ditto", "apfl"),
    }
    for name in METHODS:
        common = CommonSettings(method=name, sites_per_round=2)
        if name not in some:
            with pytest.raises(SettingError, match=r"set 'server.sites-per-round' to 0"):
                strategy_class(name).capabilities.refuse_more(common, is_table=False)
