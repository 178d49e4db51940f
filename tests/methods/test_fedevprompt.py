"""Tests of the method 'fedevprompt': equations, site, server and whole runs."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedsilo.client_app.methods.fedevprompt as site_side
import fedsilo.client_app.opening
import fedsilo.engines.inline_engine
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.fedevprompt import FedEvPromptSite
from fedsilo.client_app.site.private_state import SiteState, settings_digest_of
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.core.errors import CheckpointError, SettingError, SiteError
from fedsilo.core.files.state_files import load_state, save_state
from fedsilo.core.messages import ARRAYS, EVALUATE, HELLO, METRICS, TRAIN, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.methods.fedevprompt import (
    FedEvPromptSettings,
    any_of_class,
    map_fault,
    most_certain,
    shared_names,
)
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.site_network import SiteNetwork, exchanged_arrays
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.loop.method import State, initial_weights, starting_network
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedevprompt import FedEvPrompt
from fedsilo.strategies.wire.records import record_bytes
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, fault_of, state_after
from tests.support.dying_grid import DyingGrid
from tests.support.errors import refuses
from tests.support.lab import answer, steps_of
from tests.support.methods import (
    ALL,
    Behaviour,
    InlineRun,
    Opened,
    SharedRun,
    SiteReply,
    Tiny,
    arrays_of,
)
from tests.support.tiny import VIT_FIELDS

# The equations. What enters the attention buffer, by hand.

VACUITIES = torch.tensor([0.9, 0.2, 0.5, 0.2, 0.1, 0.2])
LABELS = torch.tensor([0, 1, 1, 1, 0, 1])
NAMES = ["head.1.bias", "head.1.weight", "prompts.b", "prompts.t"]


@pytest.mark.parametrize(
    ("label", "count", "chosen"),
    [
        (1, 1, [1]),
        (1, 2, [1, 3]),  # equal ones by their order
        (1, 4, [1, 3, 5, 2]),
        (1, 9, [1, 3, 5, 2]),  # there are no more
        (0, 1, [4]),
        (0, 2, [4, 0]),
        (2, 3, []),
    ],
)
def test_the_samples_of_the_lowest_vacuity_are_chosen(
    label: int, count: int, chosen: list[int]
) -> None:
    assert most_certain(VACUITIES, LABELS, label, count).tolist() == chosen


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=1, max_size=30), st.integers(1, 6))
def test_of_equal_vacuities_the_first_are_chosen(values: list[float], count: int) -> None:
    found = most_certain(torch.tensor(values), torch.zeros(len(values)), 0, count)
    expected = sorted(range(len(values)), key=lambda at: (values[at], at))[:count]
    assert found.tolist() == expected


def test_any_samples_of_the_class_are_drawn_by_the_generator() -> None:
    labels = torch.arange(300) % 3
    first, again, other = (
        any_of_class(labels, 1, 5, torch.Generator().manual_seed(seed)).tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) == 5
    assert all(index % 3 == 1 for index in first + other)


def test_most_certain_of_few_samples_returns_all_and_of_none_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    assert sorted(any_of_class(LABELS, 0, 5, draw).tolist()) == [0, 4]
    assert any_of_class(LABELS, 2, 5, draw).tolist() == []


@pytest.mark.parametrize(
    ("maps", "fault"),
    [
        ([[0.25, 0.75], [0.5, 0.5]], None),
        ([[1.0, 0.0]], None),
        ([[0.5, 0.5004]], None),  # float32 sums of many cells are not exact
        ([[0.5, 0.5], [-0.25, 1.25]], r"a map has a negative value (-0.25)"),
        ([[0.5, 0.5], [0.5, 0.625]], "a map sums to 1.125, not to 1"),
        ([[0.5, 0.375]], "a map sums to 0.875, not to 1"),
        ([[0.0, 0.0]], "a map sums to 0, not to 1"),
        ([[float("nan"), 0.5]], "a map contains non-finite values"),
        ([[0.5, 0.5], [float("inf"), 0.5]], "a map contains non-finite values"),
    ],
)
def test_map_fault_of_an_impossible_map_names_the_fault(
    maps: list[list[float]], fault: str | None
) -> None:
    assert map_fault(torch.tensor(maps)) == fault


def test_no_map_has_no_fault() -> None:
    assert map_fault(torch.zeros(0, 4)) is None


@given(st.integers(1, 5), st.integers(1, 400), st.integers(0, 99))
def test_what_softmax_gives_is_a_map(count: int, cells: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    assert map_fault((5 * torch.randn(count, cells, generator=draw)).softmax(dim=1)) is None


@pytest.mark.parametrize(("shared", "names"), [("none", []), ("b", ["prompts.b"]), ("all", NAMES)])
def test_what_is_averaged_follows_from_the_setting(shared: str, names: list[str]) -> None:
    assert shared_names(FedEvPromptSettings(shared_prompts=shared), NAMES) == names


# At a site. FedEvPrompt at a site: what it trains on, sends and keeps, and what it refuses.

METHOD = "fedevprompt"
CELLS = 16  # 16x16 pixels in patches of 4
OWN = ["head.1.bias", "head.1.weight", "prompts.b", "prompts.t"]
STEPS = 3  # 36 samples in batches of 16


def kept_by(method: FedEvPromptSite, round_: int = 1) -> dict[str, Tensor]:
    arrays, _ = load_state(method.state_files.folder / f"round-{round_:06d}-00.safetensors")
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def counts_of(method: FedEvPromptSite) -> list[int]:
    return torch.bincount(method.silo.train.labels, minlength=10).tolist()


def a_map(*masses: float) -> Any:
    return np.float32([[*masses, *[0.0] * (CELLS - len(masses))]])


@pytest.fixture
def buffer() -> dict[str, Any]:
    """Return maps of two other sites: of all classes, and of class 3."""
    draw = np.random.default_rng(0)
    raw = draw.random((10, 2, CELLS)).astype(np.float32)
    maps = raw / raw.sum(axis=2, keepdims=True)
    found = {f"maps/s2a/{label}": maps[label] for label in range(10)}
    return found | {"maps/s3a/3": maps[0][:1]}


def test_a_reply_holds_maps_of_the_sites_own_classes_and_no_weights(opened: Opened) -> None:
    method = opened(METHOD)
    found = arrays_of(answer(method))
    counts = counts_of(method)
    assert set(found) == {f"maps/{label}" for label, count in enumerate(counts) if count}
    for name, maps in found.items():
        assert maps.shape == (min(2, counts[int(name.removeprefix("maps/"))]), CELLS)
        assert maps.dtype == np.float32
        np.testing.assert_allclose(maps.sum(axis=1), 1, atol=1e-5)
        assert (maps >= 0).all()


def test_prompts_head_and_the_optimisers_moments_stay_at_the_site(opened: Opened) -> None:
    method = opened(METHOD, own={"optimiser_state": "run"})
    reply = answer(method)
    assert reply[METRICS]["kept-state"] == 1
    kept = kept_by(method)
    moments = {f"pace/optimiser/{n}/{m}" for n in OWN for m in ("step", "exp_avg", "exp_avg_sq")}
    assert set(kept) == {f"network/{name}" for name in OWN} | moments
    for name in OWN:
        assert kept[f"pace/optimiser/{name}/step"].item() == STEPS
        assert kept[f"pace/optimiser/{name}/exp_avg"].shape == kept[f"network/{name}"].shape
    (path,) = method.state_files.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_site_starts_from_the_seeds_weights_and_goes_on_from_its_own(opened: Opened) -> None:
    first = opened(METHOD)
    start = exchanged_arrays(cast(PromptedViT, first.open()))
    seeds = initial_weights(starting_network(first.common, first.silo.shape))
    for name in OWN:
        np.testing.assert_array_equal(start[name], seeds[name])
    answer(first)
    kept = kept_by(first)
    later = exchanged_arrays(cast(PromptedViT, opened(METHOD, round=2).open()))
    for name in OWN:
        assert torch.equal(later[name], kept[f"network/{name}"])
        assert not torch.equal(later[name], start[name])


def test_b_prompts_have_a_step_size_of_their_own(opened: Opened) -> None:
    method = opened(METHOD, own={"learning_rate": 0.5, "basic_learning_rate": 0.25})
    network = cast(PromptedViT, method.open())
    groups = open_optimiser(network, method.common).param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    named = dict(network.named_parameters())
    assert {name: rates[id(named[name])] for name in OWN} == {
        "head.1.bias": 0.5,
        "head.1.weight": 0.5,
        "prompts.b": 0.25,
        "prompts.t": 0.5,
    }
    assert len(rates) == 4


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_any_optimiser_keeps_what_it_has(opened: Opened, optimiser: str) -> None:
    for round_ in (1, 2):
        method = opened(
            METHOD, own={"optimiser": optimiser, "optimiser_state": "run"}, round=round_
        )
        answer(method)
        kept = kept_by(method, round_)
        assert {name for name in kept if name.startswith("network/")} == {
            f"network/{name}" for name in OWN
        }
        moments = {name.rpartition("/")[2] for name in kept if name.startswith("pace/optimiser/")}
        assert moments == ({"step", "exp_avg", "exp_avg_sq"} if optimiser == "adamw" else set())


@pytest.mark.parametrize(("shared", "sent"), [("none", []), ("b", ["prompts.b"]), ("all", OWN)])
def test_what_is_averaged_is_sent_and_the_rest_kept(
    opened: Opened, shared: str, sent: list[str]
) -> None:
    method = opened(METHOD, own={"shared_prompts": shared})
    found = arrays_of(answer(method))
    assert sorted(name for name in found if not name.startswith("maps/")) == sent
    private = [name for name in OWN if name not in sent]
    if not private:
        assert not method.state_files.folder.exists()
        return
    kept = kept_by(method)
    assert {name.removeprefix("network/") for name in kept if name.startswith("network/")} == set(
        private
    )
    assert {name.split("/")[1] for name in kept} == set(private)


def test_what_comes_averaged_replaces_the_sites_own_and_the_rest_is_kept(opened: Opened) -> None:
    own = {"shared_prompts": "b"}
    answer(opened(METHOD, own=own))
    received = {"prompts.b": np.full((1, 2, 3, 16), 0.5, np.float32)}
    second = opened(METHOD, received, own=own, round=2)
    arrays = exchanged_arrays(cast(PromptedViT, second.open()))
    assert (arrays["prompts.b"] == 0.5).all()
    kept = kept_by(second)
    for name in ("head.1.bias", "head.1.weight", "prompts.t"):
        assert torch.equal(arrays[name], kept[f"network/{name}"])


def test_without_distillation_no_map_leaves_the_site(opened: Opened) -> None:
    reply = answer(opened(METHOD, own={"distillation_weight": 0.0}))
    assert ARRAYS not in reply
    assert reply[METRICS]["kept-state"] == 1


def vacuities_by_hand(method: FedEvPromptSite, network: PromptedViT) -> Tensor:
    """Return K / S of each training sample, from the head's outputs and the silo's own counts."""
    counts = torch.tensor(counts_of(method), dtype=torch.float64)
    prior = (10 / 9 * (1 - counts / counts.sum())).float()
    with torch.no_grad():
        outputs = network.head(network.encode(method.silo.train.inputs).flatten(1))
        return 10 / (torch.nn.functional.softplus(outputs) + prior).sum(dim=1)


def test_the_maps_are_those_of_the_training_samples_of_the_lowest_vacuity(opened: Opened) -> None:
    method = opened(METHOD, own={"local_epochs": 3, "learning_rate": 0.05})
    sent = arrays_of(answer(method))
    network = cast(PromptedViT, opened(METHOD, round=2).open()).eval()
    vacuities, labels = vacuities_by_hand(method, network), method.silo.train.labels
    assert len(sent) > 1
    for name, maps in sent.items():
        own = (labels == int(name.removeprefix("maps/"))).nonzero().flatten().tolist()
        chosen = sorted(own, key=lambda at: vacuities[at].item())[:2]
        with torch.no_grad():
            expected = network.encode_with_rollout(method.silo.train.inputs[chosen])[1]
        np.testing.assert_allclose(maps, expected, atol=1e-6)
    spread = [vacuities[labels == int(name[5:])].std().item() for name in sent]
    assert max(spread) > 1e-4


def test_a_random_choice_is_keyed_on_the_round(opened: Opened) -> None:
    own = {"buffer_selection": "random", "buffer_maps": 1}
    first, again = (arrays_of(answer(opened(METHOD, own=own))) for _ in range(2))
    certain = arrays_of(answer(opened(METHOD, own={"buffer_maps": 1})))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not all(np.array_equal(first[name], certain[name]) for name in first)
    network = opened(METHOD, own=own, round=2).open()
    maps = [steps_of(opened(METHOD, own=own, round=round_), network).sent for round_ in (5, 6)]
    assert not all(torch.equal(maps[0][name], maps[1][name]) for name in maps[0])


def test_others_maps_pull_the_sites_own_and_a_larger_weight_pulls_harder(
    opened: Opened, buffer: dict[str, Any]
) -> None:
    losses, ends = [], []
    for weight in (0.001, 1.0):
        method = opened(METHOD, buffer, own={"distillation_weight": weight, "dropout": 0.0})
        objective = steps_of(method, network := method.open()).loss
        inputs, labels = method.silo.train.inputs, method.silo.train.labels
        vit = cast(PromptedViT, network)
        task = vit.loss(inputs, labels).item()
        losses.append((objective(inputs, labels).item() - task) / weight)
        answer(method)
        ends.append(kept_by(method)["network/prompts.b"])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[1] > 0.01
    assert not torch.equal(*ends)


@pytest.mark.parametrize("prompt_columns", ["renormalise", "drop"])
def test_the_objective_is_eq_7_over_all_the_maps_that_came(
    prompt_columns: str, opened: Opened, buffer: dict[str, Any]
) -> None:
    own = {"map_prompts": prompt_columns, "distillation_weight": 1.0, "dropout": 0.0}
    method = opened(METHOD, buffer, own=own)
    vit = cast(PromptedViT, method.open())
    inputs, labels = method.silo.train.inputs, method.silo.train.labels

    def enlarged(map_: Tensor) -> Tensor:
        return torch.nn.functional.interpolate(
            map_.reshape(1, 1, 4, 4), size=(16, 16), mode="bilinear", align_corners=False
        )

    with torch.no_grad():
        found = steps_of(method, vit).loss(inputs, labels) - vit.loss(inputs, labels)
        total, maps = 0.0, vit.encode_with_rollout(inputs, prompt_columns == "renormalise")[1]
        for map_, label in zip(maps, labels.tolist(), strict=True):
            received = [a for n, a in buffer.items() if n.endswith(f"/{label}")]
            for other in np.concatenate(received):
                away = enlarged(map_) - enlarged(torch.from_numpy(other))
                total += away.square().sum().item() / 2  # M is 2
    assert found.item() == pytest.approx(total / len(labels), rel=1e-4)


def test_distillation_of_byte_maps_is_65025_times_that_of_maps_by_their_maximum(
    opened: Opened, buffer: dict[str, Any]
) -> None:
    found = {}
    for scale in ("max", "byte"):
        own = {"map_scale": scale, "distillation_weight": 1.0, "dropout": 0.0}
        method = opened(METHOD, buffer, own=own)
        vit = cast(PromptedViT, method.open())
        inputs, labels = method.silo.train.inputs, method.silo.train.labels
        with torch.no_grad():
            both = steps_of(method, vit).loss(inputs, labels).item()
            found[scale] = both - vit.loss(inputs, labels).item()
    assert found["byte"] == pytest.approx(255**2 * found["max"], rel=1e-3)


def test_without_others_maps_the_objective_is_the_networks_own(opened: Opened) -> None:
    method = opened(METHOD)
    network = method.open()
    assert steps_of(method, network).loss == network.loss


@pytest.mark.parametrize(
    ("received", "said"),
    [
        (a_map(0.5, 0.75, -0.25), r"a map has a negative value \(-0.25\)"),
        (a_map(0.5, 0.25), r"a map sums to 0.75, not to 1"),
        (a_map(0.5, np.nan), r"a map contains non-finite values"),
        (np.float32([[1.0]]), r"it is \(1, 1\), not \(any, 16\)"),
        (a_map(1.0)[0], r"it is \(16,\), not \(any, 16\)"),
    ],
)
def test_a_map_that_cannot_be_one_is_refused_before_training(
    opened: Opened, buffer: dict[str, Any], received: Any, said: str
) -> None:
    method = opened(METHOD, buffer | {"maps/s3a/3": received}, round=2)
    with pytest.raises(SiteError, match=rf"buffer's entry for site s3a, class 3: {said}"):
        answer(method)
    assert not method.state_files.folder.exists()


def stored(method: FedEvPromptSite, value: float, *names: str) -> Path:
    """Store a state of round 1 whose arrays ``names`` are ``value`` throughout."""
    start = initial_weights(starting_network(method.common, method.silo.shape))
    arrays = {
        f"network/{name}": np.full_like(array, value) if name in names else array
        for name, array in start.items()
    }
    path = method.state_files.folder / "round-000001-00.safetensors"
    save_state(path, arrays, {"round": 1, "step": 0})
    return path


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("evaluate", [False, True])
def test_a_network_that_is_not_finite_is_told_of_and_nothing_is_kept(
    opened: Opened, name: str, evaluate: bool
) -> None:
    path = stored(opened(METHOD), float("nan"), name)
    before = path.read_bytes()
    method = opened(METHOD, round=2, evaluate=evaluate)
    with pytest.raises(SiteError, match="training diverged, its loss is nan"):
        answer(method)
    assert [p.name for p in method.state_files.folder.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_state_that_is_cut_short_or_altered_names_the_site(opened: Opened) -> None:
    answer(opened(METHOD, site="s2a"))
    second = opened(METHOD, site="s2a", round=2)
    (path,) = second.state_files.folder.iterdir()
    whole = path.read_bytes()
    for content in (whole[:-7], whole[: len(whole) // 2], b"", whole[:-1] + b"\x55"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"private state of site s2a: .*remove the file"):
            answer(opened(METHOD, site="s2a", round=2, expects_state=True))
    path.write_bytes(whole)
    answer(opened(METHOD, site="s2a", round=2, expects_state=True))


def test_a_state_that_is_gone_is_no_fresh_start(opened: Opened) -> None:
    with pytest.raises(CheckpointError, match="private state of site s1a is gone from"):
        answer(opened(METHOD, round=2, expects_state=True))


def test_epochs_of_all_rounds_weigh_the_divergence_in(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    usual = LocalTraining.run

    def watched(training: LocalTraining) -> float:
        network, anneal = cast(PromptedViT, training.network), training.before_pass
        assert anneal is not None

        def begins(number: int) -> None:
            anneal(number)
            assert network.evidence is not None
            seen.append(network.evidence.kl_weight)

        return usual(dataclasses.replace(training, before_pass=begins))

    monkeypatch.setattr(LocalTraining, "run", watched)
    for round_ in (1, 2, 4, 9):
        answer(opened(METHOD, own={"local_epochs": 3}, round=round_))
    assert seen == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 1, 1, 1, 1, 1]


def test_the_prior_is_that_of_the_sites_own_training_data(opened: Opened) -> None:
    method = opened(METHOD)
    evidence = cast(PromptedViT, method.open()).evidence
    assert evidence is not None
    counts = counts_of(method)
    expected = [10 / 9 * (1 - count / sum(counts)) for count in counts]
    assert evidence.prior.tolist() == pytest.approx(expected, rel=1e-5)


def test_maps_are_taken_after_training_and_in_eval_mode(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    usual = site_side.over_batches

    def watched(network: SiteNetwork, *rest: Any) -> Tensor:
        found = usual(network, *rest)
        modes.append(any(part.training for part in cast(PromptedViT, network).modules()))
        return found

    monkeypatch.setattr(site_side, "over_batches", watched)
    answer(opened(METHOD, evaluate=False, own={"dropout": 0.5}))
    assert modes
    assert not any(modes)


# At the server. The server side of FedEvPrompt by hand: the buffer, who is sent what, and what is
# refused.

TASK = NetworkShape((1, 16, 16), 3)
# samples of three classes
COUNTS = {"s1a": [30, 1, 5], "s2a": [36, 0, 0], "s3a": [2, 30, 4]}
SHAPES = {"head.1.bias": (3,), "head.1.weight": (3, 16), "prompts.b": (1, 2, 3, 16)} | {
    "prompts.t": (1, 2, 3, 16)
}
VIT = VIT_FIELDS | {
    "method": "fedevprompt",
    "dataset": "digits",
    "backbone": "vit_tiny_patch16_224",
    "backbone_weights": "timm",  # no server ever needs them
    "silos": 3,
    "rounds": 3,
}
Build = Callable[..., FedEvPrompt]


@pytest.fixture
def method(participants: Participants) -> Build:
    """Return a builder of the strategy over three sites with ``COUNTS`` and M = 2."""
    facts = {
        site: dataclasses.replace(
            found,
            classes=3,
            label_counts={"train": COUNTS[site], "val": [1, 0, 0], "test": [1, 1, 1]},
            class_names=("nevus", "melanoma", "other"),
        )
        for site, found in participants.facts.items()
    }

    def build(common: dict[str, Any] | None = None, **own: Any) -> FedEvPrompt:
        settings = FedEvPromptSettings(**{"buffer_maps": 2, **own})
        return FedEvPrompt(
            CommonSettings(**{**VIT, **(common or {})}),
            settings,
            Participants(facts, participants.nodes),
        )

    return build


def maps(count: int, at: int = 0) -> Any:
    """Return maps that look at one cell each, from cell ``at`` on."""
    return np.eye(CELLS, dtype=np.float32)[at : at + count]


def gift(site: str, at: int = 0) -> dict[str, Any]:
    return {
        f"maps/{label}": maps(min(2, count), at)
        for label, count in enumerate(COUNTS[site])
        if count
    }


def buffered(round_: int = 1, **shared: Any) -> State:
    arrays = {
        name.replace("maps/", f"buffer/{site}/"): array
        for at, site in enumerate(COUNTS)
        for name, array in gift(site, 2 * at).items()
    }
    named = {name.replace("__", "."): array for name, array in shared.items()}
    return State({**arrays, **named}, round_, {"s1a": 1})


def refused(common: dict[str, Any], **own: Any) -> str:
    with pytest.raises(SettingError) as caught:
        FedEvPromptSettings(**own).check(CommonSettings(**{**VIT, **common}), is_table=False)
    return str(caught.value)


@pytest.mark.parametrize(
    "common",
    [
        {"network": "auto"},
        {"network": "conv"},
        {"prompt_sets": "none"},
        {"train_backbone": True},
    ],
)
def test_what_is_no_frozen_vit_with_prompts_is_refused(common: dict[str, Any]) -> None:
    told = refused(common)
    assert (
        "set 'network.name' to 'vit', 'vit.prompt-sets' to 'b-t' or 'g', and 'vit.train-backbone'"
        in told
    )


def test_cross_entropy_is_refused() -> None:
    assert "'train.loss' is 'cross-entropy': method 'fedevprompt' is evidential" in refused(
        {"loss": "cross-entropy"}
    )


def test_b_prompts_cannot_be_averaged_where_there_are_none() -> None:
    told = refused({"prompt_sets": "g"}, shared_prompts="b")
    said = (
        "'fedevprompt.shared-prompts' is 'b' and 'vit.prompt-sets' is 'g', which has no b-prompts"
    )
    assert said in told


@pytest.mark.parametrize(
    ("common", "own"),
    [
        ({}, {}),
        ({"loss": "evidential", "evidence": "relu"}, {"shared_prompts": "b"}),
        ({"prompt_sets": "g"}, {"shared_prompts": "all"}),
        ({"prompt_sets": "g"}, {"distillation_weight": 0.0}),
    ],
)
def test_what_the_paper_compares_is_taken(common: dict[str, Any], own: dict[str, Any]) -> None:
    FedEvPromptSettings(**own).check(CommonSettings(**{**VIT, **common}), is_table=False)


def test_settings_are_refused_before_a_run(tiny: Callable[..., dict[str, Any]]) -> None:
    assert resolve(tiny("fedevprompt")).own.buffer_maps == 2
    with pytest.raises(SettingError, match="prompts a frozen ViT"):
        resolve(tiny("fedevprompt", prompt_sets="none"))
    for key, value in (("buffer-maps", 0), ("distillation-weight", -1.0), ("shared-prompts", "t")):
        with refuses(SettingError, f"fedevprompt.{key}"):
            resolve(tiny("fedevprompt", **{key: value}))


def test_the_buffer_is_empty_at_the_start(method: Build) -> None:
    assert method().initial_state().arrays == {}
    assert arrays_sent(method(), State({}))["s1a"] == {}


@pytest.mark.parametrize(
    ("shared", "names"), [("none", []), ("b", ["prompts.b"]), ("all", list(SHAPES))]
)
def test_what_is_averaged_starts_from_the_seed_and_goes_both_ways(
    method: Build, shared: str, names: list[str]
) -> None:
    strategy = method(shared_prompts=shared)
    first = strategy.initial_state()
    assert {name: array.shape for name, array in first.arrays.items()} == {
        name: SHAPES[name] for name in names
    }
    again = method({"seed": 43}, shared_prompts=shared).initial_state()
    for name in names:
        if name != "head.1.bias":
            assert not np.array_equal(first.arrays[name], again.arrays[name])
    expected = arrays_expected(strategy, first)["s2a"]
    shapes = {name: ArraySpec(SHAPES[name]) for name in names}
    assert expected == shapes | {"maps/0": ArraySpec((2, CELLS))}
    for phase in (TRAIN, EVALUATE):
        assert set(arrays_sent(strategy, first, phase)["s2a"]) == set(names)


def test_maps_are_expected_of_the_classes_that_a_site_has_and_of_no_others(method: Build) -> None:
    strategy, state = method(), State({})
    shapes = {
        site: {name: spec.shape for name, spec in arrays_expected(strategy, state)[site].items()}
        for site in COUNTS
    }
    assert shapes == {
        "s1a": {"maps/0": (2, CELLS), "maps/1": (1, CELLS), "maps/2": (2, CELLS)},
        "s2a": {"maps/0": (2, CELLS)},
        "s3a": {"maps/0": (2, CELLS), "maps/1": (2, CELLS), "maps/2": (2, CELLS)},
    }
    assert arrays_expected(method(distillation_weight=0.0), state)["s1a"] == {}


def test_a_site_is_sent_all_maps_but_its_own(method: Build) -> None:
    state = buffered()
    for site in COUNTS:
        found = arrays_sent(method(), state)[site]
        others = [other for other in COUNTS if other != site]
        assert set(found) == {
            name.replace("maps/", f"maps/{other}/") for other in others for name in gift(other)
        }
        for name, array in found.items():
            assert array is state.arrays[name.replace("maps/", "buffer/")]


def test_a_site_whose_name_begins_another_is_not_taken_for_it(method: Build) -> None:
    arrays = {f"buffer/{site}/0": maps(1) for site in ("a", "ab", "b")}
    here = method()
    facts = here.participants.facts["s1a"]
    here.participants = Participants(dict.fromkeys(("a", "ab", "b"), facts), {})
    found = arrays_sent(here, State(arrays, 1))["a"]
    assert set(found) == {"maps/ab/0", "maps/b/0"}


def test_no_map_is_sent_to_be_evaluated(method: Build) -> None:
    state = buffered(prompts__b=np.zeros((1, 2, 3, 16), np.float32))
    assert set(evaluation_of(method(shared_prompts="b"), state).send["s1a"]) == {"prompts.b"}


def test_the_buffer_is_replaced_and_holds_what_came_alone(
    method: Build, site_reply: SiteReply
) -> None:
    strategy, before = method(), buffered()
    replies = {site: site_reply(site, gift(site, 9)) for site in ("s1a", "s2a")}
    after = state_after(strategy, before, replies)
    expected = {
        name.replace("maps/", f"buffer/{site}/"): array
        for site in replies
        for name, array in gift(site, 9).items()
    }
    assert set(after.arrays) == set(expected)  # nothing of s3a is left
    for name, array in after.arrays.items():
        np.testing.assert_array_equal(array, expected[name])


def test_what_is_shared_is_averaged_by_samples_beside_the_buffer(
    method: Build, site_reply: SiteReply
) -> None:
    strategy = method(shared_prompts="b")
    state = buffered(prompts__b=np.zeros((1, 2, 3, 16), np.float32))
    replies = {
        site: site_reply(
            site,
            gift(site) | {"prompts.b": np.full((1, 2, 3, 16), value, np.float32)},
            num_examples=count,
        )
        for site, value, count in (("s1a", 2.0, 1), ("s2a", 6.0, 3))
    }
    after = state_after(strategy, state, replies)
    assert (after.arrays["prompts.b"] == 5).all()  # (2 + 3 * 6) / 4
    assert {n.split("/")[1] for n in after.arrays if n.startswith("buffer/")} == {"s1a", "s2a"}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (maps(2) * 2, r"array 'maps/0': a map sums to 2, not to 1"),
        (maps(2) - np.float32(0.125), r"array 'maps/0': a map has a negative value (-0.125)"),
        (maps(2) * np.float32(np.nan), r"array 'maps/0': a map contains non-finite values"),
        (maps(2) * 0, r"array 'maps/0': a map sums to 0, not to 1"),
        (maps(2), None),
    ],
)
def test_a_map_that_is_none_is_objected_to(
    method: Build, site_reply: SiteReply, bad: Any, said: str | None
) -> None:
    strategy = method()
    reply = site_reply("s1a", gift("s1a") | {"maps/0": bad})
    assert fault_of(strategy, buffered(), reply) == said
    assert fault_of(strategy, buffered(), reply, EVALUATE) is None


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, ["up to 2 attention maps per class, each of one training image (lowest vacuity)"]),
        ({"buffer_selection": "random"}, ["training image (any), which go to all other sites"]),
        ({"shared_prompts": "b", "distillation_weight": 0.0}, ["each round: the b-prompts"]),
        ({"shared_prompts": "all"}, ["attention maps", "each round: all prompts and the head"]),
        ({"distillation_weight": 0.0}, ["no weights and no maps"]),
    ],
)
def test_the_run_says_what_leaves_a_site(
    method: Build, own: dict[str, Any], said: list[str]
) -> None:
    told = method(**own).disclosures().leaves
    assert len(told) == len(said)
    assert all(part in line for part, line in zip(said, told, strict=True))


def test_the_buffer_is_told_with_its_grid_and_classes(method: Build) -> None:
    documents = method().documents(buffered(), {})
    found = documents["buffer.json"]
    assert found["grid"] == [4, 4]
    assert found["classes"] == ["nevus", "melanoma", "other"]
    assert {site: list(classes) for site, classes in found["sites"].items()} == {
        "s1a": ["0", "1", "2"],
        "s2a": ["0"],
        "s3a": ["0", "1", "2"],
    }
    assert found["sites"]["s2a"]["0"] == maps(2, 2).tolist()
    assert method().documents(State({}, 1), {}) == {}


# Whole runs. Whole runs of FedEvPrompt: every message looked at, sites that fail, and a new
# process.

NODES = {1001: "s1a", 1002: "s2a", 1003: "s3a"}
Run = Callable[..., tuple[Any, FedEvPrompt]]


def by_round(messages: list[Message], of_reply: bool = False) -> list[dict[str, dict[str, Any]]]:
    """Return, for each phase after the hellos, every site's arrays."""
    found: list[dict[str, dict[str, Any]]] = []
    for at, message in enumerate(m for m in messages if m.metadata.message_type != HELLO):
        if at % 3 == 0:
            found.append({})
        node = message.metadata.src_node_id if of_reply else message.metadata.dst_node_id
        found[-1][NODES[node]] = arrays_of(message.content)
    return found


