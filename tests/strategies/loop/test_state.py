from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from fedsilo.models.contract.messages import CONFIG, Instruction
from fedsilo.strategies.loop.state import SiteReply
from fedsilo.strategies.wire.bundles import record_bytes
from fedsilo.strategies.wire.records import from_record, to_record


def test_arrays_come_back_from_the_wire_as_they_went() -> None:
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"b": wide, "a": wide[:, ::2], "empty": np.zeros((0, 5), np.float32)}
    back = from_record(to_record(arrays))
    assert list(back) == ["a", "b", "empty"]
    for name, array in arrays.items():
        assert back[name].dtype == np.float32
        np.testing.assert_array_equal(back[name], array)


def test_equal_arrays_are_equal_bytes_whatever_the_order_of_their_names() -> None:
    one, two = np.float32([1, 2]), np.float32([[3]])
    first, second = to_record({"x": one, "y": two}), to_record({"y": two, "x": one})
    assert [(n, a.data) for n, a in first.items()] == [(n, a.data) for n, a in second.items()]


def test_a_scalar_parameter_keeps_its_shape_on_the_wire() -> None:
    assert from_record(to_record({"scale": np.asarray(2.0, np.float32)}))["scale"].shape == ()


def test_a_message_weighs_what_its_records_weigh(content: Callable[..., RecordDict]) -> None:
    bare = record_bytes(content())
    small = record_bytes(content({"w": np.zeros(10, np.float32)}))
    large = record_bytes(content({"w": np.zeros(1010, np.float32)}))
    assert bare < small
    assert large - small == pytest.approx(4000, abs=8)


def test_an_instruction_without_a_run_directory_can_be_weighed() -> None:
    config = ConfigRecord(dict(Instruction(1, "train", run_name="run", run_dir="").to_config()))
    assert record_bytes(RecordDict({CONFIG: config})) > 0


def test_a_reply_is_read_by_name(site_reply: Callable[..., SiteReply]) -> None:
    reply = site_reply("s1a", {"w": np.float32([5])}, num_examples=36, loss=0.25)
    assert reply.examples() == 36
    assert reply.metric("loss") == 0.25
    assert reply.metrics() == {
        "num-examples": 36.0,
        "seconds": 0.5,
        "peak-memory-bytes": 1000.0,
        "loss": 0.25,
    }
    assert reply.array("w") == 5


@pytest.mark.parametrize(("told", "kept"), [(1, True), (0, False), (None, False)])
def test_a_reply_says_whether_its_site_keeps_state(
    site_reply: Callable[..., SiteReply], told: int | None, kept: bool
) -> None:
    assert site_reply("s1a", kept_state=told).kept_state() is kept
