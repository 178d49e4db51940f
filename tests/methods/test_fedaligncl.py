"""Tests of the method 'fedaligncl': equations, site and server."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.adversarial_alignment import (
    Aligner,
    mean_embeddings,
)
from fedsilo.client_app.methods.fedaligncl import _right_predictions
from fedsilo.client_app.session import SiteSession
from fedsilo.client_app.training.compute import choose_compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.core.errors import RefusedError, SettingError, SiteError
from fedsilo.core.messages import ARRAYS, TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.methods.fedaligncl import (
    Discriminator,
    FedAlignCLSettings,
    add_noise,
    alignment_loss,
    curriculum_order,
    curriculum_scores,
    discriminator_loss,
    paired_alignment_loss,
    perturb_arrays,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedaligncl import FedAlignCL, FedAlignCLState
from fedsilo.strategies.wire.reply import Reply, decode
from tests.support.asking import (
    arrays_expected,
    arrays_sent,
    evaluation_of,
    question_of,
    state_after,
)
from tests.support.errors import refuses
from tests.support.lab import answer, fitted, steps_of
from tests.support.methods import Opened, Tiny

# The equations


def test_only_what_was_right_before_and_is_wrong_now_weighs_two() -> None:
    local = torch.tensor([True, True, False, False])
    now = torch.tensor([True, False, True, False])
    assert curriculum_scores(local, now, 2.0).tolist() == [1.0, 2.0, 1.0, 1.0]


@given(st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=40), st.integers(0, 2**31))
def test_the_order_is_a_permutation_whatever_the_scores(scores: list[float], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    order = curriculum_order(torch.tensor(scores, dtype=torch.float64), draw)
    assert sorted(order.tolist()) == list(range(len(scores)))


def test_a_heavy_sample_comes_first_by_the_expected_odds() -> None:
    scores = torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    first = torch.stack([curriculum_order(scores, draw)[:2] for _ in range(6000)])
    shares = torch.bincount(first[:, 0], minlength=4).double() / len(first)
    assert torch.allclose(shares, scores / 5, atol=0.02)  # three standard errors
    # Second, if a light one came first: 2 of the 4 that are left
    light_first = first[first[:, 0] != 1]
    assert (light_first[:, 1] == 1).double().mean().item() == pytest.approx(0.5, abs=0.025)


def _linear(weight: float) -> nn.Module:
    """A discriminator whose logit is ``weight`` times a one-dimensional embedding."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, weight)
    return nn.Sequential(layer, nn.Flatten(0))


def test_the_discriminator_loss_is_that_of_equation_2() -> None:
    own, other = torch.tensor([[2.0]]), torch.tensor([[-1.0], [3.0]])
    p = [1 / (1 + math.exp(-x)) for x in (2.0, -1.0, 3.0)]
    expected = -math.log(p[0]) - (math.log(1 - p[1]) + math.log(1 - p[2])) / 2
    assert discriminator_loss(_linear(1.0), own, other).item() == pytest.approx(expected, rel=1e-6)


def test_the_alignment_loss_is_least_where_the_discriminator_says_one_half() -> None:
    values = {x: alignment_loss(_linear(1.0), torch.tensor([[x]])).item() for x in (-1.0, 0.0, 2.0)}
    assert values[0] == pytest.approx(2 * math.log(2))
    assert values[-1.0] > values[0]
    p = 1 / (1 + math.exp(-2.0))
    assert values[2.0] == pytest.approx(-math.log(p) - math.log(1 - p), rel=1e-6)


def test_the_paired_alignment_loss_is_equation_3_over_two_other_discriminators() -> None:
    own, sent = torch.tensor([[2.0], [-1.0]]), torch.tensor([[2.5], [-1.5]])
    others = [_linear(0.5), _linear(-1.0)]
    log = [-math.log1p(math.exp(-x)) for x in (2.0, -1.0, 1.25, -0.75, -2.5, 1.5)]
    source, first, second = (-(log[n] + log[n + 1]) / 2 for n in (0, 2, 4))
    expected = source + (first + second) / 2
    loss = paired_alignment_loss(_linear(1.0), others, own, sent)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_complement_is_what_a_rival_of_the_opposite_answer_gives() -> None:
    own = torch.tensor([[2.0], [-1.0], [0.5]])
    paired = paired_alignment_loss(_linear(1.0), [_linear(-1.0)], own, own)
    assert paired.item() == pytest.approx(alignment_loss(_linear(1.0), own).item())


