import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedsilo.client_app.methods.moon
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.moon import twin
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS, METRICS
from fedsilo.models.methods.moon import build_projection, contrastive_loss
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from tests.support.lab import answer, evaluate, fitted, steps_of
from tests.support.tiny import VIT_FIELDS

Opened = Callable[..., Lab]
Weights = Callable[..., dict[str, Any]]
DIGITS = Task((1, 16, 16), 10)
NETWORKS: dict[str, dict[str, Any]] = {
    "conv": {},
    "conv-evidential": {"loss": "evidential"},
    "resnet22": {"network": "resnet22", "width": 1},
    "vgg16-bn": {"network": "vgg16-bn"},
    "vit-prompts": VIT_FIELDS,
    "vit-trained": VIT_FIELDS | {"train_backbone": True, "prompt_sets": "none"},
}


@pytest.fixture
def received(resolved: Callable[..., Any]) -> Weights:
    """Return a builder of what the server sends at first: task, settings."""

    def make(task: Task = DIGITS, **own: Any) -> dict[str, Any]:
        settings = resolved("moon", **own)
        network = build_classifier(settings.common, task)
        head = build_projection(settings.common.seed, network.channels)
        named = {f"projection/{name}": array for name, array in head.state_dict().items()}
        found = exchanged_arrays(network) | named
        return {name: array.numpy() for name, array in found.items()}

    return make


def arrays_of(network: Any) -> dict[str, Tensor]:
    return {n: array.clone() for n, array in exchanged_arrays(cast(nn.Module, network)).items()}


def represent(network: TokenClassifier, inputs: Tensor) -> Tensor:
    return cast(Tensor, network.get_submodule("projection")(network.encode(inputs)))


