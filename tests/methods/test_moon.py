"""Tests of the method 'moon': equations, site and server."""

import dataclasses
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

import fedsilo.client_app.methods.moon
from fedsilo.client_app.methods.moon import copy_network
from fedsilo.client_app.privacy.ledger import LEDGER
from fedsilo.core.errors import SettingError
from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import ARRAYS, METRICS
from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.core.settings_schema import build
from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.sample import explain_sample
from fedsilo.models.methods.moon import MoonSettings, Projection, build_projection, contrastive_loss
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.drift_correction import Moon
from fedsilo.strategies.methods.fedavg import FedAvg
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, state_after
from tests.support.errors import refuses
from tests.support.lab import answer, evaluate, fitted, steps_of
from tests.support.methods import Opened, Tiny
from tests.support.tiny import VIT_FIELDS

# The equations

EAST, NORTH, WEST = (
    torch.tensor([[1.0, 0.0], [0.0, 1.0], [-2.0, 0.0]])[i : i + 1] for i in (0, 1, 2)
)


def loss_of(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float = 0.5) -> float:
    return contrastive_loss(z, z_global, z_previous, temperature).item()


def test_the_loss_by_hand() -> None:
    # similarities 1 and 0, over 0.5: -log(e^2 / (e^2 + 1))
    assert loss_of(EAST, EAST, NORTH) == pytest.approx(math.log(1 + math.exp(-2)))
    # 0 and 1
    assert loss_of(EAST, NORTH, EAST) == pytest.approx(math.log(1 + math.exp(2)))
    # 1 and -1, over 1
    assert loss_of(EAST, EAST, WEST, 1.0) == pytest.approx(math.log(1 + math.exp(-2)))


def test_a_batch_has_the_mean_of_its_samples_losses() -> None:
    z = torch.cat([EAST, EAST])
    found = loss_of(z, torch.cat([EAST, NORTH]), torch.cat([NORTH, EAST]))
    each = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))]
    assert found == pytest.approx(sum(each) / 2)


@given(st.integers(0, 1000), st.floats(0.1, 3.0))
def test_it_is_the_papers_formula_and_the_length_of_a_representation_counts_for_nothing(
    seed: int, temperature: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    z, near, far = torch.randn(3, 4, 5, generator=draw).double()

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1))

    positive, negative = (torch.exp(cosine(z, other) / temperature) for other in (near, far))
    expected = -(positive / (positive + negative)).log().mean().item()
    assert loss_of(z, near, far, temperature) == pytest.approx(expected, rel=1e-4)
    assert loss_of(3 * z, near / 2, 5 * far, temperature) == pytest.approx(expected, rel=1e-4)


def test_with_the_same_model_on_both_sides_it_is_a_constant_without_a_gradient() -> None:
    z = torch.tensor([[1.0, 2.0], [0.5, -1.0]], requires_grad=True)
    found = contrastive_loss(z, NORTH.expand(2, 2), NORTH.expand(2, 2), 0.5)
    found.backward()  # type: ignore[no-untyped-call]
    assert found.item() == pytest.approx(math.log(2))
    assert z.grad is not None
    assert not z.grad.any()


def test_a_step_down_the_gradient_turns_to_the_global_and_from_the_previous_representation() -> (
    None
):
    z = torch.tensor([[1.0, 1.0]], requires_grad=True)
    contrastive_loss(z, EAST, NORTH, 0.5).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert z.grad[0, 0] < 0 < z.grad[0, 1]


def test_it_is_computed_in_single_precision_whatever_comes() -> None:
    found = contrastive_loss(EAST.bfloat16(), EAST.bfloat16(), NORTH.bfloat16(), 0.5)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(math.log(1 + math.exp(-2)))


def test_the_head_projects_the_mean_of_the_tokens_through_two_layers() -> None:
    head = Projection(channels=2, size=3)
    first, last = head.layers[0], head.layers[2]
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        first.bias.zero_()
        last.weight.copy_(torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 1.0]]))
        last.bias.copy_(torch.tensor([0.0, 0.0, 5.0]))
    tokens = torch.tensor([[[1.0, 4.0], [3.0, -2.0]]])  # mean (2, 1), then (2, 0)
    assert head(tokens).tolist() == [[2.0, 4.0, 5.0]]


