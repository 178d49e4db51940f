import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
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
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.fedaligncl import Discriminator, FedAlignCLSettings, add_noise
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from tests.support.lab import answer, fitted, steps_of

Opened = Callable[..., Lab]
WIDTH = 16  # channels of the tiny conv network: 4 times its width
QUIET = {"noise_variance": 0.0}


def _network() -> TokenClassifier:
    return build_classifier(CommonSettings(width=4, dropout=0.0), Task((1, 16, 16), 2))


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
        network = _network().eval()  # batch norm by its running figures
        _aligner(network, size)(images, _adam(network))
        found.append(exchanged_arrays(network))
    for name, array in found[0].items():
        assert torch.allclose(array, found[1][name], atol=1e-5), name


def _site(opened: Opened, weights: Any, **more: Any) -> Lab:
    own = QUIET | more.pop("own", {})
    return opened("fedaligncl", weights, own=own, evaluate=False, run_dir="x", **more)


def test_what_leaves_has_the_noise_and_batch_norms_figures_have_none(
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
    local = site.stored["right"].bool()
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
    assert "right" not in _after_a_round(opened, weights, curriculum=False).stored


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
    kept = {n for n in second.stored if n.startswith("discriminator/")}
    assert kept == {
        f"discriminator/layers.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")
    }
    aligner = cast(Aligner, steps_of(second, second.open()).fit["after_step"])
    discriminator, optimiser = aligner.discriminator, aligner.discriminator_optimiser
    assert torch.equal(
        discriminator.state_dict()["layers.0.weight"],
        second.stored["discriminator/layers.0.weight"],
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


@pytest.mark.parametrize("fault", ["missing", "narrow", "infinite"])
def test_a_discriminator_that_is_none_is_refused(
    opened: Opened, weights: dict[str, Any], fault: str
) -> None:
    rival = {} if fault == "missing" else _rival("b")
    if fault == "narrow":
        rival["discriminators/b/layers.0.weight"] = np.zeros((4, 7), np.float32)
    if fault == "infinite":
        rival["discriminators/b/layers.0.bias"] = np.full(4, np.inf, np.float32)
    others = {"embeddings/b": np.ones((4, WIDTH), np.float32)}
    site = _site(opened, weights | others | rival, own={"align_target": "others"})
    with pytest.raises(
        SiteError, match="the discriminator of site b does not take embeddings of 16"
    ):
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
    with pytest.raises(SiteError, match=r"site s1a has not agreed: .* 'allow-embeddings=true'"):
        SiteSession.open(silent)
    for node in (
        context(_hospital(tmp_path, **{"allow-embeddings": True}), method="fedaligncl"),
        context(_hospital(tmp_path), method="fedaligncl", align=False),
        context({"partition-id": 0}, method="fedaligncl"),
    ):
        SiteSession.open(node)


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
    with pytest.raises(SiteError, match=r"training data changed during the run: 36 .* 30 now"):
        answer(site)
