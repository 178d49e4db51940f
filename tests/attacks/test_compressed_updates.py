"""A hospital abuses the room that updates in fewer bytes leave: it is judged by what they open to.

A scale or a single entry makes an update as long as one likes, in as many bytes as an honest one.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, RecordDict

from fedsilo.datasets.io.state_files import load_state
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.studies.report.flows import sentences

LIAR = "s3a"
Alter = Callable[[RecordDict], None]
Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]
Lying = Callable[..., None]


def in_updates(change: Callable[[bytes], bytes]) -> Alter:
    """Return what changes the bytes of all updates of a reply, but not how many they are."""

    def alter(content: RecordDict) -> None:
        record = content.array_records.get(ARRAYS, {})
        for name in [name for name in record if record[name].dtype == "uint8"]:
            before = record[name].numpy().tobytes()
            after = change(before)
            assert len(after) == len(before)
            record[name] = Array(np.frombuffer(after, np.uint8))

    return alter


def of_a_larger_scale(data: bytes, times: float = 1000) -> bytes:
    """Return an int8 update so many times as long: its scale is the first number."""
    return (np.frombuffer(data, "<f4", 1) * np.float32(times)).tobytes() + data[4:]


def of_one_large_entry(data: bytes) -> bytes:
    """Return an update of which the last of the float32 that are sent is 1,000."""
    return data[:-4] + np.float32(1000).tobytes()


WAYS: dict[str, tuple[dict[str, Value], Callable[[bytes], bytes]]] = {
    "scale": ({"wire-precision": "int8"}, of_a_larger_scale),
    "scale of a tenth": ({"wire-precision": "int8", "wire-top-k": 0.1}, of_a_larger_scale),
    "one entry of a hundredth": ({"wire-top-k": 0.01}, of_one_large_entry),
}


def weights(directory: RunDirectory) -> dict[str, Any]:
    return load_state(directory.path / "model.safetensors")[0]


def norms(directory: RunDirectory) -> dict[str, float]:
    """Return the norm of each site's update in round 1, as the run has recorded it."""
    with (directory.path / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "norm"]
    return {row["site"]: float(row["value"]) for row in rows if row["round"] == "1"}


@pytest.mark.parametrize("name", WAYS)
def test_an_update_that_opens_far_above_the_limit_is_refused_and_the_others_averaged(
    name: str, tiny: Tiny, inline_run: InlineRun, lying: Lying
) -> None:
    wire, change = WAYS[name]
    values = tiny("fedavg", rounds=1, min_sites=2) | wire
    lying(in_updates(change))
    directory = inline_run(values)
    (failure,) = directory.read_json("summary.json")["failures"]
    assert (failure["round"], failure["phase"], failure["site"]) == (1, "train", LIAR)
    assert "the update of its weights has norm" in failure["reason"]
    assert "times the median, more than 'max-update-norm' (100)" in failure["reason"]
    assert set(norms(directory)) == {"s1a", "s2a"}
    # As if it had not answered at all
    lying(lambda content: content.array_records.pop(ARRAYS, None))
    without = inline_run(values, out=directory.path.parent / "without")
    for array, other in zip(weights(directory).values(), weights(without).values(), strict=True):
        np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("name", WAYS)
def test_without_a_limit_the_same_update_moves_the_mean(
    name: str, tiny: Tiny, inline_run: InlineRun, lying: Lying, tmp_path: Path
) -> None:
    """It is a usable reply: nothing but the limit is in its way."""
    wire, change = WAYS[name]
    lying(in_updates(change))
    refused = weights(inline_run(tiny("fedavg", rounds=1, min_sites=2) | wire))
    values = tiny("fedavg", rounds=1, max_update_norm=0.0) | wire
    directory = inline_run(values, out=tmp_path / "any")
    assert directory.read_json("summary.json")["failures"] == []
    found = norms(directory)
    assert found[LIAR] > 100 * found["s1a"]
    moved = [np.square(a - refused[n]).sum() for n, a in weights(directory).items()]
    assert np.sqrt(sum(moved)) > 10 * found["s1a"], "a third of it is in the mean"


def test_an_update_of_twice_the_scale_is_twice_as_long_and_allowed(
    tiny: Tiny, inline_run: InlineRun, lying: Lying, tmp_path: Path
) -> None:
    values = tiny("fedavg", rounds=1) | {"wire-precision": "int8"}
    honest = norms(inline_run(values, out=tmp_path / "honest"))
    lying(in_updates(lambda data: of_a_larger_scale(data, 2)))
    found = norms(inline_run(values))
    assert found[LIAR] == pytest.approx(2 * honest[LIAR], rel=1e-5)
    assert found["s1a"] == honest["s1a"]


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (
            {"wire-precision": "int8"},
            "of weights the updates, in fewer bytes ('wire-precision' int8, 'wire-top-k' 1), which "
            "gives no privacy; rounding promises nothing",
        ),
        (
            {"wire-top-k": 0.1},
            "of weights the updates, in fewer bytes ('wire-precision' fp32, 'wire-top-k' 0.1), "
            "which gives no privacy; which entries are sent reveals which the site's patients "
            "moved most; what is left out follows later",
        ),
        ({"wire-down": "bf16"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_privacy_json_says_that_fewer_bytes_hide_nothing(
    wire: dict[str, Value], said: str | None, tiny: Tiny, inline_run: InlineRun
) -> None:
    document = inline_run(tiny("scaffold", rounds=1) | wire).read_json("privacy.json")
    told = [one for one in document["leaves each site"] if "fewer bytes" in one]
    assert told == ([said] if said else [])
    assert document["epsilon"] == "none"
    shown = sentences("server", document["leaves each site"])["What this method sends"]
    moved = "Which entries are sent reveals which the site's patients moved most."
    assert (moved in shown) == ("wire-top-k" in wire)