def test_the_head_is_the_seeds_and_leaves_other_draws_alone() -> None:
    with seed_generators(3, "elsewhere"):
        expected = torch.rand(2)
    with seed_generators(3, "elsewhere"):
        first = build_projection(7, 4)
        assert torch.equal(torch.rand(2), expected)
    again, other = build_projection(7, 4), build_projection(8, 4)
    shapes = {name: tuple(array.shape) for name, array in first.state_dict().items()}
    assert shapes == {
        "layers.0.weight": (4, 4),
        "layers.0.bias": (4,),
        "layers.2.weight": (256, 4),
        "layers.2.bias": (256,),
    }
    for name, array in first.state_dict().items():
        assert torch.equal(array, again.state_dict()[name])
        assert not torch.equal(array, other.state_dict()[name])


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("moon.contrast-mu", 0.0, "above 0"),
        ("moon.contrast-mu", -1, "above 0"),
        ("moon.contrast-temperature", 0.0, "above 0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(key: str, value: float, allowed: str) -> None:
    with refuses(SettingError, key, value, allowed):
        build(MoonSettings, {key: value})


def test_the_papers_values_hold_unless_they_are_set() -> None:
    assert build(MoonSettings, {}) == MoonSettings(5.0, 0.5)


# At a site

Weights = Callable[..., dict[str, Any]]
DIGITS = NetworkShape((1, 16, 16), 10)
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

    def make(task: NetworkShape = DIGITS, **own: Any) -> dict[str, Any]:
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
    stored = opened("moon", round=2).stored_state
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
    previous = copy_network(network).eval()
    for name, array in previous.state_dict().items():
        if name in exchanged_arrays(previous):
            array.copy_(site.stored_state[f"previous/{name}"])
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
        twins.append(copy_network(network))
        return twins[-1]

    monkeypatch.setattr(fedsilo.client_app.methods.moon, "copy_network", spy)
    site = opened("moon", others, round=2)
    network = cast(TokenClassifier, site.open())
    start = arrays_of(network)
    fitted(site, network)
    came_as, previous = twins
    assert all(torch.equal(array, start[n]) for n, array in exchanged_arrays(came_as).items())
    for name, array in exchanged_arrays(previous).items():
        assert torch.equal(array, site.stored_state[f"previous/{name}"])
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
    kept = opened("moon", round=3).stored_state
    assert all(torch.equal(array, kept[name]) for name, array in later.stored_state.items())
    first = opened("moon", round=2).stored_state
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
    images = NetworkShape(shape, 10)
    arrays = received(images, **own)
    site = opened("moon", arrays, own=own, round=2)
    few = Split(torch.rand(4, *shape), torch.arange(4))
    site.silo = dataclasses.replace(site.silo, shape=images, train=few)
    network = site.open()
    own_model = {f"previous/{name}": 0.9 * array for name, array in arrays_of(network).items()}
    site.__dict__["stored_state"] = own_model
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
    copied = copy_network(network)
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
    with refuses(SettingError, "projection.layers.0.bias"):
        answer(opened("moon", weights))


def test_epochs_that_span_rounds_keep_the_heads_moments_too(
    opened: Opened, received: Weights
) -> None:
    own = {"epoch_steps": 4, "pace": 2, "local_epochs": 2, "batch_size": 32}  # those of TINY
    answer(opened("moon", received(), own=own))
    answer(opened("moon", received(), own=own, round=2))
    stored = opened("moon", own=own, round=3).stored_state
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


# At the server

Run = Callable[..., tuple[Any, RoundLoop]]
HEAD = {f"projection/layers.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")}


@pytest.fixture
def moon(participants: Participants) -> Moon:
    return Moon(CommonSettings(silos=3, width=2), MoonSettings(), participants)


def test_the_network_starts_as_fedavgs_with_a_head_beside_it(
    moon: Moon, participants: Participants
) -> None:
    start = moon.initial_state().arrays
    fedavg = FedAvg(moon.common, NoSettings(), participants).initial_state().arrays
    assert set(start) == set(fedavg) | HEAD
    for name, array in fedavg.items():
        np.testing.assert_array_equal(start[name], array)
    assert start["projection/layers.0.weight"].shape == (8, 8)  # the encoder's 4 * width
    assert start["projection/layers.2.weight"].shape == (256, 8)
    assert all(start[name].any() for name in HEAD)