def test_no_rival_learns_from_the_paired_loss() -> None:
    extractor, rivals = nn.Linear(1, 3), [Discriminator(3), Discriminator(3)]
    own = extractor(torch.randn(8, 1))
    paired_alignment_loss(Discriminator(3), rivals, own, own + 0.1).backward()
    assert all(p.grad is not None and p.grad.any() for p in extractor.parameters())
    assert all(p.grad is None for rival in rivals for p in rival.parameters())


def test_alignment_moves_the_extractor_and_not_the_discriminator_and_the_other_way_round() -> None:
    extractor, discriminator = nn.Linear(1, 3), Discriminator(3)
    own, other = extractor(torch.randn(8, 1)), torch.randn(8, 3)
    alignment_loss(discriminator, own).backward()
    assert all(p.grad is not None and p.grad.any() for p in extractor.parameters())
    assert all(p.grad is None for p in discriminator.parameters())
    assert all(p.requires_grad for p in discriminator.parameters())
    extractor.zero_grad(set_to_none=True)
    discriminator_loss(discriminator, extractor(torch.randn(8, 1)), other).backward()
    assert all(p.grad is None for p in extractor.parameters())
    assert any(p.grad is not None and p.grad.any() for p in discriminator.parameters())


def _told_apart(detached: bool) -> tuple[float, float]:
    """Train on two Gaussians; return how far apart their features end, and the loss of D."""
    draw = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    own = 3 + torch.randn(256, 1, generator=draw)
    other = torch.randn(256, 1, generator=draw)
    extractor = nn.Linear(1, 1)  # features of the site; the other's come as they are
    nn.init.ones_(extractor.weight)
    nn.init.zeros_(extractor.bias)
    discriminator = Discriminator(1)
    teacher = torch.optim.Adam(discriminator.parameters(), lr=0.02)
    mover = torch.optim.Adam(extractor.parameters(), lr=0.02)
    for _ in range(200):
        teacher.zero_grad()
        discriminator_loss(discriminator, extractor(own), other).backward()
        teacher.step()
        mover.zero_grad()
        features: Tensor = extractor(own)
        loss = alignment_loss(discriminator, features.detach() if detached else features)
        if loss.requires_grad:
            loss.backward()
        mover.step()
    with torch.no_grad():
        shift = (extractor(own).mean() - other.mean()).abs().item()
        return shift, discriminator_loss(discriminator, extractor(own), other).item()


def test_alignment_confuses_the_discriminator_and_the_detached_variant_does_not() -> None:
    shift, loss = _told_apart(detached=False)
    assert shift < 0.5
    assert loss > 1.0  # 1.39 would be answering 1/2 to everything
    shift, loss = _told_apart(detached=True)
    assert shift == pytest.approx(3, abs=0.3)
    assert loss < 0.5


PARAMETERS = {"weight": torch.full((200, 200), 2.0), "running_mean": torch.zeros(7)}
SETTINGS = FedAlignCLSettings()


def test_the_noise_has_the_stated_variance_and_leaves_buffers_alone() -> None:
    found = perturb_arrays(PARAMETERS, {"weight"}, SETTINGS, torch.Generator().manual_seed(0))
    noise = found["weight"] - 2
    assert noise.var().item() == pytest.approx(0.001, rel=0.05)
    assert noise.mean().item() == pytest.approx(0, abs=1e-3)
    assert torch.equal(found["running_mean"], torch.zeros(7))


def test_relative_noise_is_a_factor_of_the_arrays_own_spread() -> None:
    spread = {"weight": torch.linspace(-30, 30, 40_000)}
    settings = replace(SETTINGS, noise_scale="relative")
    found = perturb_arrays(spread, {"weight"}, settings, torch.Generator().manual_seed(0))
    expected = 0.001 * spread["weight"].std(correction=0).item()
    assert (found["weight"] - spread["weight"]).std().item() == pytest.approx(expected, rel=0.02)
    level = perturb_arrays(PARAMETERS, {"weight"}, settings, torch.Generator().manual_seed(0))
    assert torch.equal(level["weight"], PARAMETERS["weight"])  # all values the same: no spread