def held(tiny: Tiny, site: str) -> list[int]:
    """Return how many training samples of each class a site has."""
    silo = load_silo(site, resolve(tiny("fedevprompt")).common)
    return torch.bincount(silo.train.labels, minlength=10).tolist()


def test_replies_hold_maps_alone_and_no_site_is_sent_its_own(
    shared_run: SharedRun, tiny: Tiny
) -> None:
    grid, strategy, _ = shared_run(tiny("fedevprompt", rounds=3, learning_rate=0.05))
    sent, replies = by_round(grid.sent), by_round(grid.replies, of_reply=True)
    assert len(sent) == len(replies) == 4  # the last is the evaluation
    counts = {site: held(tiny, site) for site in ALL}
    for answers in replies[:3]:
        for site, arrays in answers.items():
            assert {name: array.shape for name, array in arrays.items()} == {
                f"maps/{label}": (min(2, count), CELLS)
                for label, count in enumerate(counts[site])
                if count
            }
            for array in arrays.values():
                assert array.dtype == np.float32
                np.testing.assert_allclose(array.sum(axis=1), 1, atol=1e-5)
    for before, received in zip(replies[:2], sent[1:3], strict=True):
        for site, arrays in received.items():  # what the others sent in the round before, untouched
            expected = {
                name.replace("maps/", f"maps/{other}/"): array
                for other in ALL
                if other != site
                for name, array in before[other].items()
            }
            assert set(arrays) == set(expected)
            assert not any(name.startswith(f"maps/{site}/") for name in arrays)
            for name, array in arrays.items():
                np.testing.assert_array_equal(array, expected[name])
    for empty in (sent[0], sent[3], replies[3]):
        assert empty == {site: {} for site in ALL}
    assert set(strategy.state.arrays) == {
        name.replace("maps/", f"buffer/{site}/")
        for site, arrays in replies[2].items()
        for name in arrays
    }


