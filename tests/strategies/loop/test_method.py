import json
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from fedsilo.core.errors import CheckpointError
from fedsilo.core.messages import CONFIG, Instruction, state_key
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.methods.personal_models import PersonalState
from fedsilo.strategies.wire.records import from_record, record_bytes, to_record


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


def test_a_state_becomes_facts_and_arrays_and_is_restored() -> None:
    arrays = {"w": np.float32([1])}
    state = PersonalState(arrays, 3, {"s1a": 300}, ["s2a"])
    facts = json.loads(json.dumps(state.facts()))
    assert facts == {"round": 3, "extras": {"personal": ["s2a"]}, "keepers": {"s1a": 300}}
    assert PersonalState.restored(arrays, facts).kept == {"s1a": state_key(3, 0)}, "an older run's"
    found = PersonalState.restored(arrays, facts)
    assert (found.round, found.stateful_sites, found.personal) == (3, ("s1a",), ["s2a"])
    assert found.arrays is arrays


def test_a_state_of_another_version_is_refused_in_one_line() -> None:
    facts = PersonalState({}).facts()
    with pytest.raises(CheckpointError, match=r"^the stored state has .*start a new run$"):
        State.restored({}, facts)
    with pytest.raises(CheckpointError, match="made by another version"):
        PersonalState.restored({}, State().facts())