def test_without_variance_nothing_is_touched() -> None:
    settings = replace(SETTINGS, noise_variance=0.0)
    found = perturb_arrays(PARAMETERS, {"weight"}, settings, torch.Generator())
    assert found == PARAMETERS


# At a site

WIDTH = 16  # channels of the tiny conv network: 4 times its width
QUIET = {"noise_variance": 0.0}


def _network() -> TokenClassifier:
    return build_classifier(CommonSettings(width=4, dropout=0.0), NetworkShape((1, 16, 16), 2))


def _adam(network: TokenClassifier) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=0.01)


def _aligner(network: TokenClassifier, micro_batch: int = 0, weight: float = 1.0) -> Aligner:
    torch.manual_seed(1)
    discriminator = Discriminator(WIDTH)
    rng = torch.Generator().manual_seed(0)
    return Aligner(
        network=network,
        discriminator=discriminator,
        discriminator_optimiser=torch.optim.Adam(discriminator.parameters(), lr=0.01),
        others={"a": torch.randn(9, WIDTH, generator=rng)},
        weight=weight,
        micro_batch=micro_batch,
        compute=choose_compute("cpu", "fp32", 1),
        rng=rng,
    )


def test_a_batchs_alignment_moves_extractor_and_discriminator_and_nothing_else() -> None:
    network = _network().train()
    aligner = _aligner(network)
    before = {name: array.clone() for name, array in exchanged_arrays(network).items()}
    teacher = {n: a.clone() for n, a in aligner.discriminator.state_dict().items()}
    aligner(torch.randn(6, 1, 16, 16), _adam(network))
    after = exchanged_arrays(network)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.startswith("encoder") for name in moved)
    assert not any(name.startswith("head") for name in moved)
    assert not any("running" in name for name in moved)
    assert any(
        not torch.equal(a, aligner.discriminator.state_dict()[n]) for n, a in teacher.items()
    )


def test_parts_of_a_batch_add_up_to_the_whole_where_batch_norm_plays_no_part() -> None:
    images = torch.randn(6, 1, 16, 16)
    found = []
    for size in (0, 2):
        torch.manual_seed(0)
        network = _network().eval()  # batch norm by its running metrics
        _aligner(network, size)(images, _adam(network))
        found.append(exchanged_arrays(network))
    for name, array in found[0].items():
        assert torch.allclose(array, found[1][name], atol=1e-5), name


def _site(opened: Opened, weights: Any, **more: Any) -> Lab:
    own = QUIET | more.pop("own", {})
    return opened("fedaligncl", weights, own=own, evaluate=False, run_dir="x", **more)


def test_what_leaves_has_the_noise_and_batch_norms_metrics_have_none(
    opened: Opened, weights: dict[str, Any]
) -> None:
    quiet, noisy = (
        answer(_site(opened, weights, own={"noise_variance": variance}))[ARRAYS]
        for variance in (0.0, 0.01)
    )
    parameters = dict(_network().named_parameters())
    assert set(quiet) == set(weights)
    noise = []
    for name in quiet:
        difference = noisy[name].numpy() - quiet[name].numpy()
        if name in parameters:
            noise.append(difference.ravel())
        else:
            assert not difference.any(), name
    assert np.concatenate(noise).std() == pytest.approx(0.1, rel=0.05)


def test_embeddings_leave_when_they_are_asked_for_and_never_without_alignment(
    opened: Opened, weights: dict[str, Any]
) -> None:
    asked = {"notes": {"embeddings": 5}}
    found = answer(_site(opened, weights, **asked))[ARRAYS]["embeddings"].numpy()
    assert found.shape == (5, WIDTH)
    assert "embeddings" not in answer(_site(opened, weights, own={"align": False}, **asked))[ARRAYS]
    assert "embeddings" not in answer(_site(opened, weights))[ARRAYS]
    greedy = answer(_site(opened, weights, notes={"embeddings": 36}))[ARRAYS]["embeddings"]
    assert greedy.shape == (8, WIDTH)  # the tiny run's 'fedaligncl.shared-embeddings'