def trained_once(opened: Opened, received: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """Let the site take part in round 1 and return other arrays for round 2, as others' would."""
    answer(opened("moon", received, own=own))
    draw = np.random.default_rng(0)
    return {
        name: (array + 0.05 * draw.standard_normal(array.shape)).astype(np.float32)
        if "running" not in name
        else array
        for name, array in received.items()
    }


def test_the_first_round_is_fedavgs_and_the_head_comes_back_as_it_was(
    opened: Opened, received: Weights
) -> None:
    sent = received()
    plain = {name: array for name, array in sent.items() if not name.startswith("projection/")}
    reply, fedavg = (
        answer(opened("moon", sent)),
        answer(opened("fedavg", plain)),
    )
    assert set(reply[ARRAYS]) == set(sent)
    for name, array in reply[ARRAYS].items():
        expected = sent[name] if name.startswith("projection/") else fedavg[ARRAYS][name].numpy()
        np.testing.assert_array_equal(array.numpy(), expected)
    key = "trained.train.loss"
    assert reply[METRICS][key] == fedavg[METRICS][key]
    assert reply[METRICS]["kept-state"] == 1


def test_the_site_keeps_the_model_that_it_sent(opened: Opened, received: Weights) -> None:
    reply = answer(opened("moon", received()))
    stored = opened("moon", round=2).stored
    assert all(name.startswith("previous/") for name in stored)
    assert len(stored) == len(reply[ARRAYS])
    for name, array in reply[ARRAYS].items():
        kept = stored[f"previous/{name.replace('projection/', 'projection.')}"]
        np.testing.assert_array_equal(array.numpy(), kept.numpy())


@pytest.mark.parametrize("mu", [5.0, 0.5])
def test_the_loss_is_the_networks_plus_mu_times_the_contrast_of_global_and_previous(
    opened: Opened, received: Weights, mu: float
) -> None:
    own = {"contrast_mu": mu, "contrast_temperature": 0.25}
    others = trained_once(opened, received(), **own)
    site = opened("moon", others, own=own, round=2)
    network = cast(TokenClassifier, site.open())
    objective = steps_of(site, network).loss
    inputs, labels = site.silo.train.inputs[:9], site.silo.train.labels[:9]
    previous = twin(network).eval()
    for name, array in previous.state_dict().items():
        if name in exchanged_arrays(previous):
            array.copy_(site.stored[f"previous/{name}"])
    with torch.no_grad():
        for array in exchanged_arrays(network).values():
            array *= 1.1  # as if it had been trained since
        network.eval()
        as_it_came = cast(TokenClassifier, site.open()).eval()
        nets = (network, as_it_came, previous)
        contrast = contrastive_loss(*(represent(net, inputs) for net in nets), 0.25).item()
        expected = network.loss(inputs, labels).item() + mu * contrast
        assert objective(inputs, labels).item() == pytest.approx(expected, rel=1e-5)
    assert abs(contrast - np.log(2)) > 1e-3, "the two models must differ for this test to tell"


def test_the_fixed_models_stay_in_eval_mode_and_get_no_gradient(
    opened: Opened, received: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = trained_once(opened, received())
    twins: list[TokenClassifier] = []

    def spy(network: TokenClassifier) -> TokenClassifier:
        twins.append(twin(network))
        return twins[-1]

    monkeypatch.setattr(fedsilo.client_app.methods.moon, "twin", spy)
    site = opened("moon", others, round=2)
    network = cast(TokenClassifier, site.open())
    start = arrays_of(network)
    fitted(site, network)
    came_as, previous = twins
    assert all(torch.equal(array, start[n]) for n, array in exchanged_arrays(came_as).items())
    for name, array in exchanged_arrays(previous).items():
        assert torch.equal(array, site.stored[f"previous/{name}"])
    for fixed in twins:
        assert not any(part.training for part in fixed.modules())
        assert all(p.grad is None and not p.requires_grad for p in fixed.parameters())
    assert all(part.training for part in network.modules())
    changed = {
        name for name, array in exchanged_arrays(network).items() if (array != start[name]).any()
    }
    assert {"encoder.stages.0.weight", "head.4.weight"} < changed
    assert {name for name in start if name.startswith("projection.")} < changed


def test_the_gradient_of_the_contrast_reaches_encoder_and_head_but_not_the_classifier(
    opened: Opened, received: Weights
) -> None:
    found = {}
    for mu in (1e-9, 5.0):
        others = trained_once(opened, received(), contrast_mu=mu)
        site = opened("moon", others, own={"contrast_mu": mu, "dropout": 0.1}, round=2)
        network = cast(TokenClassifier, site.open())
        objective = steps_of(site, network).loss
        network.eval()
        objective(site.silo.train.inputs[:8], site.silo.train.labels[:8]).backward()
        found[mu] = {n: cast(Tensor, p.grad) for n, p in network.named_parameters()}
    little, much = found[1e-9], found[5.0]
    assert torch.allclose(little["head.4.weight"], much["head.4.weight"], atol=1e-6)
    assert not torch.allclose(
        little["encoder.stages.0.weight"], much["encoder.stages.0.weight"], atol=1e-4
    )
    assert much["projection.layers.0.weight"].abs().max() > 1e-5


def test_a_large_mu_keeps_nearer_to_the_global_than_to_the_previous_model(
    opened: Opened, received: Weights
) -> None:
    def contrast(mu: float) -> float:
        own = {"contrast_mu": mu, "local_epochs": 4, "dropout": 0.0}
        others = trained_once(opened, received(), **own)
        site = opened("moon", others, own=own, round=2)
        network = cast(TokenClassifier, site.open())
        objective, train = steps_of(site, network).loss, site.silo.train
        fitted(site, network)
        with torch.no_grad():
            whole = objective(train.inputs, train.labels).item()
            return (whole - network.loss(train.inputs, train.labels).item()) / mu

    assert contrast(20.0) < contrast(1e-2) - 0.05


def test_the_previous_model_is_of_the_last_round_that_the_site_took_part_in(
    opened: Opened, received: Weights
) -> None:
    others = trained_once(opened, received())
    second = opened("moon", others, round=2)
    answer(second)
    later = opened("moon", others, round=5)  # it missed rounds 3 and 4
    kept = opened("moon", round=3).stored
    assert all(torch.equal(array, kept[name]) for name, array in later.stored.items())
    first = opened("moon", round=2).stored
    assert not torch.equal(first["previous/head.4.weight"], kept["previous/head.4.weight"])


def test_a_round_that_is_asked_for_again_gives_the_same_bits(
    opened: Opened, received: Weights
) -> None:
    others = trained_once(opened, received())
    first, again = (answer(opened("moon", others, round=2)) for _ in range(2))
    for name, array in first[ARRAYS].items():
        np.testing.assert_array_equal(array.numpy(), again[ARRAYS][name].numpy())


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_image_network_trains_between_the_two_models(
    opened: Opened, received: Weights, kind: str
) -> None:
    own = {"local_steps": 1, "batch_size": 4, **NETWORKS[kind]}
    shape = (3, 32, 32) if kind == "vgg16-bn" else (1, 16, 16)
    task = Task(shape, 10)
    arrays = received(task, **own)
    site = opened("moon", arrays, own=own, round=2)
    few = Split(torch.rand(4, *shape), torch.arange(4))
    site.silo = dataclasses.replace(site.silo, task=task, train=few)
    network = site.open()
    own_model = {f"previous/{name}": 0.9 * array for name, array in arrays_of(network).items()}
    site.__dict__["stored"] = own_model
    sent = fitted(site, network).sent
    assert site.metrics["trained.train.loss"] > 0
    assert set(sent) == set(arrays)
    moved = {n for n, array in sent.items() if (array.numpy() != arrays[n]).any()}
    assert [name for name in moved if name.startswith("projection/")]
    assert [name for name in moved if name.startswith(("encoder.", "prompts."))]
    assert not [name for name in sent if "vit" in name] or kind == "vit-trained"


def test_a_twin_has_its_own_weights_but_the_frozen_backbone_in_common(
    resolved: Callable[..., Any],
) -> None:
    network = build_classifier(resolved("moon", **VIT_FIELDS).common, DIGITS)
    copied = twin(network)
    assert copied.encoder is network.encoder
    assert copied.prompts is not network.prompts
    with torch.no_grad():
        cast(Any, copied).prompts["b"] += 1
    assert not torch.equal(cast(Any, copied).prompts["b"], cast(Any, network).prompts["b"])


def test_to_evaluate_the_plain_network_is_loaded_as_fedavg_loads_it(
    opened: Opened, weights: dict[str, Any]
) -> None:
    site = opened("moon", weights, phase="evaluate")
    network = cast(nn.Module, site.open())
    assert set(exchanged_arrays(network)) == set(weights)
    found = evaluate(site)[METRICS]
    other = evaluate(opened("fedavg", weights, phase="evaluate"))[METRICS]
    key = "incoming.test.loss"
    assert found[key] == other[key]


def test_training_without_the_head_is_refused_by_name(
    opened: Opened, weights: dict[str, Any]
) -> None:
    with pytest.raises(SettingError, match=r"missing \['projection.layers.0.bias'"):
        answer(opened("moon", weights))


def test_epochs_that_span_rounds_keep_the_heads_moments_too(
    opened: Opened, received: Weights
) -> None:
    own = {"epoch_steps": 4, "pace": 2, "local_epochs": 2, "batch_size": 32}  # those of TINY
    answer(opened("moon", received(), own=own))
    answer(opened("moon", received(), own=own, round=2))
    stored = opened("moon", own=own, round=3).stored
    names = {name for name in stored if name.startswith("pace/optimiser/projection.")}
    assert "pace/optimiser/projection.layers.2.weight/exp_avg" in names
    assert {name for name in stored if name.startswith("previous/")}
    steps = stored["pace/optimiser/projection.layers.2.weight/step"]
    assert steps == 2  # in round 1 it had no gradient


def test_micro_batches_add_up_to_the_whole_batch(opened: Opened, received: Weights) -> None:
    others = trained_once(opened, received())
    site = opened("moon", others, round=2)
    network = cast(TokenClassifier, site.open())
    objective = steps_of(site, network).loss
    network.eval()
    inputs, labels = site.silo.train.inputs[:6], site.silo.train.labels[:6]
    parts = [objective(inputs[i : i + 2], labels[i : i + 2]).item() for i in (0, 2, 4)]
    assert objective(inputs, labels).item() == pytest.approx(sum(parts) / 3, rel=1e-5)