def test_maps_change_from_round_to_round(shared_run: SharedRun, tiny: Tiny) -> None:
    grid, _, _ = shared_run(tiny("fedevprompt", rounds=3, learning_rate=0.05))
    first, second = by_round(grid.replies, of_reply=True)[:2]
    for site in ALL:
        assert not all(np.array_equal(a, second[site][name]) for name, a in first[site].items())


def test_no_array_of_the_network_is_in_any_message_and_maps_are_all_that_weighs(
    shared_run: SharedRun, tiny: Tiny
) -> None:
    grid, _, _ = shared_run(tiny("fedevprompt", rounds=3, learning_rate=0.05))
    messages = [m for m in grid.sent + grid.replies if m.metadata.message_type != HELLO]
    assert len(messages) == 24
    for message in messages:
        assert set(message.content.array_records) <= {ARRAYS}
        for name, array in arrays_of(message.content).items():
            assert name.split("/")[0] == "maps"
            assert array.shape[1:] == (CELLS,)
            assert len(array) <= 2
    others = {site: sum(min(2, n) for o in ALL if o != site for n in held(tiny, o)) for site in ALL}
    for message in grid.sent[6:9]:  # the second round's
        site, arrays = NODES[message.metadata.dst_node_id], arrays_of(message.content)
        numbers = sum(array.nbytes for array in arrays.values())
        assert numbers == 4 * CELLS * others[site]
        assert record_bytes(message.content) < numbers + 250 * (len(arrays) + 5)
    for message in grid.replies[3:6]:
        site = NODES[message.metadata.src_node_id]
        numbers = sum(array.nbytes for array in arrays_of(message.content).values())
        assert numbers == 4 * CELLS * sum(min(2, n) for n in held(tiny, site))