def test_embeddings_are_those_of_training_mode_and_count_no_batch_twice(
    opened: Opened, weights: dict[str, Any]
) -> None:
    own = {"shared_embeddings": 36}
    site = _site(opened, weights, own=own, notes={"embeddings": 36})
    network = cast(TokenClassifier, site.open())
    before = {n: a.clone() for n, a in exchanged_arrays(network).items()}
    found = steps_of(site, network).sent["embeddings"]
    assert all(torch.equal(a, exchanged_arrays(network)[n]) for n, a in before.items())
    with torch.no_grad():
        network.train()
        first = mean_embeddings(network, site.silo.train.inputs[:18])
    # Each half of the samples is a batch of 18: their embeddings have training mode's scale
    assert found.std().item() == pytest.approx(first.std().item(), rel=0.2)


def _after_a_round(opened: Opened, weights: dict[str, Any], **own: Any) -> Lab:
    """Train round 1, and return the site as it opens round 2."""
    answer(_site(opened, weights, own=own))
    return _site(opened, weights, round=2, own=own)


def test_forgotten_samples_are_told_and_come_earlier(
    opened: Opened, weights: dict[str, Any]
) -> None:
    own = {"learning_rate": 0.01, "epoch_steps": 12, "pace": 12, "forgotten_weight": 1e9}
    site = _after_a_round(opened, weights, **own)
    local = site.stored_state["right"].bool()
    network = site.open()  # the initial weights: what was learned is forgotten
    now = _right_predictions(site, network)
    forgotten = set(torch.nonzero(local & ~now).flatten().tolist())
    assert forgotten
    training = steps_of(site, network)
    order = training.fit["order"](1).tolist()
    assert set(order[: len(forgotten)]) == forgotten
    assert sorted(order) == list(range(36))
    assert site.metrics["incoming.train.forgotten"] == pytest.approx(len(forgotten) / 36)


def test_without_curriculum_nothing_is_counted(opened: Opened, weights: dict[str, Any]) -> None:
    assert "right" not in _after_a_round(opened, weights, curriculum=False).stored_state


def test_before_the_warm_up_is_over_the_order_is_any_and_nothing_is_aligned(
    opened: Opened, weights: dict[str, Any]
) -> None:
    others = {"embeddings/b": np.zeros((4, WIDTH), np.float32)}
    site = _site(opened, weights | others, own={"warmup_epochs": 1})
    assert not isinstance(steps_of(site, site.open()).fit["after_step"], Aligner)
    late = _site(opened, weights | others, round=2, own={"warmup_epochs": 1})
    assert isinstance(steps_of(late, late.open()).fit["after_step"], Aligner)


def test_a_site_that_starts_from_its_own_trains_whole_epochs_before_its_first_round_alone(
    opened: Opened, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[list[Tensor]]] = []

    usual = LocalTraining.run

    def train(training: LocalTraining) -> float:
        if training.plan is not None and "pretraining" in training.key:
            seen.append(list(training.plan))
            training.plan = seen[-1]
        return usual(training)

    monkeypatch.setattr(LocalTraining, "run", train)
    own = {"pretraining_epochs": 2, "epoch_steps": 12, "pace": 4}
    site = _site(opened, weights, own=own)
    network = site.open()
    before = {name: array.clone() for name, array in exchanged_arrays(network).items()}
    fitted(site, network)
    (plan,) = seen
    epochs = [torch.cat(epoch).tolist() for epoch in plan]
    assert [sorted(epoch) for epoch in epochs] == [list(range(36))] * 2, "12 steps of 3 of 36"
    assert epochs[0] != epochs[1]
    moved = exchanged_arrays(network)
    assert any(not torch.equal(before[name], array) for name, array in moved.items())
    later = _site(opened, weights, round=2, own=own)
    fitted(later, later.open())
    without = _site(opened, weights, own=own | {"pretraining_epochs": 0})
    fitted(without, without.open())
    assert len(seen) == 1


