from __future__ import annotations

import numpy as np
import pytest

from fedsilo.datasets.registry import DATA_SETS, data_set
from fedsilo.datasets.synthetic.phantom import PhantomDataSet, Plan, even_sequence

PLAN = Plan("a-phantom", {"one": (6, 3), "two": (3, 6)}, subject="lesion", again=0.3)


@pytest.mark.parametrize("site", PLAN.counts)
def test_a_sequence_holds_the_counts_and_every_beginning_nearly_their_proportions(
    site: str,
) -> None:
    kinds = np.array(PLAN.sequence(site)[0])
    assert np.bincount(kinds).tolist() == list(PLAN.counts[site])
    share = PLAN.counts[site][0] / 9
    for length in range(1, 10):
        assert abs((kinds[:length] == 0).sum() - share * length) <= 1.5


def test_a_sequence_is_the_same_each_time_and_a_name_and_a_sites_own() -> None:
    many = {"one": (500, 500), "two": (500, 500)}
    plan, equal, other = (Plan(name, many, "lesion", 0.3) for name in ("a", "a", "b"))
    assert plan.sequence("one") == equal.sequence("one")
    assert len({plan.sequence("one"), plan.sequence("two"), other.sequence("one")}) == 3


def test_without_repeats_each_image_shows_another_subject() -> None:
    assert even_sequence((2, 2), 0.0, np.random.default_rng(0))[1] == (0, 1, 2, 3)


def test_every_phantom_is_named_as_in_the_registry() -> None:
    phantoms = [data for data in map(data_set, DATA_SETS) if isinstance(data, PhantomDataSet)]
    assert {data.name for data in phantoms} == {n for n in DATA_SETS if n.endswith("-phantom")}
    assert all(data.plan.phantom == data.name for data in phantoms)