@pytest.mark.parametrize(("shared", "names"), [("b", ["prompts.b"]), ("all", OWN)])
def test_what_is_averaged_travels_by_its_name_beside_the_maps(
    spied_run: Run, tiny: Tiny, shared: str, names: list[str]
) -> None:
    grid, _ = spied_run(tiny("fedevprompt", shared_prompts=shared))
    sent, replies = by_round(grid.sent), by_round(grid.replies, of_reply=True)
    for messages in (sent, replies[:2]):
        for arrays in (a for one in messages for a in one.values()):
            assert sorted(n for n in arrays if not n.startswith("maps/")) == names
    for name in names:
        mean = np.mean([replies[0][site][name] for site in ALL], axis=0, dtype=np.float64)
        for site in ALL:
            np.testing.assert_allclose(sent[1][site][name], mean, atol=1e-6)
    assert all(set(arrays) == set(names) for arrays in sent[2].values())
    assert not any(f"maps/{site}/" in name for site in ALL for name in sent[1][site])


def test_without_distillation_nothing_travels(spied_run: Run, tiny: Tiny) -> None:
    grid, _ = spied_run(tiny("fedevprompt", distillation_weight=0.0))
    for message in grid.sent + grid.replies:
        assert ARRAYS not in message.content.array_records


def test_sharing_all_without_distillation_is_fedavg_to_the_byte(
    inline_run: InlineRun, tiny: Tiny, tmp_path: Path
) -> None:
    ours = tiny("fedevprompt", rounds=3, shared_prompts="all", distillation_weight=0.0)
    common = {k: v for k, v in ours.items() if not k.startswith("fedevprompt.")}
    theirs = common | {"method": "fedavg"}
    first = inline_run({**ours, "optimiser": "adamw"}, out=tmp_path / "ours")
    second = inline_run({**theirs, "optimiser": "adamw"}, out=tmp_path / "theirs")
    bytes_ = [(run.path / "metrics.csv").read_bytes() for run in (first, second)]
    assert bytes_[0] == bytes_[1]
    assert bytes_[0].count(b"\n") > 50
    models = [load_state(run.path / "model.safetensors")[0] for run in (first, second)]
    assert sorted(models[0]) == sorted(models[1]) == OWN
    for name in OWN:
        assert models[0][name].tobytes() == models[1][name].tobytes()