def test_the_discriminator_stays_at_the_site_and_goes_on(
    opened: Opened, weights: dict[str, Any]
) -> None:
    others = {"embeddings/b": np.ones((4, WIDTH), np.float32)}
    site = _site(opened, weights | others)
    reply = answer(site)
    assert not any("discriminator" in name for name in reply[ARRAYS])
    second = _site(opened, weights | others, round=2)
    kept = {n for n in second.stored_state if n.startswith("discriminator/")}
    assert kept == {
        f"discriminator/layers.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")
    }
    aligner = cast(Aligner, steps_of(second, second.open()).fit["after_step"])
    discriminator, optimiser = aligner.discriminator, aligner.discriminator_optimiser
    assert torch.equal(
        discriminator.state_dict()["layers.0.weight"],
        second.stored_state["discriminator/layers.0.weight"],
    )
    steps = [optimiser.state[p]["step"].item() for p in discriminator.parameters()]
    assert steps == [2.0] * 4  # one other site, two batches


def _rival(site: str, seed: int = 5) -> dict[str, Any]:
    torch.manual_seed(seed)
    arrays = Discriminator(WIDTH).state_dict()
    return {f"discriminators/{site}/{name}": array.numpy() for name, array in arrays.items()}


def test_the_others_discriminators_are_the_target_where_they_are_asked_for(
    opened: Opened, weights: dict[str, Any]
) -> None:
    own, others = {"align_target": "others"}, {"embeddings/b": np.ones((4, WIDTH), np.float32)}
    received = weights | others | _rival("b")
    site = _site(opened, received, own=own)
    aligner = cast(Aligner, steps_of(site, site.open()).fit["after_step"])
    (rival,) = aligner.rivals
    assert torch.equal(
        rival.layers[0].weight, torch.as_tensor(received["discriminators/b/layers.0.weight"])
    )
    other = _site(opened, weights | others | _rival("b", 6), own=own)
    replies = [answer(one)[ARRAYS] for one in (site, other)]
    assert any((replies[0][n].numpy() != replies[1][n].numpy()).any() for n in weights)
    asked = _site(opened, received, own=own, notes={"embeddings": 5})
    left = answer(asked)[ARRAYS]
    assert {n for n in left if n.startswith("discriminator/")} == {
        f"discriminator/layers.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")
    }


@pytest.mark.parametrize(
    ("fault", "said"),
    [("missing", 16), ("narrow", 16), ("infinite", "train.learning-rate")],
)
def test_a_discriminator_that_is_none_is_refused_with_what_is_wrong(
    opened: Opened, weights: dict[str, Any], fault: str, said: int | str
) -> None:
    rival = {} if fault == "missing" else _rival("b")
    if fault == "narrow":
        rival["discriminators/b/layers.0.weight"] = np.zeros((4, 7), np.float32)
    if fault == "infinite":
        rival["discriminators/b/layers.0.bias"] = np.full(4, np.inf, np.float32)
    others = {"embeddings/b": np.ones((4, WIDTH), np.float32)}
    site = _site(opened, weights | others | rival, own={"align_target": "others"})
    with refuses(SiteError, said):
        answer(site)


def test_a_target_has_the_noise_that_it_would_leave_with_and_its_own_gradient() -> None:
    own = torch.ones(4000, WIDTH, requires_grad=True)
    settings = FedAlignCLSettings(noise_variance=0.04)
    noisy = add_noise(own, settings, torch.Generator().manual_seed(7))
    assert (noisy - own).std().item() == pytest.approx(0.2, rel=0.02)
    noisy.sum().backward()
    assert own.grad is not None
    assert (own.grad == 1).all()


def test_alignment_changes_what_leaves(opened: Opened, weights: dict[str, Any]) -> None:
    others = {"embeddings/b": np.ones((4, WIDTH), np.float32)}
    with_others = answer(_site(opened, weights | others, site="s1a"))[ARRAYS]
    alone = answer(_site(opened, weights, site="s2a"))[ARRAYS]
    assert set(with_others) == set(alone) == set(weights)
    off = answer(_site(opened, weights | others, site="s1a", own={"align": False}))[ARRAYS]
    assert any((off[n].numpy() != with_others[n].numpy()).any() for n in off)


