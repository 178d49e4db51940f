from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Context

from fedsilo.client_app.site.identity import own_name, site_settings
from fedsilo.core.errors import SettingError
from tests.support.errors import refuses

Node = Callable[..., Context]


def test_the_hospitals_own_folders_and_device_win(
    context: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_CACHE", raising=False)
    node = context(
        {
            "site": "s1a",
            "data-dir": "/mine",
            "device": "cuda:1",
            "seed": 99,
            "state-dir": "/own",
            "trust": "server",
        },
        data_dir="/theirs",
        cache_dir="/their-cache",
    )
    settings = site_settings(node)
    assert settings.data_dir == "/mine"
    assert settings.device == "cuda:1"
    assert settings.cache_dir == "/own/.own/cache"
    assert settings.seed == 7  # what belongs to the result is the run's alone


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ({"site": "anyone"}, "anyone"),
        ({"partition-id": 1}, "s2a"),
        ({"partition-id": 7}, "partition 7"),
        ({"partition-id": 1, "device": 4}, "s2a"),
        ({"partition-id": 1, "sums-min-count": "many"}, "partition 1"),
        ({}, "partition unknown"),
    ],
    ids=str,
)
def test_a_site_in_an_error_is_named_as_well_as_it_is_known(
    context: Node, node: dict[str, Any], name: str
) -> None:
    assert own_name(context(node)) == name


@pytest.mark.parametrize(("own", "floor"), [(20, 20), (10, 10), (3, 10), (1, 10)])
def test_a_hospital_can_raise_the_floor_of_its_sums_and_never_lower_it(
    context: Node, own: int, floor: int
) -> None:
    assert site_settings(context({"site": "s1a"})).sums_min_count == 10
    node = context({"site": "s1a", "sums-min-count": own, "device": "cuda:1"})
    assert (site_settings(node).sums_min_count, site_settings(node).device) == (floor, "cuda:1")


@pytest.mark.parametrize("own", ["20", 0, True])
def test_a_floor_that_is_no_count_is_refused_and_not_passed_over(context: Node, own: Any) -> None:
    with refuses(SettingError, "sums-min-count", "1"):
        site_settings(context({"site": "s1a", "sums-min-count": own}))