@dataclasses.dataclass
class Watched:
    """What every site trained from and to, by site and round."""

    before: dict[tuple[str, int], dict[str, Any]] = dataclasses.field(default_factory=dict)
    after: dict[tuple[str, int], dict[str, Any]] = dataclasses.field(default_factory=dict)


@pytest.fixture
def fails_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    """Return a function that lets a site fail to train in some rounds, and watches all others."""

    def arrange(site: str, *rounds: int) -> Watched:
        usual, seen = Lab.fit, Watched()

        def fit(lab: Lab, network: SiteNetwork, **options: Any) -> None:
            key = (lab.site, lab.instruction.round)
            if lab.site == site and key[1] in rounds:
                raise SiteError("the disk is full")
            vit = cast(PromptedViT, network)
            seen.before[key] = {n: a.numpy().copy() for n, a in exchanged_arrays(vit).items()}
            usual(lab, network, **options)
            seen.after[key] = {n: a.numpy().copy() for n, a in exchanged_arrays(vit).items()}

        monkeypatch.setattr(Lab, "fit", fit)
        return seen

    return arrange


def test_a_site_that_fails_has_no_map_in_the_next_round_and_comes_back_with_its_own_state(
    spied_run: Run, tiny: Tiny, fails_in: Any, recorder: Any
) -> None:
    seen = fails_in("s2a", 2)
    grid, _ = spied_run(tiny("fedevprompt", rounds=4, min_sites=2), [recorder])
    assert recorder.failures == [(2, "train", "s2a", "the disk is full")]
    sent = by_round(grid.sent)
    senders = [
        {site: {name.split("/")[1] for name in arrays} for site, arrays in one.items()}
        for one in sent
    ]
    whole = {site: set(ALL) - {site} for site in ALL}
    nobody: dict[str, set[str]] = {site: set() for site in ALL}
    assert senders == [
        nobody,
        whole,
        {"s1a": {"s3a"}, "s2a": {"s1a", "s3a"}, "s3a": {"s1a"}},
        whole,
        nobody,
    ]
    for name in OWN:  # it goes on from its first round, the others from their second
        np.testing.assert_array_equal(seen.before["s2a", 3][name], seen.after["s2a", 1][name])
        np.testing.assert_array_equal(seen.before["s1a", 3][name], seen.after["s1a", 2][name])
        assert not np.array_equal(seen.before["s2a", 3][name], seen.before["s1a", 3][name])


