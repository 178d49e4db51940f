"""A site's round, whatever the method: what it measures, when, and what leaves by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsilo.client_app.methods.base import Answer, MeasuredModel, SiteMethod
from fedsilo.client_app.site_round import SiteRound, peak_memory_bytes
from fedsilo.client_app.training.compute import choose_compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import (
    ARRAYS,
    DP_RELEASES,
    KEPT_STATE,
    METRICS,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SECONDS,
    Instruction,
)
from fedsilo.models.networks.site_network import SiteNetwork

Opened = Callable[..., SiteMethod]
ALWAYS = {NUM_EXAMPLES, SECONDS, PEAK_MEMORY, KEPT_STATE}


def test_training_leaves_the_message_as_it_came(opened: Opened, weights: dict[str, Any]) -> None:
    method = opened("fedavg", weights)
    reply = SiteRound(method).answer()
    for name, array in weights.items():
        came = method.request.content[ARRAYS][name].numpy()
        np.testing.assert_array_equal(came, array)
    assert not np.array_equal(reply[ARRAYS]["head.1.weight"].numpy(), weights["head.1.weight"])


def test_arrays_leave_sorted_and_in_float32(opened: Opened) -> None:
    arrays = {"b": torch.ones(2, dtype=torch.bfloat16), "a": torch.ones(3, 2, dtype=torch.double).T}
    reply = SiteRound(opened("fedavg")).reply({}, arrays)
    assert list(reply[ARRAYS]) == ["a", "b"]
    assert {array.dtype for array in reply[ARRAYS].values()} == {"float32"}
    assert reply[ARRAYS]["a"].numpy().shape == (2, 3)


def test_every_reply_tells_examples_time_and_memory(opened: Opened) -> None:
    metrics = SiteRound(opened("fedavg")).reply({"x": 0.5})[METRICS]
    assert set(metrics) == {"x", *ALWAYS}
    assert metrics[NUM_EXAMPLES] == 36
    assert 0 < float(str(metrics[SECONDS])) < 60
    assert float(str(metrics[PEAK_MEMORY])) > 1e6


def test_peak_memory_never_falls() -> None:
    cpu = choose_compute("cpu", "fp32", 1)
    before = peak_memory_bytes(cpu)
    ballast = np.ones(2_000_000)
    assert peak_memory_bytes(cpu) >= before > len(ballast)


@pytest.mark.parametrize("evaluate", [True, False])
def test_a_site_measures_when_it_is_told_to(
    opened: Opened, weights: dict[str, Any], evaluate: bool
) -> None:
    metrics = (
        set(SiteRound(opened("fedavg", weights, evaluate=evaluate)).answer()[METRICS]) - ALWAYS
    )
    measured = {
        f"{where}.{metric}"
        for where in ("incoming.val", "incoming.test", "trained.val")
        for metric in (
            "accuracy",
            "loss",
            "entropy",
            "balanced-accuracy",
            "calibration-error",
        )
    }
    assert metrics == {"trained.train.loss"} | (measured if evaluate else set())


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_split_without_samples_is_not_measured_and_the_other_is(
    opened: Opened, weights: dict[str, Any], split: str
) -> None:
    method = opened("fedavg", weights)
    empty = Split(torch.empty(0, 1, 16, 16), torch.empty(0, dtype=torch.int64))
    method.silo = dataclasses.replace(method.silo, **{split: empty})  # type: ignore[arg-type]
    for records in (SiteRound(method).answer(), SiteRound(method).measure_only()):
        measured = {key.rpartition(".")[0] for key in records[METRICS] if "." in key}
        assert not [place for place in measured if place.endswith(split)]
        assert f"incoming.{'test' if split == 'val' else 'val'}" in measured


def test_weights_stay_at_the_site_where_the_server_wants_none(
    opened: Opened, weights: dict[str, Any]
) -> None:
    assert ARRAYS not in SiteRound(opened("fedavg", weights, returns=False)).answer()
    assert ARRAYS in SiteRound(opened("fedavg", weights, returns=True)).answer()


def test_measuring_does_not_change_what_is_trained(opened: Opened, weights: dict[str, Any]) -> None:
    measured = SiteRound(opened("fedavg", weights, evaluate=True)).answer()[ARRAYS]
    silent = SiteRound(opened("fedavg", weights, evaluate=False)).answer()[ARRAYS]
    for name in weights:
        assert measured[name].numpy().tobytes() == silent[name].numpy().tobytes()


def test_the_incoming_model_is_measured_before_it_is_trained(
    opened: Opened, weights: dict[str, Any]
) -> None:
    trained = SiteRound(opened("fedavg", weights)).answer()[METRICS]
    untouched = SiteRound(opened("fedavg", weights)).measure_only()[METRICS]
    for key in ("incoming.val.loss", "incoming.test.loss", "incoming.test.entropy"):
        assert trained[key] == untouched[key]
    assert trained["trained.val.loss"] != trained["incoming.val.loss"]


def test_a_phase_that_the_method_does_not_know_names_site_method_and_phase(
    opened: Opened,
) -> None:
    with pytest.raises(SiteError, match="site s2a: method 'local' has no phase 'centroids'"):
        SiteRound(opened("local", site="s2a", phase="centroids")).answer()


def test_a_method_that_keeps_nothing_stores_nothing(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("fedavg", weights)
    assert SiteRound(method).answer()[METRICS][KEPT_STATE] == 0
    assert not method.context.state.folder.exists()


def test_a_method_that_keeps_arrays_stores_them_and_says_so(opened: Opened) -> None:
    method = opened("fedavg")
    round_ = SiteRound(method)
    round_.keep({"w": torch.ones(2)})
    assert round_.reply({})[METRICS][KEPT_STATE] == 1
    kept = method.context.state.before(Instruction(2, "train"))
    assert kept is not None
    assert kept["w"].tolist() == [1, 1]


def test_sites_train_differently_from_the_same_weights(
    opened: Opened, weights: dict[str, Any]
) -> None:
    first = SiteRound(opened("fedavg", weights, site="s1a")).answer()[ARRAYS]["head.4.bias"].numpy()
    second = (
        SiteRound(opened("fedavg", weights, site="s2a")).answer()[ARRAYS]["head.4.bias"].numpy()
    )
    assert not np.array_equal(first, second)


def test_a_phase_of_the_methods_own_is_kept_and_told_and_leaves_by_the_same_door(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Answer({"x": 0.5}, {"a": torch.zeros(3)}, {"w": torch.ones(2)})
    method = opened("fedavg", own={"clip_norm": 1.0, "noise_multiplier": 2.0}, phase="dream")
    monkeypatch.setattr(type(method), "phase_dream", lambda _: answer, raising=False)
    reply = SiteRound(method).answer()
    metrics = reply[METRICS]
    assert (metrics["x"], metrics[KEPT_STATE], metrics[DP_RELEASES]) == (0.5, 1, 1)
    assert reply[ARRAYS]["a"].numpy().std() > 0, "noised as all that leaves"
    kept = method.context.state.before(Instruction(2, "train"))
    assert kept is not None
    assert kept["w"].tolist() == [1, 1]


def test_what_is_measured_beside_the_network_is_told_by_the_names_it_is_given(
    opened: Opened, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = opened("fedavg", weights)

    def measured(network: SiteNetwork) -> Iterator[MeasuredModel]:
        yield MeasuredModel(network)
        yield MeasuredModel(network, {"accuracy": "own-accuracy"})

    monkeypatch.setattr(method, "measured", measured)
    values = SiteRound(method).measured(method.open_network(), "incoming", ("val",))
    assert values["incoming.val.own-accuracy"] == values["incoming.val.accuracy"]
    assert "incoming.val.loss" in values
    assert "incoming.val.own-loss" not in values


def test_what_a_training_measures_while_it_runs_is_told_with_the_reply(
    opened: Opened, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method, ended = opened("fedavg", weights, evaluate=False), []
    plain = method.local_training

    def training(network: SiteNetwork) -> LocalTraining:
        usual = plain(network)

        def count(inputs: Tensor, optimiser: torch.optim.Optimizer) -> None:
            usual.metrics["seen"] = usual.metrics.get("seen", 0) + len(inputs)

        return dataclasses.replace(usual, after_step=count, ended=lambda: ended.append(True))

    monkeypatch.setattr(method, "local_training", training)
    assert SiteRound(method).answer()[METRICS]["seen"] == 36 * method.common.local_epochs
    assert ended == [True]