@pytest.mark.parametrize(
    ("name", "array", "told"),
    [
        ("embeddings/b", np.zeros((4, 7), np.float32), r"site b are \(4, 7\).*any, 16"),
        ("embeddings/b", np.zeros(16, np.float32), r"site b are \(16,\)"),
        ("embeddings/b", np.full((4, 16), np.nan, np.float32), "finite"),
        ("embeddings/s1a", np.zeros((4, 16), np.float32), "its own embeddings"),
    ],
)
def test_embeddings_of_another_width_or_its_own_are_refused(
    opened: Opened, weights: dict[str, Any], name: str, array: Any, told: str
) -> None:
    with pytest.raises(SiteError, match=told):
        answer(_site(opened, weights | {name: array}))


def test_the_classifier_is_untouched_by_alignment_alone(
    opened: Opened, weights: dict[str, Any]
) -> None:
    site = _site(opened, weights)
    network = cast(nn.Module, site.open())
    assert isinstance(network, TokenClassifier)
    assert network.channels == WIDTH


def _hospital(tmp_path: Path, **node: Any) -> dict[str, Any]:
    return {"site": "s1a", "state-dir": str(tmp_path / "own"), "trust": "server", **node}


def test_a_real_hospital_sends_no_embeddings_before_it_agrees(
    context: Callable[..., Any], tmp_path: Path
) -> None:
    silent = context(_hospital(tmp_path), method="fedaligncl")
    with refuses(RefusedError, "s1a", "allow-embeddings=true"):
        SiteSession.from_context(silent)
    for node in (
        context(_hospital(tmp_path, **{"allow-embeddings": True}), method="fedaligncl"),
        context(_hospital(tmp_path), method="fedaligncl", align=False),
        context({"partition-id": 0}, method="fedaligncl"),
    ):
        SiteSession.from_context(node)


def test_embeddings_are_of_the_same_images_all_run_unless_asked_otherwise(
    opened: Opened, weights: dict[str, Any]
) -> None:
    def found(draw: str, round_: int) -> Any:
        own = {"embedding_draw": draw}
        site = _site(opened, weights, own=own, round=round_, notes={"embeddings": 5})
        return steps_of(site).sent["embeddings"]

    assert torch.equal(found("run", 1), found("run", 2))
    assert not torch.equal(found("round", 1), found("round", 2))


def test_embeddings_are_not_sent_before_they_are_of_use(
    opened: Opened, weights: dict[str, Any]
) -> None:
    own = {"warmup_epochs": 2, "rounds": 4}
    early = _site(opened, weights, own=own, notes={"embeddings": 5}, round=1)
    assert "embeddings" not in answer(early)[ARRAYS]
    late = _site(opened, weights, own={"warmup_epochs": 1}, notes={"embeddings": 5}, round=1)
    assert "embeddings" in answer(late)[ARRAYS]


def test_other_data_than_the_sites_state_is_of_are_told(
    opened: Opened, weights: dict[str, Any]
) -> None:
    site = _after_a_round(opened, weights)
    fewer = Split(site.silo.train.inputs[:30], site.silo.train.labels[:30])
    site.silo = dataclasses.replace(site.silo, train=fewer)
    with refuses(SiteError, 36, 30):
        answer(site)


# At the server

# Two rounds an epoch; alignment from the second epoch on, which is round 3
COMMON = CommonSettings(epoch_steps=4, pace=2, width=4, rounds=6, silos=3)
OWN = FedAlignCLSettings(warmup_epochs=1, shared_embeddings=40)
SpiedRun = Callable[..., Any]


@pytest.fixture
def strategy(participants: Participants) -> FedAlignCL:
    return FedAlignCL(COMMON, OWN, participants)


def _after(round_: int, **arrays: Any) -> FedAlignCLState:
    return FedAlignCLState({"w": np.zeros(2, np.float32), **arrays}, round_)


def test_embeddings_are_asked_for_in_the_round_before_each_that_aligns(
    strategy: FedAlignCL,
) -> None:
    asked = [question_of(strategy, _after(r)).notes["s1a"].embeddings for r in range(6)]
    # Rounds 1 to 6: round 3 is the first to align, nobody uses what comes in round 6
    assert asked == [0, 36, 36, 36, 36, 0]
    assert evaluation_of(strategy, _after(6)).notes == {}
    spec = arrays_expected(strategy, _after(1))["s1a"]["embeddings"]
    assert spec.shape == (36, 16)  # all of its samples: fewer than 40; channels 4 * width
    assert "embeddings" not in arrays_expected(strategy, _after(0))["s1a"]


