"""PICSR at a site, stage by stage: what it takes, returns and keeps."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict

from fedsilo.client_app.explain.sample import explain_sample
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.picsr import PICSRSite
from fedsilo.client_app.session import SiteSession
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.contract.errors import CheckpointError, DataError, SettingError, SiteError
from fedsilo.models.contract.messages import ARRAYS, METRICS, Instruction
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.picsr import PICSRNetwork, PICSRSettings, RoutingProbe, build_router
from fedsilo.models.networks.mixture import expert_array
from fedsilo.models.networks.site_network import exchanged_arrays
from tests.support.lab import answer, fitted, lab_of, session_with, steps_of

Opened = Callable[..., Lab]
SITES = ("s1a", "s2a", "s3a")
STAGES = ("warmup", "experts", "router")


def stage(name: str, **fields: Any) -> dict[str, Any]:
    return {"notes": {"stage": name}, **fields}


def arrays_of(reply: RecordDict) -> dict[str, Any]:
    return {name: array.numpy() for name, array in reply[ARRAYS].items()}


@pytest.fixture
def routed(weights: dict[str, Any]) -> dict[str, Any]:
    """Return what the server sends for the router: three experts that differ, all else new."""
    arrays = {
        expert_array(site, name): array + np.float32(0.01 * index)
        for index, site in enumerate(SITES)
        for name, array in weights.items()
    }
    draw = np.random.default_rng(0)
    for site in SITES:
        arrays[f"prototype/{site}"] = draw.normal(size=(1, 16, 16)).astype(np.float32)
    router = build_router(PICSRSettings(), (1, 16, 16), 3, 7)
    return arrays | {f"router/{n}": a.numpy() for n, a in exchanged_arrays(router).items()}


def test_a_warm_up_round_is_a_round_of_fedavg(opened: Opened, weights: dict[str, Any]) -> None:
    method = opened("picsr", weights, **stage("warmup"))
    found, fedavg = answer(method), answer(opened("fedavg", weights))
    assert set(found[ARRAYS]) == set(weights)
    for name, array in arrays_of(fedavg).items():
        np.testing.assert_array_equal(arrays_of(found)[name], array)
    assert found[METRICS]["kept-state"] == 0
    assert not method.state_files.folder.exists()


def test_an_expert_starts_from_the_seeds_weights_and_goes_on_from_its_own(opened: Opened) -> None:
    first = opened("picsr", **stage("experts", returns=False))
    reply = answer(first)
    assert ARRAYS not in reply
    assert reply[METRICS]["kept-state"] == 1
    assert "incoming.val.accuracy" in reply[METRICS]
    alone = answer(opened("local", site="s1a"))[METRICS]  # the same weights, batches and draws
    assert reply[METRICS]["trained.train.loss"] == alone["trained.train.loss"]
    kept = first.state_files.before(Instruction(2, "train"))
    assert kept is not None
    later = opened("picsr", **stage("experts", round=2)).open()
    for name, tensor in exchanged_arrays(cast(torch.nn.Module, later)).items():
        assert torch.equal(tensor, kept[name])


def test_an_expert_may_start_from_the_global_weights(
    opened: Opened, weights: dict[str, Any]
) -> None:
    changed = {name: array + 1 for name, array in weights.items()}
    network = opened("picsr", changed, **stage("experts", round=2)).open()
    for name, tensor in exchanged_arrays(cast(torch.nn.Module, network)).items():
        np.testing.assert_array_equal(tensor, changed[name])


def test_an_expert_that_is_gone_is_an_error_and_not_a_fresh_start(opened: Opened) -> None:
    with pytest.raises(CheckpointError, match="site s1a is gone from"):
        answer(opened("picsr", **stage("experts", round=2, expects_state=True)))


def test_the_last_expert_round_brings_the_trained_expert_and_the_mean_sample(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("picsr", **stage("experts"))
    found = arrays_of(answer(method))
    assert set(found) == {f"expert/{name}" for name in weights} | {"prototype"}
    kept = method.state_files.before(Instruction(2, "train"))
    assert kept is not None
    for name in weights:
        np.testing.assert_array_equal(found[f"expert/{name}"], kept[name])
    mean = method.silo.train.inputs.numpy().astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(found["prototype"], mean, atol=1e-6)
    assert found["prototype"].shape == (1, 16, 16)


def few(samples: int) -> dict[str, Any]:
    return {"prototype_min_count": samples}


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_site_of_too_few_samples_sends_nothing_in_any_stage(
    context: Callable[..., Context],
    message: Callable[..., Message],
    tmp_path: Any,
    name: str,
    kind: str,
) -> None:
    asked, node = message(kind, **stage(name)), {"partition-id": 0}
    with pytest.raises(SiteError, match=r"s1a sends no prototype: it has fewer than 37"):
        lab_of(asked, context(node, "picsr", **few(37)))
    assert list(tmp_path.iterdir()) == []
    assert lab_of(asked, context(node, "picsr", **few(36))).site == "s1a"


@pytest.mark.parametrize(
    ("prototype", "sums", "least"), [(36, 36, 0), (37, 1, 37), (1, 37, 37), (40, 50, 50)]
)
def test_as_many_samples_are_needed_as_the_larger_of_prototype_and_sums_needs(
    silo: Silo, prototype: int, sums: int, least: int
) -> None:
    common = CommonSettings(sums_min_count=sums)
    settings = PICSRSettings(prototype_min_count=prototype)
    if not least:
        PICSRSite(settings).admit(session_with(common, silo))
        return
    with pytest.raises(SiteError, match=rf"it has fewer than {least} training samples"):
        PICSRSite(settings).admit(session_with(common, silo))


def test_a_hospital_that_raised_its_floor_sends_no_prototype_either(
    context: Callable[..., Context],
) -> None:
    node = context({"site": "s1a", "sums-min-count": 37}, "picsr")
    with pytest.raises(SiteError, match=r"s1a sends no prototype: it has fewer than 37"):
        SiteSession.open(node)
    node = context({"site": "s1a", "sums-min-count": 36}, "picsr")
    SiteSession.open(node)


def test_a_site_of_just_enough_samples_sends_its_prototype(opened: Opened) -> None:
    found = answer(opened("picsr", own={"prototype_min_count": 36}, **stage("experts")))
    assert "prototype" in found[ARRAYS]


def test_a_router_round_returns_the_trained_router_and_nothing_else(
    opened: Opened, routed: dict[str, Any]
) -> None:
    method = opened("picsr", routed, **stage("router", round=2))
    reply = answer(method)
    found = arrays_of(reply)
    assert set(found) == {name for name in routed if name.startswith("router/")}
    assert any(not np.array_equal(found[name], routed[name]) for name in found)
    assert reply[METRICS]["kept-state"] == 0
    assert not method.state_files.folder.exists()


def test_router_training_leaves_experts_as_they_came(
    opened: Opened, routed: dict[str, Any]
) -> None:
    method = opened("picsr", routed, **stage("router"))
    network = cast(PICSRNetwork, method.open())
    fitted(method, network)
    for site, expert in zip(network.sites, network.experts, strict=True):
        same = {
            name: np.array_equal(tensor, routed[expert_array(site, name)])
            for name, tensor in exchanged_arrays(expert).items()
        }
        assert all(same.values())
    assert torch.equal(network.prototypes[1], torch.from_numpy(routed["prototype/s2a"]))


def test_the_router_has_a_step_size_of_its_own_and_no_penalty(
    opened: Opened, routed: dict[str, Any]
) -> None:
    own = {"router_learning_rate": 0.25, "learning_rate": 0.5, "weight_decay": 0.125}
    for name in STAGES:
        received = routed if name == "router" else None
        method = opened("picsr", received, own=own, **stage(name))
        found = steps_of(method).fit.get("settings", method.sampling)
        expected = (0.25, 0.0) if name == "router" else (0.5, 0.125)
        assert (found.learning_rate, found.weight_decay) == expected


def test_routing_is_told_beside_every_measurement_of_a_router(
    opened: Opened, routed: dict[str, Any]
) -> None:
    metrics = answer(opened("picsr", routed, own=few(4), **stage("router")))[METRICS]
    for where in ("incoming.test", "incoming.val", "trained.val"):
        told = [float(str(metrics[f"{where}.routing.{site}.mean"])) for site in SITES]
        assert sum(told) == pytest.approx(1, abs=1e-5)
        assert f"{where}.routing.s2a.q95" in metrics
    # with the usual least of 10 the ten test samples are told of, the four validation samples not
    usual = answer(opened("picsr", routed, **stage("router")))[METRICS]
    assert {key.partition(".routing")[0] for key in usual if "routing" in key} == {"incoming.test"}
    assert len([key for key in usual if "routing" in key]) == 3 * 6
    assert "incoming.val.accuracy" in usual
    before = answer(opened("picsr", **stage("experts")))[METRICS]
    assert not [key for key in before if "routing" in key]


def test_routing_is_summed_up_over_all_batches() -> None:
    watch = RoutingProbe(["a", "b"], min_samples=3)
    for weights in ([[0.25, 0.75], [0.5, 0.5]], [[0.75, 0.25]]):
        tokens = torch.tensor(weights).log()[..., None]
        watch.see(torch.cat([torch.full_like(tokens, 9.0), tokens], dim=-1))
    found = watch.values()
    assert found["routing.a.mean"] == pytest.approx(0.5)
    assert found["routing.b.q50"] == pytest.approx(0.5)
    assert found["routing.a.q95"] == pytest.approx(0.725)  # 0.5 + 0.9 * 0.25


def test_a_router_that_does_not_fit_its_experts_is_refused(
    opened: Opened, routed: dict[str, Any]
) -> None:
    routed["router/importance.bias"] = np.zeros(2, np.float32)
    with pytest.raises(SettingError, match=r"'importance.bias' is \(2,\), not \(3,\)"):
        answer(opened("picsr", routed, **stage("router")))


def test_a_patient_is_explained_by_weights_answers_and_distances(
    opened: Opened, routed: dict[str, Any]
) -> None:
    method = opened("picsr", routed, **stage("router"))
    found = explain_sample(method, "test", 3)
    truth = int(method.silo.test.labels[3])
    assert found.title.startswith(f"s1a, test row 3: truth {truth}; probabilities are of '9'")
    network, sample = method.open().eval(), method.silo.test.inputs[3:4]
    with torch.no_grad():
        assert found.weights == network.log_weights(sample)[0].exp().tolist()
        answer = network(sample)[0, 9].exp().item()
    assert found.title.endswith(f"the mixture gives it {answer:.3f}")
    assert found.experts == list(SITES)
    mixed = sum(w * a for w, a in zip(found.weights, found.answers, strict=True))
    assert mixed == pytest.approx(answer, abs=1e-5)
    for distance, parts in zip(found.distances, found.contributions, strict=True):
        assert sum(parts) == pytest.approx(distance, abs=1e-3)
    assert [len(row) for row in found.scores] == [4] * 3
    sums = torch.tensor([sum(row) for row in found.scores])
    assert torch.softmax(sums, dim=0).tolist() == pytest.approx(found.weights, abs=1e-5)
    assert found.features == [str(index) for index in range(256)]


@pytest.mark.parametrize(
    ("split", "row", "size"), [("test", 10, 10), ("val", 4, 4), ("val", -1, 4)]
)
def test_a_row_that_is_not_there_cannot_be_explained(
    opened: Opened, routed: dict[str, Any], split: str, row: int, size: int
) -> None:
    method = opened("picsr", routed, **stage("router"))
    with pytest.raises(DataError, match=rf"s1a has {size} {split} rows, .*, but no row {row}"):
        explain_sample(method, split, row)


def test_a_private_prototype_is_of_clipped_samples_with_noise_and_is_charged(
    opened: Opened,
) -> None:
    own = {"sample_clip_norm": 1.0, "noise_multiplier": 2.0, "statistics_noise": 1e-9}

    def prototype_of(clip: float, **more: Any) -> tuple[Lab, Any]:
        changes = {**own, "statistics_clip_norm": clip, "expert_rounds": 1, **more}
        lab = opened("picsr", own=changes, **stage("experts", returns=True))
        method = lab.session.method
        return lab, method._prototype(lab)

    inputs = opened("picsr").silo.train.inputs.float()
    # Parts are whole multiples of the bound over 2^24, so that a bound just above the longest
    # sample clips nothing and rounds little
    _, whole = prototype_of(100.0)
    assert float(inputs.flatten(1).norm(dim=1).max()) < 100
    assert torch.allclose(whole, inputs.mean(dim=0), atol=1e-4)
    _, short = prototype_of(1.0)
    lengths = inputs.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    assert lengths.min() > 1
    assert torch.allclose(short, (inputs / lengths).mean(dim=0), atol=1e-4)
    lab, loud = prototype_of(1.0, statistics_noise=36.0)
    assert lab.outbound.ledger.releases()[36.0, 1.0] == 1
    assert float((loud - short).std()) == pytest.approx(1.0, rel=0.2)  # 36 C over 36 samples