def test_a_site_that_fails_from_the_first_round_begins_later_from_the_seed(
    spied_run: Run, tiny: Tiny, fails_in: Any, recorder: Any
) -> None:
    seen = fails_in("s3a", 1)
    spied_run(tiny("fedevprompt", min_sites=2), [recorder])
    assert [failure[:3] for failure in recorder.failures] == [(1, "train", "s3a")]
    for name in OWN:
        np.testing.assert_array_equal(seen.before["s3a", 2][name], seen.before["s1a", 1][name])


def test_without_min_sites_a_site_that_fails_stops_the_run(
    spied_run: Run, tiny: Tiny, fails_in: Any
) -> None:
    fails_in("s2a", 2)
    with refuses(SiteError, "s2a", "2"):
        spied_run(tiny("fedevprompt"))


def test_a_site_without_a_class_sends_no_map_of_it_and_is_asked_for_none(
    spied_run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, settings: CommonSettings) -> Silo:
        silo = load_silo(name, settings)
        if name != "s2a":
            return silo
        kept = silo.train.labels != 3
        train = Split(silo.train.inputs[kept], silo.train.labels[kept])
        return dataclasses.replace(silo, train=train)

    assert all(held(tiny, site)[3] for site in ALL)
    monkeypatch.setattr(fedsilo.client_app.opening, "load_silo", load)
    grid, strategy = spied_run(tiny("fedevprompt", distillation_weight=1.0))
    replies, sent = by_round(grid.replies, of_reply=True), by_round(grid.sent)
    expected = arrays_expected(strategy.method, strategy.state, "train")["s2a"]
    assert "maps/3" not in expected
    assert "maps/3" in arrays_expected(strategy.method, strategy.state, "train")["s1a"]
    for answers in replies[:2]:
        assert set(answers["s2a"]) == set(expected)
        assert "maps/3" in answers["s1a"]
    assert "maps/s2a/3" not in sent[1]["s1a"]
    assert {"maps/s1a/3", "maps/s3a/3"} <= set(sent[1]["s2a"])


