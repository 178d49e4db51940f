"""Tests of the method 'cdl': equations, site and server."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods import cdl
from fedsilo.client_app.methods.moon import copy_network
from fedsilo.core.errors import SettingError
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import ARRAYS, METRICS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.models.methods.cdl import CDLSettings, contrastive_divergence, divergence
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays, load_exchanged
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.decentralised import CDL, Decentralised
from tests.support.errors import refuses
from tests.support.lab import answer, evaluate, fitted, steps_of
from tests.support.methods import Opened, Tiny, arrays_of
from tests.support.tiny import VIT_FIELDS

# The equations

EVEN = torch.zeros(1, 2)  # probabilities 1/2, 1/2
SKEWED = torch.tensor([[0.0, math.log(3)]])  # 1/4, 3/4
KL = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)  # of the skewed from the even
BACK = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)  # of the even from the skewed


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True, materialize_grads=True)
    return found


def test_the_divergence_by_hand_and_its_two_directions() -> None:
    assert divergence(SKEWED, EVEN).item() == pytest.approx(KL, abs=1e-6)
    assert divergence(EVEN, SKEWED).item() == pytest.approx(BACK, abs=1e-6)
    assert abs(KL - BACK) > 0.01
    assert divergence(SKEWED + 7, EVEN - 2).item() == pytest.approx(KL, abs=1e-6)


def test_a_batch_has_the_mean_of_its_samples_divergences() -> None:
    found = divergence(torch.cat([SKEWED, EVEN]), torch.cat([EVEN, EVEN]))
    assert found.item() == pytest.approx(KL / 2, abs=1e-6)


@given(st.integers(0, 1000))
def test_it_is_nothing_between_the_same_answers_and_more_between_others(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    one, other = torch.randn(2, 3, 4, generator=draw)
    assert divergence(one, one).item() == pytest.approx(0, abs=1e-6)
    assert divergence(one, other).item() > 0


@pytest.mark.parametrize("beta", [0.25, 0.5, 1.0])
def test_beta_weighs_the_two_terms(beta: float) -> None:
    found = contrastive_divergence(SKEWED, EVEN, beta).item()
    assert found == pytest.approx(beta * KL + (1 - beta) * BACK, abs=1e-6)


def test_each_term_trains_its_own_model_alone() -> None:
    main, support = SKEWED.clone().requires_grad_(), EVEN.clone().requires_grad_()
    whole = contrastive_divergence(main, support, 0.25)
    to_support = divergence(main, EVEN)
    to_main = divergence(support, SKEWED)
    assert torch.allclose(gradient(whole, main), 0.25 * gradient(to_support, main))
    assert torch.allclose(gradient(whole, support), 0.75 * gradient(to_main, support))
    # by hand: d KL(p || q) / d logit_k = p_k (log(p_k / q_k) - KL)
    expected = 0.25 * 0.75 * (math.log(1.5) - KL)
    assert gradient(whole, main)[0, 1].item() == pytest.approx(expected, abs=1e-6)


def test_with_beta_1_the_support_model_is_not_trained() -> None:
    support = EVEN.clone().requires_grad_()
    assert not gradient(contrastive_divergence(SKEWED, support, 1.0), support).any()


@pytest.mark.parametrize("beta", [0.0, -0.5, 1.1, float("nan")])
def test_no_beta_at_all_or_too_much_is_refused(beta: float) -> None:
    with refuses(SettingError, "cdl.divergence-beta", "0", "1"):
        build(CDLSettings, {"cdl.divergence-beta": beta})


def test_unless_they_are_set_beta_is_a_half_and_the_topology_a_ring() -> None:
    found = build(CDLSettings, {})
    assert (found.divergence_beta, found.divergence_topology) == (0.5, "ring")
    with refuses(SettingError, "cdl.divergence-topology", "line"):
        build(CDLSettings, {"cdl.divergence-topology": "line"})


# At a site

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
    network = build_classifier(resolved("cdl", **VIT).common, silo.shape)
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
    assert len(later.stored_state) == 2 * len(weights)
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
    support = copy_network(main).train()
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
        support = copy_network(network)
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
    stored = opened("cdl", own=own, round=2).stored_state

    def move(rate_decay: str) -> Tensor:
        received = neighbour(vit_weights, 1.0)
        site = opened("cdl", received, own=own | {"rate_decay": rate_decay}, round=2, notes=MIXING)
        site.__dict__["stored_state"] = stored
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
    monkeypatch.setattr(
        cdl, "copy_network", lambda network: twins.append(copy_network(network)) or twins[-1]
    )
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


# At the server

Run = Callable[..., tuple[Any, CDL]]


@pytest.mark.parametrize("kind", ["ring", "complete", "star"])
def test_it_mixes_on_the_topology_that_is_named(participants: Participants, kind: str) -> None:
    settings = CDLSettings(divergence_topology=kind)
    strategy = CDL(CommonSettings(silos=3, width=1), settings, participants)
    assert isinstance(strategy, Decentralised)
    named = "hub" if kind == "star" else kind
    assert strategy.kind() == named
    assert f"'{named}'" in strategy.disclosures().leaves[0]


def test_round_1_is_rings_and_round_2_is_not_and_no_support_model_travels(
    spied_run: Run, tiny: Tiny
) -> None:
    grid, strategy = spied_run(tiny("cdl"))
    ring, _ = spied_run(tiny("ring"))
    for ours, theirs in zip(grid.sent[3:9], ring.sent[3:9], strict=True):
        mine, other = arrays_of(ours.content), arrays_of(theirs.content)
        assert set(mine) == set(other)
        assert all((mine[name] == other[name]).all() for name in mine)
    replies, others = grid.replies[3:9], ring.replies[3:9]
    names = set(arrays_of(replies[0].content))
    assert all(set(arrays_of(reply.content)) == names for reply in [*replies, *others])
    name = "encoder.stages.0.weight"
    same = [
        (arrays_of(a.content)[name] == arrays_of(b.content)[name]).all()
        for a, b in zip(replies, others, strict=True)
    ]
    assert same == [True] * 3 + [False] * 3
    assert strategy.state.stateful_sites == ("s1a", "s2a", "s3a")


def test_a_finished_runs_model_is_a_plain_network(
    inline_run: Callable[..., Any], tiny: Tiny, tmp_path: Path
) -> None:
    directory = inline_run(tiny("cdl"))
    arrays, _ = load_state(directory.path / "model.safetensors")
    site = FinishedRun.open(directory.path).lab("s1a")
    opened = exchanged_arrays(cast(nn.Module, site.open()))
    assert set(opened) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(opened[name].cpu().numpy(), array)
