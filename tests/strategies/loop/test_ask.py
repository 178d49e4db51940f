from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.core.messages import ARRAYS, METRICS, NUM_EXAMPLES
from fedsilo.strategies.loop.ask import Ask, first_question, weighted_mean
from fedsilo.strategies.wire.reply import Reply

Replies = Callable[..., Reply]


def test_counts_one_and_three_weigh_a_quarter_and_three_quarters(site_reply: Replies) -> None:
    replies = {
        "a": site_reply("a", {"w": np.float32([0, 4])}, num_examples=1),
        "b": site_reply("b", {"w": np.float32([4, 8])}, num_examples=3),
    }
    mean = weighted_mean(replies, ["w"])
    np.testing.assert_array_equal(mean["w"], np.float32([3, 7]))
    assert mean["w"].dtype == np.float32


def test_the_mean_is_that_of_float64_arithmetic(site_reply: Replies) -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.normal(1000, 1, (4, 5)).astype(np.float32) for _ in range(7)]
    counts = [3, 1, 900, 12, 7, 55, 21]
    replies = {
        f"s{i}": site_reply(f"s{i}", {"w": array}, num_examples=count)
        for i, (array, count) in enumerate(zip(arrays, counts, strict=True))
    }
    wide = np.average(np.stack(arrays).astype(np.float64), axis=0, weights=counts)
    np.testing.assert_array_max_ulp(weighted_mean(replies, ["w"])["w"], wide.astype(np.float32), 1)


def test_small_numbers_beside_large_ones_are_not_lost(site_reply: Replies) -> None:
    values = {"a": 1e8, "b": 1.0, "c": -1e8}  # float32 would add up to 0
    replies = {site: site_reply(site, {"w": np.float32([v])}) for site, v in values.items()}
    np.testing.assert_allclose(weighted_mean(replies, ["w"])["w"], [1 / 3], rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(6)))
def test_the_order_of_replies_does_not_change_a_bit(order: list[int]) -> None:
    # Large numbers that cancel: even in float64 another order gives another sum.
    arrays = [np.full(3, value, np.float32) for value in (1e20, -1e20, 1, 3, 1e19, -1e19)]

    def reply(index: int) -> Reply:
        return Reply(f"s{index}", {"w": arrays[index]}, examples=1 + index // 2)

    sorted_ = weighted_mean({f"s{i}": reply(i) for i in range(6)}, ["w"])["w"]
    shuffled = weighted_mean({f"s{i}": reply(i) for i in order}, ["w"])["w"]
    assert sorted_.tobytes() == shuffled.tobytes()


def test_a_count_of_n_is_n_copies_of_the_site(site_reply: Replies) -> None:
    low, high = np.float32([1, 2]), np.float32([7, 5])
    counted = {
        "a": site_reply("a", {"w": low}, num_examples=2),
        "b": site_reply("b", {"w": high}, num_examples=4),
    }
    copies = {
        f"c{i}": site_reply(f"c{i}", {"w": array}, num_examples=1)
        for i, array in enumerate([low] * 2 + [high] * 4)
    }
    np.testing.assert_allclose(
        weighted_mean(counted, ["w"])["w"], weighted_mean(copies, ["w"])["w"], rtol=1e-6
    )


def test_integer_arrays_are_not_averaged_in_integers(site_reply: Replies) -> None:
    replies = {
        "a": site_reply("a", {"w": np.int32([1, 2])}),
        "b": site_reply("b", {"w": np.int32([2, 2])}),
    }
    np.testing.assert_array_equal(weighted_mean(replies, ["w"])["w"], np.float32([1.5, 2]))


def test_only_the_named_arrays_are_averaged_and_they_come_sorted(site_reply: Replies) -> None:
    arrays = {"b": np.float32([1]), "a": np.float32([2]), "c": np.float32([3])}
    mean = weighted_mean({"x": site_reply("x", arrays)}, ["b", "a"])
    assert list(mean) == ["a", "b"]
    assert mean["a"] == 2
    assert mean["b"] == 1


def test_averaging_leaves_the_replies_as_they_came(site_reply: Replies) -> None:
    first, second = np.float32([1, 2]), np.float32([5, 6])
    replies = {"a": site_reply("a", {"w": first}), "b": site_reply("b", {"w": second})}
    weighted_mean(replies, ["w"])
    np.testing.assert_array_equal(replies["a"].arrays["w"], np.float32([1, 2]))
    np.testing.assert_array_equal(replies["b"].arrays["w"], np.float32([5, 6]))


def test_the_bits_are_those_of_flowers_own_function(site_reply: Replies) -> None:
    rng = np.random.default_rng(2)
    counts = [3, 1, 900, 12, 7]
    arrays = [rng.normal(size=(3, 4)).astype(np.float32) for _ in counts]
    replies = {
        f"s{i}": site_reply(f"s{i}", {"w": array, "b": array[0, 0]}, num_examples=count)
        for i, (array, count) in enumerate(zip(arrays, counts, strict=True))
    }
    records = [
        RecordDict(
            {
                ARRAYS: ArrayRecord(
                    {name: Array(reply.arrays[name].astype(np.float64)) for name in ("b", "w")}
                ),
                METRICS: MetricRecord({NUM_EXAMPLES: reply.examples}),
            }
        )
        for reply in replies.values()
    ]
    flowers = aggregate_arrayrecords(records, NUM_EXAMPLES)
    for name, mean in weighted_mean(replies, ["w", "b"]).items():
        assert mean.shape == flowers[name].numpy().shape
        assert mean.tobytes() == flowers[name].numpy().astype(np.float32).tobytes()


def test_notes_that_no_site_would_get_are_refused() -> None:
    def asks(ask: Ask) -> object:
        return ask("train", {"a": {}}, expect={}, notes={"warm": True})  # type: ignore[dict-item]

    with pytest.raises(TypeError, match="train: 'notes' must be a Notes, or one per site"):
        first_question(asks, ["a"])