_GOES_ON = """
import json, sys
from fedsilo.server_app.config.settings import resolve
from fedsilo.engines.inline_engine import run_inline
from tests.support.asking import arrays_expected
run_inline(resolve(json.loads(sys.argv[1])), 3)
"""


@pytest.mark.soak  # resumed runs open the same files, in test_end_to_end
def test_a_new_process_goes_on_from_the_sites_own_prompts_and_moments(
    inline_run: InlineRun, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tiny("fedevprompt", optimiser="adamw", weight_decay=0.01)
    values |= {"train.optimiser-state": "run"}
    whole = inline_run(values, out=tmp_path / "whole").path
    with monkeypatch.context() as patch:
        patch.setattr(fedsilo.engines.inline_engine, "InlineGrid", DyingGrid)
        DyingGrid.lives = 6  # the hellos and the first round
        with pytest.raises(KeyboardInterrupt):
            inline_run(values, out=tmp_path / "cut")
    cut = tmp_path / "cut" / "run"
    assert {path.name for path in cut.glob("sites/*/*")} == {"round-000001-00.safetensors"}
    told = json.dumps(
        {**values, "run.name": "run", "run.out": str(tmp_path / "cut"), "run.resume": True}
    )
    command = [sys.executable, "-c", _GOES_ON, told]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    files = ["metrics.csv", "buffer.json"]
    files += [f"sites/{site}/round-{r:06d}-00.safetensors" for site in ALL for r in (1, 2)]
    for name in files:
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    for site in ALL:
        steps = [
            load_state(cut / f"sites/{site}/round-{r:06d}-00.safetensors")[0][
                "pace/optimiser/prompts.b/step"
            ].item()
            for r in (1, 2)
        ]
        assert steps == [3, 6]  # 36 samples in batches of 16


def test_a_private_state_that_is_cut_short_stops_the_run_with_the_sites_name(
    inline_run: InlineRun, tiny: Tiny
) -> None:
    run = inline_run(tiny("fedevprompt"))
    (run.path / "summary.json").unlink()
    path = run.path / "sites/s2a/round-000002-00.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SiteError, match=r"private state of site s2a: .* truncated"):
        inline_run({**tiny("fedevprompt"), "resume": True})


@pytest.fixture
def started(
    spy_grid: Any,
    fake_app: Any,
    participants: Participants,
    recorder: Any,
    good: Callable[..., Behaviour],
    tiny: Tiny,
) -> Run:
    """Return a function that runs two rounds over fake sites of two classes."""

    def start(min_sites: int = 0, **special: Behaviour) -> tuple[Any, FedEvPrompt]:
        common = resolve({**tiny("fedevprompt"), "run.name": "run"}).common
        counts = {"train": [30, 6], "val": [4, 0], "test": [5, 5]}
        facts = {
            site: dataclasses.replace(found, label_counts=counts, classes=2)
            for site, found in participants.facts.items()
        }
        method = FedEvPrompt(
            dataclasses.replace(common, min_sites=min_sites),
            FedEvPromptSettings(buffer_maps=2),
            Participants(facts, participants.nodes, asked=frozenset(participants.nodes.values())),
        )
        strategy = RoundLoop(method, [recorder], "/somewhere")
        strategy.state = method.initial_state()
        grid = spy_grid(fake_app(good(), **special))
        strategy.start(grid, common.rounds, 20)
        return grid, strategy

    return start


@pytest.fixture
def good(content: Any, measured: dict[str, float], told: Any) -> Callable[..., Behaviour]:
    """Return a builder of a good site; ``changes`` to what it sends from round ``since`` on."""

    def build(since: int = 1, **changes: Any) -> Behaviour:
        def answer(message: Message) -> RecordDict:
            if message.metadata.message_type == EVALUATE:
                return content(kept_state=1, **measured)
            maps = {f"maps__{label}": np.eye(CELLS, dtype=np.float32)[:2] for label in (0, 1)}
            given = maps | (changes if told(message)["round"] >= since else {})
            named = {n.replace("__", "/"): a for n, a in given.items() if a is not None}
            return content(named, kept_state=1, **measured)

        return answer

    return build


EYE = np.eye(CELLS, dtype=np.float32)[:2]
BAD_GIFTS: dict[str, dict[str, Any]] = {
    r"array 'maps/1' is float32 \(2, 15\), expected float32 \(2, 16\)": {"maps__1": EYE[:, :15]},
    r"array 'maps/1' is float32 \(1, 16\), expected float32 \(2, 16\)": {"maps__1": EYE[:1]},
    r"array 'maps/1' is float64 \(2, 16\), expected": {"maps__1": EYE.astype(np.float64)},
    r"array 'maps/1' contains non-finite values": {"maps__1": EYE * np.float32(np.nan)},
    r"array 'maps/0': a map has a negative value \(-0.5\)": {"maps__0": EYE * 2 - EYE[::-1] / 2},
    r"array 'maps/0': a map sums to 0.5, not to 1": {"maps__0": EYE / 2},
    r"missing \['maps/1'\], surplus \[\]": {"maps__1": None},
    r"missing \[\], surplus \['maps/2'\]": {"maps__2": EYE},
    r"missing \[\], surplus \['prompts.b'\]": {"prompts.b": np.zeros((1, 2, 3, 16), np.float32)},
}


@pytest.mark.parametrize("said", BAD_GIFTS)
def test_a_buffer_entry_that_cannot_be_one_stops_the_run_or_stays_out(
    started: Run, good: Callable[..., Behaviour], recorder: Any, said: str
) -> None:
    bad = good(2, **BAD_GIFTS[said])
    with pytest.raises(SiteError, match=f"site s2a, round 2, phase train: .*{said}"):
        started(s2a=bad)
    recorder.failures.clear()
    _, strategy = started(min_sites=2, s2a=bad)
    assert {name.split("/")[1] for name in strategy.state.arrays} == {"s1a", "s3a"}
    assert [(round_, site) for round_, _, site, _ in recorder.failures] == [(2, "s2a")]


def test_good_maps_enter_the_buffer_of_every_site(started: Run) -> None:
    grid, strategy = started()
    arrays = strategy.state.arrays
    assert set(arrays) == {f"buffer/{site}/{label}" for site in ALL for label in (0, 1)}
    (message,) = [m for m in grid.sent[3:6] if m.metadata.dst_node_id == 1002]
    expected = {f"maps/{site}/{label}" for site in ("s1a", "s3a") for label in (0, 1)}
    assert set(arrays_of(message.content)) == expected


def test_a_site_stores_no_state_of_a_round_that_the_server_loses(
    spied_run: Run, tiny: Tiny, tmp_path: Path
) -> None:
    values = tiny("fedevprompt") | {"train.optimiser-state": "run"}
    settings = resolve(values)
    spied_run(values)
    promise = settings_digest_of(settings.common, settings.own)
    state = SiteState(tmp_path / "sites" / "s1a", promise)
    asked = Instruction(2, "train", expects_state=True)
    own = state.load_before(asked)
    assert own is not None
    assert (
        own["pace/optimiser/prompts.t/step"].item() == 3
    )  # of round 1, round 2's is not looked at


def test_the_scale_of_the_maps_changes_what_is_trained_and_not_what_travels(
    tiny: Tiny, inline_run: InlineRun
) -> None:
    strong = {"fedevprompt.distillation-weight": 0.1}
    runs = {
        scale: inline_run(
            tiny("fedevprompt") | strong | {"fedevprompt.map-scale": scale, "run.name": scale}
        )
        for scale in ("sum", "max")
    }
    losses = {
        scale: [
            row["value"]
            for row in run.read_csv("metrics.csv")
            if (row["round"], row["metric"]) == ("2", "trained-loss")
        ]
        for scale, run in runs.items()
    }
    assert losses["sum"]
    assert losses["sum"] != losses["max"]
    sent = [run.read_json("summary.json")["bytes"] for run in runs.values()]
    assert sent[0]["up"] == sent[1]["up"]
