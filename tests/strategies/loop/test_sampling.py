"""Which sites a round asks: as many as were asked for, by seed and round and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import EVALUATE, TRAIN
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.sampling import refuse_site_count, sampled_sites

SITES = [f"s{number}" for number in range(10)]


def test_all_are_asked_unless_some_are_asked_for() -> None:
    assert sampled_sites(CommonSettings(), SITES, 1) == SITES
    assert sampled_sites(CommonSettings(sites_per_round=10), SITES, 1) == SITES


@given(count=st.integers(1, 9), seed=st.integers(0, 99), round_=st.integers(1, 99))
def test_a_draw_depends_on_seed_and_round_alone(count: int, seed: int, round_: int) -> None:
    common = CommonSettings(sites_per_round=count, seed=seed)
    drawn = sampled_sites(common, SITES, round_)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == count
    assert drawn == sampled_sites(common, SITES[::-1], round_)


def test_over_rounds_each_site_has_its_share() -> None:
    common = CommonSettings(sites_per_round=3)
    drawn = [site for round_ in range(1000) for site in sampled_sites(common, SITES, round_)]
    assert all(abs(drawn.count(site) - 300) < 60 for site in SITES)
    assert sampled_sites(common, SITES, 1) != sampled_sites(common, SITES, 2)


def test_more_than_there_are_is_refused_in_a_line() -> None:
    refuse_site_count(CommonSettings(sites_per_round=3), 3)
    with pytest.raises(SettingError, match="'sites-per-round' is 4, more than there are sites"):
        refuse_site_count(CommonSettings(sites_per_round=4), 3)


def test_a_round_asks_those_that_are_drawn_and_the_end_asks_all(started: Any, told: Any) -> None:
    grid, _ = started(sites_per_round=2, rounds=3)
    asked: dict[tuple[int, str], list[int]] = {}
    for message in grid.sent:
        key = (told(message)["round"], told(message)["phase"])
        asked.setdefault(key, []).append(message.metadata.dst_node_id)
    common = CommonSettings(sites_per_round=2)
    for round_ in (1, 2, 3):
        drawn = sampled_sites(common, ["s1a", "s2a", "s3a"], round_)
        assert asked[round_, TRAIN] == [1000 + int(site[1]) for site in drawn]
    assert asked[4, EVALUATE] == [1001, 1002, 1003]
