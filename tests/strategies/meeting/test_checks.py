import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.core.site_facts import SiteFacts, Sums
from fedsilo.core.tasks import REGRESSION
from fedsilo.strategies.meeting import checks
from fedsilo.strategies.meeting.checks import (
    find_odd_sums,
    find_other_tasks,
    find_shared_data,
    find_unwanted_sums,
)

PLAIN = SiteFacts("", "D1", (2,), 2, {"train": [6, 4]}, {}, features=("age", "chol"))


def facts(**changes: dict[str, Any]) -> dict[str, SiteFacts]:
    return {site: dataclasses.replace(PLAIN, site=site, **said) for site, said in changes.items()}


def sums(*means: float, count: int = 10, spread: float = 1.0) -> Sums:
    """Return the sums of ``count`` values of each feature with these means."""
    mean = np.array(means)
    known = np.full(len(means), count)
    return Sums(known, mean * known, (mean**2 + spread**2) * known)


def test_all_who_hold_the_same_training_samples_are_left_out() -> None:
    said = facts(
        a={"fingerprints": {"train": "x"}},
        b={"fingerprints": {"train": "y"}},
        c={"fingerprints": {"train": "x"}},
        d={"fingerprints": {"train": "x"}, "label_counts": {"train": [0, 0]}},
        e={},
        f={},
    )
    refused = find_shared_data(said, pooled=False)
    assert refused.keys() == {"a", "c"}
    assert refused["a"] == refused["c"]
    assert refused["a"].startswith("sites a and c hold the same training samples")


def test_the_most_frequent_task_stands_and_of_equals_the_first_by_name() -> None:
    three = facts(a={"classes": 3}, b={}, c={})
    assert find_other_tasks(three, False).keys() == {"a"}
    assert find_other_tasks(three, False)["a"].startswith(
        "site a holds NetworkShape(input_shape=(2,), outputs=3)"
    )
    assert find_other_tasks(facts(b={}, a={"classes": 3}), False).keys() == {"b"}
    assert find_other_tasks(facts(a={}, b={"schema": "s"}, c={"backbone": "x"}), False).keys() == {
        "b",
        "c",
    }
    assert find_other_tasks({}, False) == {}


@pytest.mark.parametrize(
    ("liar", "left_out"),
    [
        (sums(50.0, 999 * 240.0), False),
        (sums(50.0, 1001 * 240.0), True),
        (sums(50.0, -1001 * 240.0), True),
        (sums(50.0, 240.0, spread=1001 * 240.0), True),
    ],
)
def test_a_feature_a_thousand_times_beyond_the_median_sites_is_odd(
    liar: Sums, left_out: bool
) -> None:
    said = facts(
        a={"sums": sums(50.0, 240.0)},
        b={"sums": sums(60.0, 200.0)},
        c={"sums": liar},
        d={"sums": sums(55.0, 240.0)},
        e={"sums": sums(55.0, 250.0)},
    )
    refused = find_odd_sums(said, pooled=True)
    assert refused.keys() == ({"c"} if left_out else set())
    assert all("' is more than 1000 times" in told for told in refused.values())


def test_of_two_sites_none_is_the_odd_one() -> None:
    said = facts(a={"sums": sums(1.0, 1.0)}, b={"sums": sums(1.0, 1e9)})
    assert find_odd_sums(said, pooled=True) == {}


def test_a_flag_that_most_sites_never_raise_and_a_value_nobody_knows_are_not_odd() -> None:
    never = sums(0.0, 50.0, spread=0.0)
    said = facts(a={"sums": never}, b={"sums": never}, c={"sums": sums(0.5, 50.0)})
    assert find_odd_sums(said, pooled=True) == {}
    unknown = dataclasses.replace(never, count=np.array([0, 10]))
    said = facts(a={"sums": unknown}, b={"sums": unknown}, c={"sums": sums(500.0, 50.0)})
    assert find_odd_sums(said, pooled=True) == {}


@pytest.mark.parametrize(("pooled", "left_out"), [(True, {"b"}), (False, {"a", "c"})])
def test_what_the_run_asks_for_says_whether_sums_or_silence_are_odd(
    pooled: bool, left_out: set[str]
) -> None:
    said = facts(a={"sums": sums(1.0, 1.0)}, b={}, c={"sums": sums(1.0, 1.0)})
    assert find_unwanted_sums(said, pooled).keys() == left_out
    assert find_unwanted_sums(facts(a={}, b={}), pooled) == {}


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (checks.check_texts, {"software": {str(number): "1" for number in range(11)}}),
        (checks.check_texts, {"schema": "a\nb"}),
        (checks.check_texts, {"features": ("a" * 201,)}),
        (checks.check_fingerprints, {"fingerprints": {"holdout": "a" * 64}}),
        (checks.check_fingerprints, {"fingerprints": {"train": "a"}}),
        (checks.check_inputs, {"input_shape": (2, 3)}),
        (checks.check_inputs, {"input_shape": (0,)}),
        (checks.check_inputs, {"input_shape": (2**20, 2**20, 3)}),
        (checks.check_inputs, {"input_shape": (3,)}),
        (checks.check_classes, {"classes": 1}),
        (checks.check_classes, {"classes": 10_001}),
        (checks.check_classes, {"class_names": ("a", "b", "c")}),
        (checks.check_counts, {"label_counts": {"holdout": [1, 1]}}),
        (checks.check_counts, {"label_counts": {"train": [10**12, 1]}}),
        (checks.check_counts, {"dropped": -1}),
        (checks.check_counts, {"floor": 0}),
    ],
)
def test_a_hello_with_an_impossible_fact_is_refused_by_its_check(
    check: Callable[[SiteFacts], str | None], change: dict[str, Any]
) -> None:
    assert check(PLAIN) is None
    fault = check(dataclasses.replace(PLAIN, **change))
    assert fault
    assert fault.isprintable()


def test_sites_of_another_task_are_left_out_and_many_sites_are_counted() -> None:
    said = facts(a={"task": REGRESSION}, b={}, c={})
    assert find_other_tasks(said, False).keys() == {"a"}
    many = {f"site{number}": {"fingerprints": {"train": "x"}} for number in range(6)}
    shared = find_shared_data(facts(**many), pooled=False)
    assert "site0, site1, site2 and 3 more hold" in shared["site0"]
