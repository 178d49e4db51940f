from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import Context

from fedsilo.client_app.site.limits import NO_LIMITS, Limits, limits_of
from fedsilo.client_app.site.policy import _STRICTER, SiteFile
from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping, defaults

Node = Callable[..., Context]


def test_a_real_site_has_limits_without_a_word_of_its_own(context: Node) -> None:
    found = limits_of(context({"site": "s1a"}))
    assert found == Limits()
    assert (found.minimum_batch, found.minimum_measured, found.sums_min_count) == (8, 20, 10)


def test_a_simulated_site_has_none(context: Node) -> None:
    assert limits_of(context({"partition-id": 0})) == NO_LIMITS


@pytest.mark.parametrize("key", sorted(defaults(Limits)))
def test_only_the_hospitals_own_words_change_them(context: Node, key: str) -> None:
    node = context({"site": "s1a", key: 7})
    node.run_config[key] = 1
    assert as_mapping(limits_of(node))[key] == 7


def test_measurements_of_few_stay() -> None:
    metrics = {"incoming.val.accuracy": 0.5, "incoming.test.loss": 1.5, "new-codewords": 4.0}
    sizes = {"val": 10, "test": 50}
    assert Limits().drop_small_splits(metrics, sizes).keys() == metrics.keys() - {
        "incoming.val.accuracy"
    }
    assert Limits(minimum_measured=10).drop_small_splits(metrics, sizes) == metrics
    assert Limits(minimum_measured=1).drop_small_splits(metrics, {}) == {"new-codewords": 4.0}


def test_of_a_file_and_a_node_config_the_stricter_is_known_for_each() -> None:
    of_a_file_alone = {"site", "max-rounds", "app", "secure-aggregation", "audit-log", "given"}
    of_a_file_alone |= {"methods", "datasets", "records", "refused-records"}
    assert as_mapping(SiteFile()).keys() - of_a_file_alone == _STRICTER.keys()
    lower, higher = ("max-state", 3, 5), ("minimum-measured", 5, 3)
    for key, stricter, other in (lower, higher, ("max-memory", 3, 0), ("allow-folds", False, True)):
        assert _STRICTER[key](stricter, other) == _STRICTER[key](other, stricter) == stricter


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("max-messages", 0, "'max-messages' must be at least 1, but is 0"),
        ("minimum-batch", 0, "'minimum-batch' must be at least 1, but is 0"),
        ("max-seconds", 0.0, "'max-seconds' must be above 0, but is 0.0"),
        ("minimum-measured", "all", "'minimum-measured' must be a whole number"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(context: Node, key: str, value: Any, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        limits_of(context({"site": "s1a", key: value}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 7}, "'train.batch-size' is 7, but this hospital requires at least 8"),
        ({"micro_batch": 2}, "'train.micro-batch' is 2, but this hospital requires at least 8"),
        ({"rounds": 100}, "100 rounds, but only 100 messages"),
        ({"rounds": 20, "secure_aggregation": "secagg"}, "20 rounds of 5 messages, but only 100"),
    ],
)
def test_settings_below_a_floor_are_refused_before_any_work(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(RefusedError, match=said):
        Limits().refuse_settings(CommonSettings(**settings))
    Limits(minimum_batch=2, max_messages=1000).refuse_settings(CommonSettings(**settings))