def test_the_head_goes_out_to_train_and_not_to_evaluate_and_is_no_part_of_the_model(
    moon: Moon, participants: Participants
) -> None:
    state = moon.initial_state()
    network = set(state.arrays) - HEAD
    assert set(arrays_sent(moon, state)["s1a"]) == network | HEAD
    assert set(arrays_expected(moon, state)["s1a"]) == network | HEAD
    assert set(evaluation_of(moon, state).send["s1a"]) == network
    assert set(moon.model(state)) == network


def test_the_head_is_averaged_by_samples_as_the_weights_are(
    moon: Moon, site_reply: Callable[..., Any]
) -> None:
    before = State({"w": np.float32([0]), "projection/w": np.float32([0])}, 1)
    replies = {
        "s1a": site_reply("s1a", {"w": [1.0], "projection/w": [2.0]}, num_examples=1),
        "s2a": site_reply("s2a", {"w": [5.0], "projection/w": [6.0]}, num_examples=3),
    }
    after = state_after(moon, before, replies)
    assert (after.arrays["w"].tolist(), after.arrays["projection/w"].tolist()) == ([4.0], [5.0])


def test_it_tells_that_the_head_leaves(moon: Moon) -> None:
    told = moon.disclosures().leaves
    assert "all weights" in told[0]
    assert "projection head" in told[1]


def test_round_1_is_fedavgs_and_round_2_is_not(spied_run: Run, tiny: Tiny, recorder: Any) -> None:
    grid, loop = spied_run(tiny("moon"), [recorder])
    fedavg, _ = spied_run(tiny("fedavg"))
    first = {name: array for name, array in recorder.states[0].arrays.items() if name not in HEAD}
    sent, other = grid.sent[6].content[ARRAYS], fedavg.sent[6].content[ARRAYS]
    for name, array in first.items():
        np.testing.assert_array_equal(array, other[name].numpy())
        np.testing.assert_array_equal(array, sent[name].numpy())
    name = "encoder.stages.0.weight"
    after = grid.replies[6].content[ARRAYS][name].numpy()
    assert (after != fedavg.replies[6].content[ARRAYS][name].numpy()).any()
    assert recorder.states[0].stateful_sites == ("s1a", "s2a", "s3a")
    assert set(loop.method.model(loop.state)) == set(first)


def test_a_finished_runs_model_is_a_plain_network(
    inline_run: Callable[..., Any], tiny: Tiny
) -> None:
    directory = inline_run(tiny("moon"))
    arrays, _ = load_state(directory.path / "model.safetensors")
    common = resolve(tiny("fedavg")).common
    site = FinishedRun.open(directory.path).lab("s1a")
    network = build_classifier(common, site.silo.shape)
    assert set(arrays) == set(exchanged_arrays(network))
    opened = exchanged_arrays(cast(nn.Module, site.open()))
    for name, array in arrays.items():
        np.testing.assert_array_equal(opened[name].cpu().numpy(), array)
    assert explain_sample(site, "test", 0).lines()


def test_with_differential_privacy_the_head_is_noised_with_the_rest(
    inline_run: Callable[..., Any], tiny: Tiny, tmp_path: Path
) -> None:
    private = {"sample_clip_norm": 1.0, "noise_multiplier": 0.5, "rounds": 1}
    directory = inline_run(tiny("moon", **private))
    noised, _ = load_state(sorted(directory.checkpoints.glob("*.safetensors"))[-1])
    plain = inline_run(tiny("moon", rounds=1), out=tmp_path / "plain")
    whole, _ = load_state(sorted(plain.checkpoints.glob("*.safetensors"))[-1])
    heads = [name for name in noised if name in HEAD or name.split("/", 1)[-1] in HEAD]
    assert len(heads) == 4
    for name in heads:  # without noise round 1 leaves them as they are
        assert np.abs(noised[name] - whole[name]).mean() > 5e-4
    assert (directory.path / "sites" / "s1a" / LEDGER).is_file()
