import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods import cdl
from fedsilo.client_app.methods.moon import twin
from fedsilo.models.contract.messages import ARRAYS, METRICS
from fedsilo.models.methods.cdl import contrastive_divergence
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays, load_exchanged
from tests.support.lab import answer, evaluate, fitted, steps_of
from tests.support.tiny import VIT_FIELDS

Opened = Callable[..., Lab]
MIXING = {"mixing": json.dumps({"s1a": 0.5, "s2a": 0.5})}
VIT = VIT_FIELDS | {"dropout": 0.0}


def theta(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {f"model/{name}": array for name, array in weights.items()}


def neighbour(weights: Mapping[str, Any], scale: float = 0.05) -> dict[str, Any]:
    """Return a neighbour's model, somewhat off the weights."""
    draw = np.random.default_rng(0)
    return {
        f"neighbour/s2a/{name}": array
        if "running" in name
        else (array + scale * draw.standard_normal(array.shape)).astype(np.float32)
        for name, array in weights.items()
    }


def second(opened: Opened, weights: Mapping[str, Any], scale: float = 0.05, **own: Any) -> Lab:
    """Return the site in round 2, after it took part in round 1."""
    answer(opened("cdl", theta(weights), own=own))
    received = neighbour(weights, scale)
    return opened("cdl", received, own=own, round=2, notes=MIXING, evaluate=False)


def moved(site: Lab) -> tuple[TokenClassifier, dict[str, Tensor]]:
    """Train, and return the main model and how the support model's arrays moved."""
    network = cast(TokenClassifier, site.open())
    before = site.state("support/")
    kept = fitted(site, network).kept
    return network, {name: kept[f"support/{name}"] - array for name, array in before.items()}


@pytest.fixture
def vit_weights(resolved: Callable[..., Any], silo: Any) -> dict[str, Any]:
    network = build_classifier(resolved("cdl", **VIT).common, silo.task)
    return {name: array.numpy() for name, array in exchanged_arrays(network).items()}


def test_the_first_round_is_that_of_plain_mixing(opened: Opened, weights: dict[str, Any]) -> None:
    reply, ring = (answer(opened(name, theta(weights))) for name in ("cdl", "ring"))
    assert set(reply[ARRAYS]) == set(weights)
    for name, array in ring[ARRAYS].items():
        np.testing.assert_array_equal(reply[ARRAYS][name].numpy(), array.numpy())
    assert reply[METRICS]["trained.train.loss"] == ring[METRICS]["trained.train.loss"]


def test_the_support_model_starts_as_what_the_first_round_made_of_the_main_one(
    opened: Opened, weights: dict[str, Any]
) -> None:
    reply = answer(opened("cdl", theta(weights)))
    later = opened("cdl", round=2)
    support, own = later.state("support/"), later.state("own/")
    assert set(support) == set(own) == set(weights)
    assert len(later.stored) == 2 * len(weights)
    for name, array in reply[ARRAYS].items():
        np.testing.assert_array_equal(array.numpy(), support[name].numpy())
        assert torch.equal(support[name], own[name])


@pytest.mark.parametrize("beta", [0.5, 0.1])
def test_the_loss_is_the_main_models_plus_the_divergence_of_both(
    opened: Opened, weights: dict[str, Any], beta: float
) -> None:
    site = second(opened, weights, divergence_beta=beta, dropout=0.0)
    main = cast(TokenClassifier, site.open())
    load_exchanged(main, site.session.method._start(site))
    support = twin(main).train()
    load_exchanged(support, site.state("support/"))
    inputs, labels = site.silo.train.inputs[:9], site.silo.train.labels[:9]
    objective = steps_of(site, main.eval()).loss  # as measuring leaves it
    main.train()
    found = objective(inputs, labels).item()
    with torch.no_grad():
        apart = contrastive_divergence(main(inputs), support(inputs), beta).item()
        assert found == pytest.approx(main.loss(inputs, labels).item() + apart, rel=1e-5)
    assert apart > 1e-4, "the two models must differ for this test to tell"


def test_the_main_model_starts_from_the_mixed_one_and_alone_leaves_the_site(
    opened: Opened, weights: dict[str, Any]
) -> None:
    site = second(opened, weights)
    own, other = site.state("own/"), neighbour(weights)
    for name, array in site.session.method._start(site).items():
        mean = (own[name].double().numpy() + other[f"neighbour/s2a/{name}"]) / 2
        np.testing.assert_allclose(array.numpy(), mean, rtol=1e-5, atol=1e-6)
    reply = answer(site)
    assert set(reply[ARRAYS]) == set(weights)
    kept = opened("cdl", round=3)
    for name, array in reply[ARRAYS].items():
        np.testing.assert_array_equal(array.numpy(), kept.state("own/")[name].numpy())
    before, after = site.state("support/"), kept.state("support/")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"encoder.stages.0.weight", "head.4.weight"} < changed
    assert {name for name in before if "running_mean" in name} < changed