def test_a_site_is_sent_the_others_embeddings_and_never_its_own(strategy: FedAlignCL) -> None:
    buffers = {f"embeddings/{s}": np.zeros((2, 16), np.float32) for s in ("s1a", "s2a", "s3a")}
    state = _after(2, **buffers)
    sent = arrays_sent(strategy, state)["s2a"]
    assert set(sent) == {"w", "embeddings/s1a", "embeddings/s3a"}
    assert set(evaluation_of(strategy, state).send["s2a"]) == {"w"}


def _replies(site_reply: Callable[..., Reply], **more: Any) -> dict[str, Reply]:
    values = {"s1a": (0.0, 10), "s2a": (3.0, 30)}
    return {
        site: site_reply(site, {"w": np.full(2, value, np.float32), **more}, num_examples=count)
        for site, (value, count) in values.items()
    }


def test_sites_weigh_the_same(participants: Participants, site_reply: Callable[..., Reply]) -> None:
    strategy = FedAlignCL(COMMON, FedAlignCLSettings(align=False), participants)
    after = state_after(strategy, _after(0), _replies(site_reply))
    assert after.arrays["w"].tolist() == [1.5, 1.5]


def test_the_newest_embeddings_replace_all_older_ones(
    strategy: FedAlignCL, site_reply: Callable[..., Reply]
) -> None:
    old = {"embeddings/s3a": np.ones((2, 16), np.float32)}
    received = {"embeddings": np.full((36, 16), 2, np.float32)}
    after = state_after(strategy, _after(2, **old), _replies(site_reply, **received))
    assert set(after.arrays) == {"w", "embeddings/s1a", "embeddings/s2a"}
    last = state_after(strategy, _after(5, **after.arrays), _replies(site_reply))
    assert set(last.arrays) == {"w"}


def test_the_share_that_each_site_forgot_is_remembered_by_epoch(
    strategy: FedAlignCL, site_reply: Callable[..., Reply]
) -> None:
    told = {
        "s1a": site_reply(
            "s1a", {"w": np.zeros(2, np.float32)}, **{"incoming.train.forgotten": 0.25}
        )
    }
    after = state_after(strategy, _after(0), told)
    document = strategy.documents(after, {})["forgotten.json"]
    assert document == {"variant": "Fed-Align-CL", "epochs": {"0": {"s1a": 0.25}}}
    later = dataclasses.replace(after, round=1)  # one that missed the epoch's first round
    metrics = {"incoming.train.forgotten": 0.5}
    late = {"s3a": site_reply("s3a", {"w": np.zeros(2, np.float32)}, **metrics)}
    alone = FedAlignCL(COMMON, FedAlignCLSettings(align=False), strategy.participants)
    both = alone.documents(state_after(alone, later, late), {})["forgotten.json"]
    assert both["epochs"] == {"0": {"s1a": 0.25, "s3a": 0.5}}
    assert strategy.documents(_after(0), {}) == {}


@pytest.mark.parametrize(
    ("align", "curriculum", "name"),
    [(False, False, "Fed"), (False, True, "Fed-CL"), (True, False, "Fed-Align")],
)
def test_the_switches_have_the_papers_names(
    align: bool, curriculum: bool, name: str, participants: Participants
) -> None:
    own = FedAlignCLSettings(align=align, curriculum=curriculum)
    strategy = FedAlignCL(COMMON, own, participants)
    assert strategy.variant() == name
    words = " ".join(strategy.disclosures().leaves)
    assert ("embeddings" in words) == align
    assert ("forgotten" in words) == curriculum
    assert "Gaussian noise of variance 0.001" in words


