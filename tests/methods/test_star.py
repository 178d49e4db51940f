"""Star: FedAvg with the same weight for each silo, and no silo sees another's model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsilo.models.methods.decentralised import MODEL
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.methods import Tiny, arrays_of


def test_silos_get_the_mean_of_all_in_each_round_and_nothing_else(
    spied_run: Callable[..., Any], tiny: Tiny
) -> None:
    grid, strategy = spied_run(tiny("star", rounds=2))
    first, second = grid.sent[3:6], grid.sent[6:9]
    replies = [arrays_of(reply.content) for reply in grid.replies[3:6]]
    assert all(name.startswith(MODEL) for message in first for name in arrays_of(message.content))
    for message in second:
        for name, array in arrays_of(message.content).items():
            own = [reply[name.removeprefix(MODEL)].astype(np.float64) for reply in replies]
            assert array == pytest.approx(np.mean(own, axis=0), abs=1e-7)
    assert not any(name.startswith("silo/") for name in strategy.state.arrays)


def test_with_silos_of_one_size_it_is_fedavg_to_the_bit(
    tiny: Tiny, inline_run: Callable[..., RunDirectory]
) -> None:
    star, fedavg = (
        inline_run(tiny(method) | {"run.name": method}) for method in ("star", "fedavg")
    )
    ours, theirs = (load_file(run.path / "model.safetensors") for run in (star, fedavg))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    document = star.read_json("topology.json")
    assert document["kind"] == "star"
    assert document["mixing"] == [[1 / 3] * 3] * 3
    assert len(document["edges"]) == 4, "to the server and back, over one silo's place"
