"""A site's round, whatever the method: what it measures, when, and what leaves by it."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from fedsilo.client_app.answer import pack
from fedsilo.client_app.lab import Lab, Outgoing
from fedsilo.client_app.privacy.ledger import LEDGER
from fedsilo.client_app.training.compute import choose_compute
from fedsilo.client_app.training.evaluation import Measured, measure
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.core.errors import SiteError
from fedsilo.core.messages import (
    ARRAYS,
    DP_EPSILON,
    KEPT_STATE,
    METRICS,
    NUM_EXAMPLES,
    PEAK_MEMORY,
    SAMPLES,
    SECONDS,
    STEPS,
    Instruction,
)
from fedsilo.core.methods import METHODS, site_class
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.networks.site_network import SiteNetwork
from tests.support.errors import refuses
from tests.support.lab import answer, evaluate

Opened = Callable[..., Lab]
PRIVATE: dict[str, Any] = {"sample_clip_norm": 1.0, "noise_multiplier": 2.0}
ALWAYS = {NUM_EXAMPLES, SECONDS, PEAK_MEMORY, KEPT_STATE}


def test_training_leaves_the_message_as_it_came(opened: Opened, weights: dict[str, Any]) -> None:
    method = opened("fedavg", weights)
    reply = answer(method)
    for name, array in weights.items():
        received = method.content[ARRAYS][name].numpy()
        np.testing.assert_array_equal(received, array)
    assert not np.array_equal(reply[ARRAYS]["head.1.weight"].numpy(), weights["head.1.weight"])


def test_arrays_leave_sorted_and_in_float32(opened: Opened) -> None:
    arrays = {"b": torch.ones(2, dtype=torch.bfloat16), "a": torch.ones(3, 2, dtype=torch.double).T}
    reply = pack(opened("fedavg"), Outgoing(send=arrays))
    assert list(reply[ARRAYS]) == ["a", "b"]
    assert {array.dtype for array in reply[ARRAYS].values()} == {"float32"}
    assert reply[ARRAYS]["a"].numpy().shape == (2, 3)


def test_every_reply_tells_examples_time_and_memory(opened: Opened) -> None:
    lab = opened("fedavg")
    lab.metrics["x"] = 0.5
    metrics = pack(lab, Outgoing())[METRICS]
    assert set(metrics) == {"x", *ALWAYS}
    assert metrics[NUM_EXAMPLES] == 36
    assert 0 < float(str(metrics[SECONDS])) < 60
    assert float(str(metrics[PEAK_MEMORY])) > 1e6


def test_a_reply_counts_the_steps_it_took_and_the_samples_they_saw(
    opened: Opened, weights: dict[str, Any]
) -> None:
    # 36 samples in batches of 16 (16, 16, 4), twice
    metrics = answer(opened("fedavg", weights, own={"local_epochs": 2, "batch_size": 16}))[METRICS]
    assert (metrics[STEPS], metrics[SAMPLES]) == (6, 72)
    # Five steps: a pass of three and two of the next
    metrics = answer(opened("fedavg", weights, own={"local_steps": 5, "batch_size": 16}))[METRICS]
    assert (metrics[STEPS], metrics[SAMPLES]) == (5, 68)
    # Ditto trains two models in a round
    metrics = answer(opened("ditto", weights, own={"local_epochs": 1, "batch_size": 16}))[METRICS]
    assert (metrics[STEPS], metrics[SAMPLES]) == (6, 72)
    assert STEPS not in evaluate(opened("fedavg", weights))[METRICS]


def test_a_private_reply_counts_neither_steps_nor_samples(opened: Opened) -> None:
    lab = opened("fedavg", own=PRIVATE)
    network = lab.classifier(None)
    lab.fit(network)
    metrics = pack(lab, Outgoing(network))[METRICS]
    assert "trained.train.loss" in metrics
    assert {STEPS, SAMPLES}.isdisjoint(metrics)


def test_peak_memory_never_falls() -> None:
    cpu = choose_compute("cpu", "fp32", 1)
    before = cpu.peak_memory()
    ballast = np.ones(2_000_000)
    assert cpu.peak_memory() >= before > len(ballast)


@pytest.mark.parametrize("evaluate", [True, False])
def test_a_site_measures_when_it_is_told_to(
    opened: Opened, weights: dict[str, Any], evaluate: bool
) -> None:
    metrics = set(answer(opened("fedavg", weights, evaluate=evaluate))[METRICS]) - ALWAYS
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
    worked = {"trained.train.loss", STEPS, SAMPLES}
    assert metrics == worked | (measured if evaluate else set())


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_split_without_samples_is_not_measured_and_the_other_is(
    opened: Opened, weights: dict[str, Any], split: str
) -> None:
    method = opened("fedavg", weights)
    empty = Split(torch.empty(0, 1, 16, 16), torch.empty(0, dtype=torch.int64))
    method.silo = dataclasses.replace(method.silo, **{split: empty})  # type: ignore[arg-type]
    for records in (answer(method), evaluate(method)):
        measured = {key.rpartition(".")[0] for key in records[METRICS] if "." in key}
        assert not [place for place in measured if place.endswith(split)]
        assert f"incoming.{'test' if split == 'val' else 'val'}" in measured


def test_weights_stay_at_the_site_where_the_server_wants_none(
    opened: Opened, weights: dict[str, Any]
) -> None:
    assert ARRAYS not in answer(opened("fedavg", weights, returns=False))
    assert ARRAYS in answer(opened("fedavg", weights, returns=True))


def test_measuring_does_not_change_what_is_trained(opened: Opened, weights: dict[str, Any]) -> None:
    measured = answer(opened("fedavg", weights, evaluate=True))[ARRAYS]
    silent = answer(opened("fedavg", weights, evaluate=False))[ARRAYS]
    for name in weights:
        assert measured[name].numpy().tobytes() == silent[name].numpy().tobytes()


def test_the_incoming_model_is_measured_before_it_is_trained(
    opened: Opened, weights: dict[str, Any]
) -> None:
    trained = answer(opened("fedavg", weights))[METRICS]
    untouched = evaluate(opened("fedavg", weights))[METRICS]
    for key in ("incoming.val.loss", "incoming.test.loss", "incoming.test.entropy"):
        assert trained[key] == untouched[key]
    assert trained["trained.val.loss"] != trained["incoming.val.loss"]


def test_a_phase_that_the_method_does_not_know_names_site_method_and_phase(
    opened: Opened,
) -> None:
    with refuses(SiteError, "s2a", "local", "centroids"):
        answer(opened("local", site="s2a", phase="centroids"))


def test_a_method_that_keeps_nothing_stores_nothing(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("fedavg", weights)
    assert answer(method)[METRICS][KEPT_STATE] == 0
    assert not method.state_files.folder.exists()


def test_a_method_that_keeps_arrays_stores_them_and_says_so(opened: Opened) -> None:
    method = opened("fedavg")
    assert pack(method, Outgoing(keep={"w": torch.ones(2)}))[METRICS][KEPT_STATE] == 1
    kept = method.state_files.load_before(Instruction(2, "train"))
    assert kept is not None
    assert kept["w"].tolist() == [1, 1]


def test_sites_train_differently_from_the_same_weights(
    opened: Opened, weights: dict[str, Any]
) -> None:
    first = answer(opened("fedavg", weights, site="s1a"))[ARRAYS]["head.4.bias"].numpy()
    second = answer(opened("fedavg", weights, site="s2a"))[ARRAYS]["head.4.bias"].numpy()
    assert not np.array_equal(first, second)


def test_a_phase_of_the_methods_own_is_kept_and_told_and_leaves_by_the_same_door(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dream(lab: Lab) -> Outgoing:
        lab.metrics["x"] = 0.5
        return Outgoing(send={"a": torch.zeros(3)}, keep={"w": torch.ones(2)})

    method = opened("fedavg", own=PRIVATE, phase="day-dream")
    monkeypatch.setattr(method.session.method, "phases", ("day-dream",), raising=False)
    monkeypatch.setattr(method.session.method, "day_dream", dream, raising=False)
    reply = answer(method)
    metrics = reply[METRICS]
    assert (metrics["x"], metrics[KEPT_STATE], metrics[DP_EPSILON]) == (0.5, 1, 0.0)
    assert reply[ARRAYS]["a"].numpy().tolist() == [0, 0, 0]
    kept = method.state_files.load_before(Instruction(2, "train"))
    assert kept is not None
    assert kept["w"].tolist() == [1, 1]


@pytest.mark.parametrize("phase", ["open", "admit", "measured", "__init__", "settings"])
def test_a_phase_that_is_named_as_something_else_of_a_method_is_refused(
    opened: Opened, phase: str
) -> None:
    with refuses(SiteError, phase):
        answer(opened("fedavg", phase=phase))


@pytest.mark.parametrize("phase", ["training-images", "training_images"])
def test_a_helper_of_a_method_is_no_phase_that_a_message_can_ask_for(
    opened: Opened, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    called = []

    def training_images(lab: Lab) -> Outgoing:
        called.append(lab.site)
        return Outgoing(send={"images": lab.silo.train.inputs})

    method = opened("fedavg", weights, phase=phase)
    monkeypatch.setattr(method.session.method, "training_images", training_images, raising=False)
    with refuses(SiteError, phase):
        answer(method)
    assert not called


@pytest.mark.parametrize("method", METHODS)
def test_the_phases_of_a_method_are_functions_of_a_lab(method: str) -> None:
    cls = site_class(method)
    assert "train" in cls.phases
    for phase in cls.phases:
        parameters = inspect.signature(getattr(cls, phase.replace("-", "_"))).parameters
        assert list(parameters) == ["self", "lab"]


@pytest.mark.parametrize("returned", [None, RecordDict({ARRAYS: ArrayRecord()})])
def test_a_phase_that_returns_something_else_than_outgoing_sends_nothing(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, returned: RecordDict | None
) -> None:
    method = opened("fedavg", phase="dream")
    monkeypatch.setattr(method.session.method, "phases", ("dream",), raising=False)
    monkeypatch.setattr(method.session.method, "dream", lambda lab: returned, raising=False)
    kind = type(returned).__name__
    with refuses(SiteError, kind):
        answer(method)


def test_a_plugin_of_version_0_1_may_still_end_with_lab_reply(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dream(lab: Lab) -> Outgoing:
        return lab.reply(send={"a": torch.zeros(3)})

    method = opened("fedavg", phase="dream")
    monkeypatch.setattr(method.session.method, "phases", ("dream",), raising=False)
    monkeypatch.setattr(method.session.method, "dream", dream, raising=False)
    assert list(answer(method)[ARRAYS]) == ["a"]


def test_what_is_measured_beside_the_network_is_told_by_the_names_it_is_given(
    opened: Opened, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = opened("fedavg", weights)

    def measured(lab: Lab, network: SiteNetwork) -> Iterator[Measured]:
        yield Measured(network)
        yield Measured(network, {"accuracy": "own-accuracy"})

    monkeypatch.setattr(method.session.method, "measured", measured)
    values = method.measure_splits(method.open(), "incoming", ("val",))
    assert values["incoming.val.own-accuracy"] == values["incoming.val.accuracy"]
    assert "incoming.val.loss" in values
    assert "incoming.val.own-loss" not in values


def test_what_is_measured_within_labels_sees_samples_of_those_alone(
    opened: Opened, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = opened("fedavg", weights)
    labels = method.silo.train.labels

    def measured(lab: Lab, network: SiteNetwork) -> Iterator[Measured]:
        for name, within in (("five", torch.arange(5)), ("none", torch.tensor([99]))):
            yield Measured(network, {"accuracy": name}, within=within)

    monkeypatch.setattr(method.session.method, "measured", measured)
    network = method.open()
    found = method.measure_splits(network, "incoming", ("train",))
    of_five = Split(method.silo.train.inputs[labels < 5], labels[labels < 5])
    expected = measure(network, of_five, method.sampling, method.compute, (1, "s1a", "x", "y"))
    assert found == {"incoming.train.five": expected["accuracy"]}  # too few of the other to measure


def test_a_training_aside_is_neither_told_nor_kept(opened: Opened, weights: dict[str, Any]) -> None:
    lab = opened("fedavg", weights, own={"optimiser_state": "run"})
    network = lab.open()
    before = {name: array.clone() for name, array in network.state_dict().items()}
    lab.fit(network, aside=("visitor", "s2a"))
    assert any(not torch.equal(before[n], a) for n, a in network.state_dict().items())
    assert pack(lab, Outgoing())[METRICS][KEPT_STATE] == 0
    assert lab.metrics == {}


def ledger_of(lab: Lab) -> dict[tuple[float, float], int]:
    return dict(lab.masked_part.ledger.releases())


def test_private_training_is_in_the_ledger_before_the_first_step(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[dict[tuple[float, float], int]] = []
    lab = opened("fedavg", own={**PRIVATE, "batch_size": 18, "local_epochs": 3})

    def died(_: LocalTraining) -> float:
        known.append(ledger_of(lab))
        raise SiteError("the power is cut")

    monkeypatch.setattr(LocalTraining, "run", died)
    with pytest.raises(SiteError, match="cut"):
        lab.fit(lab.classifier(None))
    # 36 samples in batches of 18: q is a half, an epoch two steps
    assert known == [{(2.0, 0.5): 6}]


@pytest.mark.parametrize("name", ["penality", "before_pass", "optimiser", "private"])
def test_an_argument_that_training_does_not_take_is_refused_before_it_is_paid_for(
    name: str, opened: Opened
) -> None:
    lab, arguments = opened("fedavg", own=PRIVATE), dict[str, Any]({name: lambda *_: None})
    network = lab.classifier(None)
    before = {n: p.detach().clone() for n, p in network.named_parameters()}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        lab.fit(network, **arguments)
    assert all(torch.equal(p, before[n]) for n, p in network.named_parameters())
    assert not (lab.state_files.folder / LEDGER).exists()


def test_training_that_stays_has_no_noise_and_spends_nothing(opened: Opened) -> None:
    def trained(noise: float, stays: bool) -> Tensor:
        lab = opened("fedavg", own={**PRIVATE, "noise_multiplier": noise})
        network = lab.classifier(None)
        lab.fit(network, stays=stays)
        assert len(ledger_of(lab)) == (0 if stays else 1)
        (lab.state_files.folder / LEDGER).unlink(missing_ok=True)
        return torch.cat([p.detach().flatten() for p in network.parameters()])

    assert torch.equal(trained(2.0, stays=True), trained(50.0, stays=True))
    assert not torch.equal(trained(2.0, stays=False), trained(50.0, stays=False))


def test_steps_of_a_training_are_those_that_are_charged(opened: Opened) -> None:
    lab = opened("fedavg", own={**PRIVATE, "batch_size": 9, "local_epochs": 3})
    lab.fit(lab.classifier(None), steps=5)
    assert ledger_of(lab) == {(2.0, 0.25): 5}


def test_rates_of_private_training_decay_by_the_steps_of_the_told_samples(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {**PRIVATE, "batch_size": 9, "local_epochs": 3, "rate_decay": "inverse-sqrt"}
    lab = opened("fedavg", own=own, round=3)
    told = {"train": [18] + [0] * 9, "val": [], "test": []}
    lab.session = dataclasses.replace(lab.session, reported=told)
    seen = list[LocalTraining]()

    def train(training: LocalTraining) -> float:
        seen.append(training)
        return 0.0

    monkeypatch.setattr(LocalTraining, "run", train)
    lab.fit(lab.classifier(None))
    assert seen[0].counted == (2 * 3 * 2, 0), "the real 36 would be twice as many"
    assert ledger_of(lab) == {(2.0, 0.5): 6}
    assert pack(lab, Outgoing())[METRICS][NUM_EXAMPLES] == 18
