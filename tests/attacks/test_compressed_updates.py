"""A hospital abuses updates in fewer bytes: each is judged by the numbers that it opens to.

A few numbers make an update as long as one likes, in as many bytes as an honest one.
"""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, RecordDict

from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import ARRAYS
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.wire.compressed import from_bf16, to_bf16

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


def multiplied(data: bytes, times: float = 1000) -> bytes:
    """Return a bf16 update so many times as long."""
    values = from_bf16(np.frombuffer(data, "<u2")) * np.float32(times)
    return to_bf16(values).tobytes()


def of_one_large_entry(data: bytes) -> bytes:
    """Return a bf16 update whose last number is 300."""
    return data[:-2] + to_bf16(np.array([300], np.float32)).tobytes()


WAYS: dict[str, Callable[[bytes], bytes]] = {
    "all numbers": multiplied,
    "one number": of_one_large_entry,
}
BF16: dict[str, Value] = {"server.wire-precision": "bf16"}


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
    values = tiny("fedavg", rounds=1, min_sites=2) | BF16
    lying(in_updates(WAYS[name]))
    directory = inline_run(values)
    (failure,) = directory.read_json("summary.json")["failures"]
    assert (failure["round"], failure["phase"], failure["site"]) == (1, "train", LIAR)
    assert "the update of its weights has norm" in failure["reason"]
    assert "times the median, more than 'server.max-update-norm' (100)" in failure["reason"]
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
    lying(in_updates(WAYS[name]))
    refused = weights(inline_run(tiny("fedavg", rounds=1, min_sites=2) | BF16))
    values = tiny("fedavg", rounds=1, max_update_norm=0.0) | BF16
    directory = inline_run(values, out=tmp_path / "any")
    assert directory.read_json("summary.json")["failures"] == []
    found = norms(directory)
    assert found[LIAR] > 100 * found["s1a"]
    moved = [np.square(a - refused[n]).sum() for n, a in weights(directory).items()]
    assert np.sqrt(sum(moved)) > 10 * found["s1a"], "a third of it is in the mean"


def test_an_update_of_twice_the_length_is_allowed(
    tiny: Tiny, inline_run: InlineRun, lying: Lying, tmp_path: Path
) -> None:
    values = tiny("fedavg", rounds=1) | BF16
    honest = norms(inline_run(values, out=tmp_path / "honest"))
    lying(in_updates(lambda data: multiplied(data, 2)))
    found = norms(inline_run(values))
    assert found[LIAR] == pytest.approx(2 * honest[LIAR], rel=1e-5)
    assert found["s1a"] == honest["s1a"]


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (
            BF16,
            "the updates of weights are rounded to bf16 ('server.wire-precision'), which gives no "
            "privacy",
        ),
        ({"server.wire-down": "bf16"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_privacy_json_says_that_fewer_bytes_hide_nothing(
    wire: dict[str, Value], said: str | None, tiny: Tiny, inline_run: InlineRun
) -> None:
    document = inline_run(tiny("scaffold", rounds=1) | wire).read_json("privacy.json")
    told = [one for one in document["leaves each site"] if "rounded" in one]
    assert told == ([said] if said else [])
    assert document["epsilon"] == "none"
