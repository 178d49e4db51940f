"""FedEvPrompt at a site: what it trains on, sends and keeps, and what it refuses."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

import fedsilo.client_app.methods.fedevprompt as site_side
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.fedevprompt import FedEvPromptSite
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.datasets.io.state_files import load_state, save_state
from fedsilo.models.contract.errors import CheckpointError, SiteError
from fedsilo.models.contract.messages import ARRAYS, METRICS
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.site_network import SiteNetwork, exchanged_arrays
from fedsilo.strategies.loop.method import initial_weights, starting_network
from tests.support.lab import answer, steps_of

Opened = Callable[..., Lab]
METHOD = "fedevprompt"
CELLS = 16  # 16x16 pixels in patches of 4
OWN = ["head.1.bias", "head.1.weight", "prompts.b", "prompts.t"]
STEPS = 3  # 36 samples in batches of 16


def arrays_of(reply: RecordDict) -> dict[str, Any]:
    return {name: array.numpy() for name, array in reply[ARRAYS].items()}


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
    seeds = initial_weights(starting_network(first.common, first.silo.task))
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
    start = initial_weights(starting_network(method.common, method.silo.task))
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