def test_with_beta_1_the_support_models_weights_stay(
    opened: Opened, weights: dict[str, Any]
) -> None:
    network, moves = moved(second(opened, weights, divergence_beta=1.0))
    for name, _ in network.named_parameters():
        assert not moves[name].any()


def test_the_divergence_pulls_the_main_model_to_the_support_model(
    opened: Opened, weights: dict[str, Any]
) -> None:
    def apart(beta: float) -> float:
        own = {"divergence_beta": beta, "local_epochs": 8, "learning_rate": 0.005, "dropout": 0.0}
        site = second(opened, weights, **own)
        network, _ = moved(site)
        support = twin(network)
        load_exchanged(support, site.state("support/"))
        inputs = site.silo.train.inputs
        with torch.no_grad():
            return contrastive_divergence(network(inputs), support(inputs), 1.0).item()

    assert apart(1.0) < 0.8 * apart(1e-6)


@pytest.mark.parametrize(("decay", "factor"), [("none", 1.0), ("inverse-sqrt", 0.5**0.5)])
def test_the_support_models_rate_decays_as_the_main_models(
    opened: Opened, vit_weights: dict[str, Any], decay: str, factor: float
) -> None:
    own = VIT | {"optimiser": "sgd", "learning_rate": 0.1, "local_steps": 1}
    answer(opened("cdl", theta(vit_weights), own=own))
    stored = opened("cdl", own=own, round=2).stored

    def move(rate_decay: str) -> Tensor:
        received = neighbour(vit_weights, 1.0)
        site = opened("cdl", received, own=own | {"rate_decay": rate_decay}, round=2, notes=MIXING)
        site.__dict__["stored"] = stored
        return moved(site)[1]["head.1.weight"]

    usual, found = move("none"), move(decay)
    assert usual.abs().max() > 1e-3
    assert torch.allclose(found, factor * usual, rtol=1e-3, atol=1e-6)


def test_micro_batches_give_the_support_model_one_step_a_batch(
    opened: Opened, vit_weights: dict[str, Any]
) -> None:
    found = []
    for size in (0, 4):
        own = VIT | {"optimiser": "sgd", "learning_rate": 0.1, "micro_batch": size}
        found.append(moved(second(opened, vit_weights, **own))[1])
    for name, move in found[0].items():
        torch.testing.assert_close(found[1][name], move, rtol=1e-3, atol=1e-6)
    assert found[0]["head.1.weight"].any()


def test_a_vits_frozen_backbone_is_held_once_and_no_gradient_is_left_over(
    opened: Opened, vit_weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, twins = second(opened, vit_weights, **VIT), []
    monkeypatch.setattr(cdl, "twin", lambda network: twins.append(twin(network)) or twins[-1])
    network, moves = moved(site)
    (support,) = twins
    assert support is not network
    assert all(p.grad is None for p in support.parameters()), "of each batch again"
    assert support.encoder is network.encoder
    assert moves["prompts.b"].any()
    assert moves["head.1.weight"].any()


def test_a_round_that_is_asked_for_again_gives_the_same_bits(
    opened: Opened, weights: dict[str, Any]
) -> None:
    first = second(opened, weights)
    replies = [answer(first)]
    again = opened("cdl", neighbour(weights), round=2, notes=MIXING, evaluate=False)
    replies.append(answer(again))
    for name, array in replies[0][ARRAYS].items():
        np.testing.assert_array_equal(array.numpy(), replies[1][ARRAYS][name].numpy())


def test_at_the_end_the_plain_main_model_is_measured(
    opened: Opened, weights: dict[str, Any]
) -> None:
    answer(opened("cdl", theta(weights)))
    site = opened("cdl", theta(weights), round=2, phase="evaluate")
    assert set(exchanged_arrays(cast(nn.Module, site.open()))) == set(weights)
    found = evaluate(site)[METRICS]
    assert {"incoming.test.accuracy", "incoming.test.own-accuracy"} <= set(found)