def test_without_noise_it_says_so_and_relative_noise_is_told_as_such(
    participants: Participants,
) -> None:
    quiet = FedAlignCL(COMMON, FedAlignCLSettings(noise_variance=0.0), participants)
    assert "without noise" in " ".join(quiet.disclosures().leaves)
    relative = FedAlignCL(COMMON, FedAlignCLSettings(noise_scale="relative"), participants)
    assert "0.001 times their spread" in " ".join(relative.disclosures().leaves)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train.epoch-steps": 0, "train.pace": 40}, ["train.epoch-steps"]),
        ({"train.epoch-steps": 4, "train.pace": 3}, ["pace", "train.epoch-steps", 3]),
        ({"fedaligncl.warmup-epochs": 2}, [2, 1]),
        (
            {"fedaligncl.noise-variance": -0.001},
            ["fedaligncl.noise-variance", "-0.001", 0],
        ),
        ({"network": "vit", "backbone-weights": "random"}, ["vit"]),
        ({"dataset": "heart-synthetic"}, []),
        ({"fedaligncl.noise-scale": "both"}, []),
    ],
)
def test_settings_that_cannot_be_are_refused(
    changes: dict[str, Any], told: list[object], tiny: Tiny
) -> None:
    values = tiny("fedaligncl") | changes
    if changes.get("dataset"):
        for key in ("split.silos", "split.silo-train-size", "split.silo-test-size"):
            values.pop(key)
    with refuses(SettingError, *told):
        resolve(values)


def test_embeddings_travel_from_site_to_site_in_a_run(spied_run: SpiedRun, tiny: Tiny) -> None:
    grid, _ = spied_run(tiny("fedaligncl", rounds=3, warmup_epochs=1, noise_variance=0.0))
    sent = [m for m in grid.sent if m.metadata.message_type == TRAIN]
    by_round = {r: [m for m in sent if m.metadata.group_id == str(r)] for r in (1, 2, 3)}
    received = {m.metadata.src_node_id: m for m in grid.replies if m.metadata.group_id == "1"}
    for message in by_round[1]:
        assert not [n for n in message.content[ARRAYS] if n.startswith("embeddings")]
    for message in by_round[2]:
        names = {n for n in message.content[ARRAYS] if n.startswith("embeddings/")}
        own = "embeddings/" + {1001: "s1a", 1002: "s2a", 1003: "s3a"}[message.metadata.dst_node_id]
        assert len(names) == 2
        assert own not in names
    first = by_round[2][0].content[ARRAYS]["embeddings/s3a"].numpy()
    assert (first == received[1003].content[ARRAYS]["embeddings"].numpy()).all()


def test_a_reply_with_embeddings_of_another_width_stops_the_run(
    strategy: FedAlignCL, content: Callable[..., Any], measured: dict[str, float]
) -> None:
    arrays = {"w": np.zeros(2, np.float32), "embeddings": np.zeros((36, 7), np.float32)}
    expected = arrays_expected(strategy, _after(1))["s1a"]
    told = r"^array 'embeddings' is float32 \(36, 7\), expected float32 \(36, 16\)$"
    with pytest.raises(SiteError, match=told):
        decode("s1a", content(arrays, **measured), expected)


def test_the_finished_model_is_the_weights_and_no_sites_embeddings(strategy: FedAlignCL) -> None:
    state = _after(4, **{"embeddings/s1a": np.zeros((2, 16), np.float32)})
    assert set(strategy.model(state)) == {"w"}


def test_discriminators_travel_with_the_embeddings_where_they_are_the_target(
    spied_run: SpiedRun, tiny: Tiny
) -> None:
    named = tiny("fedaligncl", rounds=3, warmup_epochs=1, noise_variance=0.0)
    grid, loop = spied_run(named | {"fedaligncl.align-target": "others"})
    received = {m.metadata.src_node_id: m for m in grid.replies if m.metadata.group_id == "1"}
    own = {n: a.numpy() for n, a in received[1003].content[ARRAYS].items() if n.startswith("discr")}
    assert sum(array.size for array in own.values()) == 4 * 16 + 4 + 4 + 1
    sent = next(m for m in grid.sent if m.metadata.group_id == "2")
    arrays = {n: a.numpy() for n, a in sent.content[ARRAYS].items()}
    sites = {n.split("/")[1] for n in arrays if n.startswith("discriminators/")}
    assert sites == {"s2a", "s3a"}
    for name, array in own.items():
        assert (arrays[f"discriminators/s3a/{name.removeprefix('discriminator/')}"] == array).all()
    last = [m for m in grid.replies if m.metadata.group_id == "3"]
    assert not [n for m in last for n in m.content.array_records.get(ARRAYS, {}) if "discr" in n]
    assert "the weights of the site's discriminator" in str(loop.method.disclosures().leaves)
