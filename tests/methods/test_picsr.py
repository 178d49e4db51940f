"""Tests of the method 'picsr': equations, site, server and whole runs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.picsr import PICSRSite
from fedsilo.client_app.session import SiteSession
from fedsilo.core.errors import CheckpointError, DataError, SettingError, SiteError
from fedsilo.core.messages import ARRAYS, EVALUATE, HELLO, METRICS, TRAIN, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.silo.silos import Silo
from fedsilo.explanations.sample import explain_sample
from fedsilo.models.maths.standardisation import pooled_statistics, standardise, sums_of
from fedsilo.models.methods.picsr import (
    PICSRNetwork,
    PICSRSettings,
    Router,
    RoutingProbe,
    StageNotes,
    build_router,
    feature_contributions,
    invert_distances,
    prototype,
    prototype_distances,
    routing_document,
    routing_metrics,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.mixture import Mixture, expert_array
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from fedsilo.strategies.loop.method import initial_weights
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.personal_models import PersonalState as State
from fedsilo.strategies.methods.picsr import PICSR
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import (
    arrays_expected,
    arrays_sent,
    evaluation_of,
    fault_of,
    question_of,
    state_after,
)
from tests.support.errors import refuses
from tests.support.lab import answer, fitted, lab_of, session_with, steps_of
from tests.support.methods import (
    ALL,
    SITES,
    Behaviour,
    Opened,
    SharedRun,
    SiteReply,
    Tiny,
    arrays_of,
    fail_in_rounds,
)

# The equations. The router by hand: two features, prototypes at corners, embeddings one can add
# up.

CORNERS = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 8.0]])
ROWS, IMAGES = NetworkShape((2,), 2), NetworkShape((1, 16, 16), 3)
POINTS = st.tuples(*[st.floats(-50, 50)] * 2)


def _identity_router(experts: int, **own: str) -> Router:
    """Return a router whose f gives the two features back."""
    router = Router(features=2, experts=experts, settings=PICSRSettings(router_width=2, **own))  # type: ignore[arg-type]  # texts only
    with torch.no_grad():
        layer = router.embedding[1]
        layer.weight.copy_(torch.eye(2))
        layer.bias.zero_()
    return router


def _network(task: NetworkShape, sites: int) -> PICSRNetwork:
    names = [f"s{index}" for index in range(sites)]
    experts: dict[str, TokenClassifier] = {
        name: build_classifier(CommonSettings(seed=index, width=1), task)
        for index, name in enumerate(names)
    }
    draw = torch.Generator().manual_seed(3)
    prototypes = {name: torch.randn(task.input_shape, generator=draw) for name in names}
    router = build_router(PICSRSettings(), task.input_shape, sites, 0)
    return PICSRNetwork(experts, prototypes, router)


def _batch(task: NetworkShape, count: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(count, *task.input_shape, generator=draw), torch.arange(count) % 2


def _train_step(network: PICSRNetwork, task: NetworkShape) -> None:
    inputs, labels = _batch(task)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.5)
    network.train()
    network.loss(inputs, labels).backward()  # type: ignore[no-untyped-call]  # torch's own
    optimiser.step()


def test_a_prototype_is_the_mean_sample() -> None:
    rows = torch.tensor([[1.0, -2.0], [3.0, 0.0], [5.0, 8.0]])
    assert prototype(rows).tolist() == [3.0, 2.0]
    images = torch.stack([torch.zeros(1, 2, 2), torch.ones(1, 2, 2)])
    assert torch.equal(prototype(images), torch.full((1, 2, 2), 0.5))


def test_a_prototype_is_added_up_in_float64() -> None:
    rows = torch.tensor([[2.0**24], [1.0], [1.0], [1.0], [1.0], [-(2.0**24)], [0.0], [0.0]])
    assert prototype(rows).item() == 0.5  # in float32 the ones would be lost beside 2**24
    assert prototype(rows).dtype == torch.float32


def test_distances_are_euclidean_between_embeddings() -> None:
    router = _identity_router(3)
    sample = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    assert router.distances(sample, CORNERS).tolist() == [
        [0.0, 5.0, 8.0],
        [3.0, 4.0, pytest.approx(math.sqrt(9 + 64))],
    ]
    with torch.no_grad():
        router.embedding[1].weight.mul_(2)
        router.embedding[1].bias.fill_(7)  # a shift of both sides changes no distance
    assert router.distances(sample[:1], CORNERS).tolist() == [[0.0, 10.0, 16.0]]


def test_similarities_fall_with_distance() -> None:
    distances = torch.tensor([0.0, 1.0, 4.0])
    assert invert_distances(distances, "negative").tolist() == [0.0, -1.0, -4.0]
    assert invert_distances(distances, "reciprocal").tolist() == [1.0, 0.5, pytest.approx(0.2)]


@pytest.mark.parametrize("inversion", ["negative", "reciprocal"])
@given(sample=POINTS, corners=st.lists(POINTS, min_size=1, max_size=7))
def test_the_experts_weights_sum_to_one(
    inversion: str, sample: tuple[float, float], corners: list[tuple[float, float]]
) -> None:
    router = _identity_router(len(corners), inversion=inversion)
    weights = router.log_weights(torch.tensor([sample]), torch.tensor(corners)).exp()
    assert weights.shape == (1, len(corners))
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert weights.min().item() >= 0


@pytest.mark.parametrize("inversion", ["negative", "reciprocal"])
def test_a_new_router_gives_a_sample_at_a_prototype_most_to_that_sites_expert(
    inversion: str,
) -> None:
    settings = PICSRSettings(inversion=inversion)
    router = build_router(settings, (2,), 3, seed=5)
    weights = router.log_weights(CORNERS, CORNERS).exp()
    assert weights.argmax(dim=1).tolist() == [0, 1, 2]


def test_a_new_routers_weights_follow_from_the_distances_alone() -> None:
    weights = _identity_router(3).log_weights(torch.zeros(1, 2), CORNERS).exp()
    parts = [math.exp(-distance) for distance in (0, 5, 8)]
    assert weights[0].tolist() == pytest.approx([part / sum(parts) for part in parts])


def test_the_linear_layer_weighs_similarities_after_training() -> None:
    router = _identity_router(2, inversion="reciprocal")
    with torch.no_grad():
        router.importance.weight.copy_(torch.tensor([[0.0, 0.0], [6.0, 0.0]]))
        router.importance.bias.copy_(torch.tensor([1.0, 0.0]))
    # similarities (1, 1/6): the scores are 1 and 6
    found = router.log_weights(torch.zeros(1, 2), CORNERS[:2])[0]
    assert (found[1] - found[0]).item() == pytest.approx(5.0)


def test_scores_are_what_each_similarity_and_the_bias_add_by_hand() -> None:
    router = _identity_router(2, inversion="reciprocal")
    with torch.no_grad():
        router.importance.weight.copy_(torch.tensor([[2.0, -4.0], [6.0, 1.0]]))
        router.importance.bias.copy_(torch.tensor([1.0, -0.5]))
    # distances 0 and 3 are similarities 1 and 1/4
    assert router.scores(torch.tensor([0.0, 3.0])).tolist() == [[2.0, -1.0, 1.0], [6.0, 0.25, -0.5]]


@pytest.mark.parametrize("inversion", ["negative", "reciprocal"])
@given(sample=POINTS, corners=st.lists(POINTS, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_the_softmax_of_the_scores_sums_is_the_weights(
    inversion: str, sample: tuple[float, float], corners: list[tuple[float, float]], seed: int
) -> None:
    router, draw = _identity_router(len(corners), inversion=inversion), torch.Generator()
    draw.manual_seed(seed)
    with torch.no_grad():
        for parameter in router.importance.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
        patient, prototypes = torch.tensor([sample]), torch.tensor(corners)
        scores = router.scores(router.distances(patient, prototypes)[0])
        weights = router.log_weights(patient, prototypes)[0].exp()
    assert scores.shape == (len(corners), len(corners) + 1)
    assert torch.allclose(torch.softmax(scores.sum(dim=1), dim=0), weights, atol=1e-3)


@given(st.lists(POINTS, min_size=1, max_size=4))
def test_a_router_is_blind_where_all_prototypes_coincide(
    samples: list[tuple[float, float]],
) -> None:
    router = _identity_router(3)
    weights = router.log_weights(torch.tensor(samples), torch.ones(3, 2)).exp()
    assert torch.allclose(weights, torch.full((len(samples), 3), 1 / 3), atol=1e-6)


def test_prototypes_coincide_with_standardisation_by_site_and_not_pooled() -> None:
    draw = torch.Generator().manual_seed(4)
    sites = [
        torch.randn(30, 2, generator=draw) * (1 + at) + 10 * at for at in range(3)
    ]  # three hospitals far apart
    blind = [prototype(standardise(rows, pooled_statistics([sums_of(rows)]))) for rows in sites]
    assert torch.allclose(torch.stack(blind), torch.zeros(3, 2), atol=1e-6)
    statistics = pooled_statistics([sums_of(rows) for rows in sites])
    seeing = torch.stack([prototype(standardise(rows, statistics)) for rows in sites])
    router = build_router(PICSRSettings(), (2,), 3, seed=0)
    patient = torch.tensor([[1.0, -1.0]])
    apart = router.distances(patient, torch.stack(blind))[0]
    assert (apart.max() - apart.min()).item() < 1e-5
    apart = router.distances(patient, seeing)[0]
    assert (apart.max() - apart.min()).item() > 0.1


def test_the_routers_first_weights_are_keyed_on_the_seed() -> None:
    first, again, other = (build_router(PICSRSettings(), (2,), 3, seed) for seed in (5, 5, 6))
    assert torch.equal(first.embedding[1].weight, again.embedding[1].weight)
    assert not torch.equal(first.embedding[1].weight, other.embedding[1].weight)


@pytest.mark.parametrize("task", [ROWS, IMAGES])
@pytest.mark.parametrize("sites", [1, 2, 7])
def test_any_number_of_experts_is_mixed_for_rows_and_images(task: NetworkShape, sites: int) -> None:
    network, (inputs, _) = _network(task, sites).eval(), _batch(task)
    with torch.no_grad():
        said = torch.stack([torch.softmax(e(inputs), dim=-1) for e in network.experts], dim=1)
        weights = network.log_weights(inputs).exp()
        found = network(inputs).exp()
        tokens = network.encode(inputs)
    assert weights.shape == (8, sites)
    assert torch.allclose(found, (weights[..., None] * said).sum(dim=1), atol=1e-5)
    assert torch.allclose(tokens[..., -1].exp(), weights, atol=1e-6)


def test_picsr_network_orders_prototypes_as_experts() -> None:
    experts = {site: build_classifier(CommonSettings(), ROWS) for site in ("b", "a")}
    prototypes = {"a": torch.zeros(2), "b": torch.ones(2)}
    network = PICSRNetwork(experts, prototypes, _identity_router(2))
    assert network.sites == ["b", "a"]
    assert network.prototypes.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("task", [ROWS, IMAGES])
def test_training_changes_the_router_and_not_the_experts(task: NetworkShape) -> None:
    network = _network(task, 2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    _train_step(network, task)
    after = network.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.startswith("router.") for name in changed)
    assert "prototypes" not in changed
    assert not any(name.startswith("experts.") for name in changed)
    # The running statistics of batch norm are no parameters: only the mode keeps them still
    assert not any("running_mean" in name for name in changed)


def test_experts_take_no_gradient_and_stay_in_evaluation_mode() -> None:
    network = _network(IMAGES, 2).train()
    network.loss(*_batch(IMAGES)).backward()  # type: ignore[no-untyped-call]  # torch's own
    experts = list(network.experts.parameters())
    assert not any(parameter.grad is not None for parameter in experts)
    assert all(parameter.grad is not None for parameter in network.router.parameters())
    assert {part.training for part in network.experts.modules()} == {False}
    assert network.router.training
    network.eval()
    assert not any(part.training for part in network.modules())


def test_an_untrained_router_between_equal_prototypes_is_the_ensemble() -> None:
    network, (inputs, _) = _network(ROWS, 2).eval(), _batch(ROWS)
    network.prototypes.zero_()
    mean = Mixture(dict(zip(network.sites, network.experts, strict=True))).eval()  # type: ignore[arg-type]  # the list's own type is Module
    assert torch.allclose(network(inputs), mean(inputs), atol=1e-6)


# The equations. What a router reveals: routing metrics, parts of distances, and the routing
# document.

TWO_CORNERS = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
FEATURES = st.tuples(*[st.floats(-5, 5, width=32)] * 3)


def test_routing_metrics_are_mean_and_quantiles_per_expert() -> None:
    steps = torch.arange(21) / 20  # 0, 0.05 ... 1: its quantiles are its shares
    found = routing_metrics(torch.stack([steps, 1 - steps], dim=1), ["a", "st.b"], min_samples=21)
    expected = {"mean": 0.5, "q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
    assert found == {
        f"routing.{site}.{name}": pytest.approx(value, abs=1e-6)
        for site in ("a", "st.b")
        for name, value in expected.items()
    }


@pytest.mark.parametrize(("samples", "told"), [(1, 0), (9, 0), (10, 6), (11, 6)])
def test_routing_metrics_over_too_few_samples_are_empty(samples: int, told: int) -> None:
    found = routing_metrics(torch.full((samples, 2), 0.5), ["a", "b"], min_samples=10)
    assert len(found) == 2 * told
    assert ("routing.a.mean" in found) == ("routing.b.mean" in found) == bool(told)


@given(st.lists(st.tuples(*[st.floats(-9, 9)] * 3), min_size=1, max_size=30))
def test_the_experts_mean_weights_sum_to_one_and_quantiles_rise(
    rows: list[tuple[float, float, float]],
) -> None:
    found = routing_metrics(
        torch.softmax(torch.tensor(rows), dim=1), ["a", "b", "c"], min_samples=1
    )
    assert sum(found[f"routing.{site}.mean"] for site in "abc") == pytest.approx(1, abs=1e-5)
    for site in "abc":
        quantiles = [found[f"routing.{site}.q{share}"] for share in ("05", "25", "50", "75", "95")]
        assert quantiles == sorted(quantiles)


def test_each_features_part_in_a_distance_by_hand() -> None:
    # from (0, 0) to (3, 4): the gradient along the line is (3, 4) / 5, times (3, 4)
    parts = feature_contributions(_identity_router(2), torch.tensor([3.0, 4.0]), TWO_CORNERS)
    assert parts[0].tolist() == [pytest.approx(9 / 5), pytest.approx(16 / 5)]
    assert parts[0].sum().item() == pytest.approx(5)


def test_a_sample_on_a_prototype_has_no_distance_to_explain() -> None:
    parts = feature_contributions(_identity_router(2), torch.tensor([3.0, 4.0]), TWO_CORNERS)
    assert parts[1].tolist() == [0.0, 0.0]


def test_a_feature_that_f_does_not_see_adds_nothing() -> None:
    router = _identity_router(2)
    with torch.no_grad():
        router.embedding[1].weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    parts = feature_contributions(router, torch.tensor([3.0, 4.0]), TWO_CORNERS[:1])
    assert parts[0].tolist() == [pytest.approx(6.0), 0.0]


def test_a_feature_may_bring_a_sample_nearer() -> None:
    router = _identity_router(2)
    with torch.no_grad():
        router.embedding[1].weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    # f is the difference of the two features: 5 - 2 = 3
    parts = feature_contributions(router, torch.tensor([5.0, 2.0]), TWO_CORNERS[:1])
    assert parts[0].tolist() == [pytest.approx(5.0), pytest.approx(-2.0)]


@settings(max_examples=40, deadline=None)
@given(sample=FEATURES, corners=st.lists(FEATURES, min_size=1, max_size=3))
def test_the_parts_add_up_to_the_distance_for_a_linear_f(
    sample: tuple[float, ...], corners: list[tuple[float, ...]]
) -> None:
    router = build_router(PICSRSettings(), (3,), len(corners), seed=2)
    patient, prototypes = torch.tensor(sample), torch.tensor(corners)
    parts = feature_contributions(router, patient, prototypes, steps=3)
    distances = router.distances(patient[None], prototypes)[0]
    assert parts.shape == prototypes.shape
    assert parts.sum(dim=1).tolist() == pytest.approx(distances.tolist(), abs=1e-4)


def test_parts_of_images_have_the_images_shape() -> None:
    router = build_router(PICSRSettings(), (1, 4, 4), 2, seed=0)
    image, prototypes = torch.ones(1, 4, 4), torch.zeros(2, 1, 4, 4)
    parts = feature_contributions(router, image, prototypes)
    assert parts.shape == (2, 1, 4, 4)
    expected = router.distances(image[None], prototypes)[0]
    assert torch.allclose(parts.flatten(1).sum(dim=1), expected, atol=1e-4)


def test_prototype_distances_as_they_are_and_as_f_embeds_them() -> None:
    router = _identity_router(2)
    with torch.no_grad():
        router.embedding[1].weight.mul_(3)
    found = prototype_distances(router, {"a": TWO_CORNERS[0], "b": TWO_CORNERS[1]})
    assert found == {"input": [[0.0, 5.0], [5.0, 0.0]], "embedded": [[0.0, 15.0], [15.0, 0.0]]}


def test_prototype_distances_of_images_are_over_all_pixels() -> None:
    router = build_router(PICSRSettings(), (1, 2, 2), 2, seed=0)
    found = prototype_distances(router, {"a": torch.zeros(1, 2, 2), "b": torch.ones(1, 2, 2)})
    assert found["input"] == [[0.0, 2.0], [2.0, 0.0]]
    assert found["embedded"][0][1] == found["embedded"][1][0] > 0


def test_routing_document_sorts_metrics_by_patients_site_and_expert() -> None:
    values = {
        "a": {"accuracy": 0.9, "routing.a.mean": 0.75, "routing.a.q50": 0.8, "routing.b.mean": 0.25}
    }
    distances = {"input": [[0.0, 1.0], [1.0, 0.0]]}
    assert routing_document(values, ["a", "b"], distances) == {
        "experts": ["a", "b"],
        "sites": {"a": {"a": {"mean": 0.75, "q50": 0.8}, "b": {"mean": 0.25}}},
        "prototype distances": distances,
    }


def test_routing_metrics_of_a_single_sample_are_finite() -> None:
    found = routing_metrics(torch.tensor([[0.25, 0.75]]), ["a", "b"], min_samples=1)
    assert all(math.isfinite(value) for value in found.values())
    assert found["routing.b.q05"] == found["routing.b.q95"] == 0.75


def test_experts_whose_names_begin_alike_are_kept_apart() -> None:
    values = {"va": {"routing.va.mean": 0.125, "routing.va.2.mean": 0.875}}
    found = routing_document(values, ["va", "va.2"], {})["sites"]["va"]
    assert found == {"va": {"mean": 0.125}, "va.2": {"mean": 0.875}}


# At a site. PICSR at a site, stage by stage: what it takes, returns and keeps.

STAGES = ("warmup", "experts", "router")


def stage(name: str, **fields: Any) -> dict[str, Any]:
    return {"notes": {"stage": name}, **fields}


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
    kept = first.state_files.load_before(Instruction(2, "train"))
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
    kept = method.state_files.load_before(Instruction(2, "train"))
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
    with refuses(SiteError, "s1a", "37"):
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
    with refuses(SiteError, least):
        PICSRSite(settings).admit(session_with(common, silo))


def test_a_hospital_that_raised_its_floor_sends_no_prototype_either(
    context: Callable[..., Context],
) -> None:
    node = context({"site": "s1a", "sums-min-count": 37}, "picsr")
    with refuses(SiteError, "s1a", "37"):
        SiteSession.from_context(node)
    node = context({"site": "s1a", "sums-min-count": 36}, "picsr")
    SiteSession.from_context(node)


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
    own = few(4) | {"sums_min_count": 4}
    metrics = answer(opened("picsr", routed, own=own, **stage("router")))[METRICS]
    for where in ("incoming.test", "incoming.val", "trained.val"):
        told = [float(str(metrics[f"{where}.routing.{site}.mean"])) for site in SITES]
        assert sum(told) == pytest.approx(1, abs=1e-5)
        assert f"{where}.routing.s2a.q95" in metrics
    # A run's larger floor counts too, and not only the hospital's
    stricter = answer(opened("picsr", routed, own=few(4), **stage("router")))[METRICS]
    assert "incoming.val.routing.s1a.mean" not in stricter
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
    with refuses(SettingError, "importance.bias", "2", "3"):
        answer(opened("picsr", routed, **stage("router")))


def test_a_patient_is_explained_by_weights_answers_and_distances(
    opened: Opened, routed: dict[str, Any]
) -> None:
    method = opened("picsr", routed, **stage("router"))
    found = explain_sample(method, "test", 3)
    truth = int(method.silo.test.labels[3])
    assert found.title.startswith(f"s1a, test row 3: truth {truth}; ")
    network, sample = method.open().eval(), method.silo.test.inputs[3:4]
    with torch.no_grad():
        assert found.weights == network.log_weights(sample)[0].exp().tolist()
        answer = network(sample)[0, 9].exp().item()
    assert found.title.endswith(f"of '9' is {100 * answer:.1f} %")
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
    with refuses(DataError, "s1a", size, split, row):
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
    assert lab.masked_part.ledger.releases()[36.0, 1.0] == 1
    assert float((loud - short).std()) == pytest.approx(1.0, rel=0.2)  # 36 C over 36 samples


# At the server. The server side of PICSR by hand: its stages, what goes out and what must come
# back.

TASK = NetworkShape((1, 16, 16), 10)
FINETUNED = {"experts": "finetuned", "warmup_rounds": 2}
Build = Callable[..., PICSR]


@pytest.fixture
def picsr(participants: Participants) -> Build:
    def build(rounds: int = 9, **own: Any) -> PICSR:
        common = CommonSettings(rounds=rounds, silos=3, width=1, seed=7)
        return PICSR(common, PICSRSettings(**{"expert_rounds": 3, **own}), participants)

    return build


def routed_state(round_: int = 5, **extras: Any) -> State:
    """Return a state with two experts of one weight, their prototypes and a router."""
    arrays = {
        "expert/s1a/w": np.float32([1]),
        "expert/s3a/w": np.float32([3]),
        "prototype/s1a": np.zeros((1, 16, 16), np.float32),
        "prototype/s3a": np.ones((1, 16, 16), np.float32),
        "router/v": np.float32([0]),
    }
    return State(arrays, round_, {"s1a": 1, "s3a": 1}, ("s1a", "s3a"), **extras)


def replied_arrays(value: float) -> dict[str, Any]:
    """Return what a site gives in the last expert round, its arrays all ``value``."""
    network = build_classifier(CommonSettings(width=1), TASK)
    arrays = {
        f"expert/{name}": np.full(tensor.shape, value, np.float32)
        for name, tensor in exchanged_arrays(network).items()
    }
    return arrays | {"prototype": np.full((1, 16, 16), value, np.float32)}


def _check(common: CommonSettings, own: PICSRSettings) -> None:
    own.check(common, data_set(common.dataset).is_table)


def refused(common: dict[str, Any], own: dict[str, Any]) -> str:
    with pytest.raises(SettingError) as caught:
        _check(CommonSettings(**common), PICSRSettings(**own))
    return str(caught.value)


def test_each_sites_own_statistics_are_refused_as_they_blind_the_router() -> None:
    told = refused({"dataset": "heart", "standardise": "site"}, {})
    assert "all prototypes are equal" in told
    assert "'pooled' or 'declared'" in told


def test_a_site_too_small_for_a_prototype_must_not_send_the_sums_that_hold_it() -> None:
    for dataset in ("heart", "heart-synthetic", "table"):
        told = refused({"dataset": dataset}, {"prototype_min_count": 11})
        assert "'picsr.prototype-min-count' is 11, but 'privacy.sums-min-count' is 10" in told
        assert told.endswith("raise 'privacy.sums-min-count'")


@pytest.mark.parametrize(
    "common",
    [
        {"dataset": "heart", "sums_min_count": 11},
        {"dataset": "heart", "standardise": "declared"},
        {"dataset": "digits"},
    ],
)
def test_more_samples_for_a_prototype_are_allowed_where_no_sums_of_fewer_leave(
    common: dict[str, Any],
) -> None:
    _check(CommonSettings(**common), PICSRSettings(prototype_min_count=11))


@pytest.mark.parametrize(
    ("rounds", "own", "taken"),
    [
        (3, {"expert_rounds": 3}, 3),
        (2, {"expert_rounds": 3}, 3),
        (5, {"expert_rounds": 3, **FINETUNED}, 5),
    ],
)
def test_a_run_without_a_round_for_the_router_is_refused(
    rounds: int, own: dict[str, Any], taken: int
) -> None:
    told = refused({"rounds": rounds}, own)
    assert f"'rounds' is {rounds}, but experts take {taken} of them" in told
    _check(CommonSettings(rounds=taken + 1), PICSRSettings(**own))


@pytest.mark.parametrize(
    ("own", "stages"),
    [
        ({}, ["experts"] * 3 + ["router"] * 4),
        ({"warmup_rounds": 2}, ["experts"] * 3 + ["router"] * 4),  # local ones have no warm-up
        (FINETUNED, ["warmup"] * 2 + ["experts"] * 3 + ["router"] * 2),
    ],
)
def test_the_stages_follow_one_another_by_rounds(
    picsr: Build, own: dict[str, Any], stages: list[str]
) -> None:
    strategy = picsr(7, **own)
    states = [State({}, round_) for round_ in range(7)]
    assert [strategy.settings.stage(state.round) for state in states] == stages
    assert [question_of(strategy, state).notes["s1a"] for state in states] == [
        StageNotes(stage) for stage in stages
    ]
    assert evaluation_of(strategy, State({}, 7)).notes["s1a"] == StageNotes("router")


def test_local_experts_start_from_nothing_that_the_server_holds(picsr: Build) -> None:
    assert picsr().initial_state().arrays == {}


def test_finetuned_experts_start_from_the_seeds_weights(picsr: Build) -> None:
    strategy = picsr(**FINETUNED)
    first = strategy.initial_state()
    expected = initial_weights(build_classifier(strategy.common, TASK))
    assert set(first.arrays) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(first.arrays[name], array)
    assert arrays_expected(strategy, first)["s1a"] == {
        name: ArraySpec(array.shape) for name, array in expected.items()
    }
    assert arrays_sent(strategy, first)["s1a"] is first.arrays


def test_the_warm_up_averages_by_samples_even_if_the_router_does_not(
    picsr: Build, site_reply: SiteReply
) -> None:
    strategy = picsr(**FINETUNED, router_average="equal")
    replies = {
        "s1a": site_reply("s1a", {"w": [2.0]}, num_examples=1),
        "s2a": site_reply("s2a", {"w": [6.0]}, num_examples=3),
    }
    after = state_after(strategy, State({"w": np.float32([0])}), replies)
    assert after.arrays["w"].tolist() == [5]


def test_global_weights_go_only_to_sites_without_an_expert_of_their_own(picsr: Build) -> None:
    strategy, arrays = picsr(**FINETUNED), {"w": np.float32([1])}
    warm = State(arrays, 1, ("s2a",), ("s2a",))
    experts = State(arrays, 3, ("s2a",), ("s2a",))
    assert all(arrays_sent(strategy, warm)[site] == arrays for site in ALL)
    assert {site: dict(arrays_sent(strategy, experts)[site]) for site in ALL} == {
        "s1a": arrays,
        "s2a": {},
        "s3a": arrays,
    }


def test_while_experts_train_nothing_is_expected_and_who_has_one_is_remembered(
    picsr: Build, site_reply: SiteReply
) -> None:
    strategy, before = picsr(**FINETUNED), State({"w": np.float32([1])}, 3)
    assert arrays_expected(strategy, before)["s1a"] == {}
    after = state_after(strategy, before, {"s1a": site_reply("s1a", kept_state=1)})
    assert (after.arrays, after.personal) == (before.arrays, ["s1a"])


@pytest.mark.parametrize(("own", "round_"), [({}, 2), (FINETUNED, 4)])
def test_the_last_expert_round_expects_the_expert_and_the_prototype(
    picsr: Build, own: dict[str, Any], round_: int
) -> None:
    found = arrays_expected(picsr(**own), State({}, round_))["s1a"]
    assert found == {name: ArraySpec(array.shape) for name, array in replied_arrays(0).items()}
    assert found["prototype"] == ArraySpec((1, 16, 16))


def test_experts_and_prototypes_are_collected_beside_a_new_router(
    picsr: Build, site_reply: SiteReply
) -> None:
    strategy = picsr()
    replies = {site: site_reply(site, replied_arrays(i)) for i, site in enumerate(("s1a", "s3a"))}
    after = state_after(strategy, State({"w": np.float32([9])}, 2), replies)
    router = exchanged_arrays(build_router(PICSRSettings(), (1, 16, 16), 2, 7))
    kinds = {name.split("/")[0] for name in after.arrays}
    assert kinds == {"expert", "prototype", "router"}  # no global weights any more
    for index, site in enumerate(("s1a", "s3a")):
        assert (after.arrays[f"expert/{site}/head.4.bias"] == index).all()
        assert (after.arrays[f"prototype/{site}"] == index).all()
    assert not [name for name in after.arrays if "s2a" in name]
    for name, tensor in router.items():
        np.testing.assert_array_equal(after.arrays[f"router/{name}"], tensor)
    assert all(array.dtype == np.float32 for array in after.arrays.values())


@pytest.mark.parametrize(
    ("phase", "round_", "value", "said"),
    [
        (TRAIN, 2, 1e38, "its expert has no finite answer"),
        (TRAIN, 2, 0.5, None),
        (TRAIN, 1, 1e38, None),  # nothing comes yet
        (EVALUATE, 2, 1e38, None),
    ],
)
def test_an_expert_without_a_finite_answer_to_its_own_prototype_is_objected_to(
    picsr: Build, site_reply: SiteReply, phase: str, round_: int, value: float, said: str | None
) -> None:
    strategy = picsr()
    reply = site_reply("s1a", replied_arrays(value))
    assert fault_of(strategy, State({}, round_), reply, phase) == said


@pytest.mark.parametrize("phase", [TRAIN, EVALUATE])
def test_all_experts_and_prototypes_go_to_all_sites_even_to_those_that_gave_none(
    picsr: Build, phase: str
) -> None:
    state = routed_state()
    for site in ALL:
        assert arrays_sent(picsr(), state, phase)[site] == state.arrays


def test_of_a_router_round_only_what_is_trained_is_expected_and_changed(
    picsr: Build, site_reply: SiteReply
) -> None:
    strategy, before, trained = picsr(), routed_state(), {"router/v"}
    assert set(arrays_expected(strategy, before)["s2a"]) == trained
    replies = {"s2a": site_reply("s2a", {name: [7.0] for name in trained})}
    after = state_after(strategy, before, replies)
    assert set(after.arrays) == set(before.arrays)
    changed = {n for n in before.arrays if not np.array_equal(before.arrays[n], after.arrays[n])}
    assert changed == trained
    assert all(after.arrays[name].tolist() == [7] for name in trained)


@pytest.mark.parametrize(("average", "expected"), [("samples", 5.0), ("equal", 4.0)])
def test_the_routers_average_weighs_sites_by_samples_or_equally(
    picsr: Build, site_reply: SiteReply, average: str, expected: float
) -> None:
    replies = {
        "s1a": site_reply("s1a", {"router/v": [2.0]}, num_examples=1),
        "s2a": site_reply("s2a", {"router/v": [6.0]}, num_examples=3),
    }  # (2 + 3 * 6) / 4 = 5, (2 + 6) / 2 = 4
    after = state_after(picsr(router_average=average), routed_state(), replies)
    assert after.arrays["router/v"].tolist() == [expected]


def test_the_run_tells_who_listens_to_whom_and_how_far_prototypes_are_apart(picsr: Build) -> None:
    router = build_router(PICSRSettings(), (1, 16, 16), 2, 7)
    with torch.no_grad():
        router.embedding[1].weight.zero_()
        router.embedding[1].weight[0, 0] = 3.0  # f sees the first pixel alone
    arrays = {k: v for k, v in routed_state().arrays.items() if not k.startswith("router/")}
    arrays |= {f"router/{n}": t.numpy() for n, t in exchanged_arrays(router).items()}
    values = {
        "s2a": {"accuracy": 0.5, "routing.s1a.mean": 0.25, "routing.s3a.mean": 0.75},
    }
    found = picsr().documents(State(arrays, 9), values)
    assert found == {
        "routing.json": {
            "experts": ["s1a", "s3a"],
            "sites": {"s2a": {"s1a": {"mean": 0.25}, "s3a": {"mean": 0.75}}},
            "prototype distances": {
                "input": [[0.0, 16.0], [16.0, 0.0]],  # 256 pixels, each 1 apart
                "embedded": [[0.0, 3.0], [3.0, 0.0]],
            },
        }
    }


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, "without noise; never over fewer than 10 samples"),
        ({"prototype_min_count": 25}, "never over fewer than 25 samples"),
        ({}, "over validation and over test samples, at least 10 of each"),
        ({"prototype_min_count": 25}, "over test samples, at least 25 of each"),
        (FINETUNED, "each warm-up round"),
    ],
)
def test_picsr_says_what_leaves_a_site(picsr: Build, own: dict[str, Any], said: str) -> None:
    told = picsr(**own).disclosures().leaves
    assert said in "\n".join(told)
    for always in ("the site's expert", "prototype, the mean", "router's weights", "quantiles"):
        assert any(always in line for line in told)
    assert any("warm-up" in line for line in told) is (own == FINETUNED)


# Whole runs. Whole runs of PICSR, over real sites and over sites that fail when a test wants it.

COMMON = CommonSettings(rounds=4, silos=3, width=1, run_name="run")
Run = Callable[..., tuple[Any, PICSR]]


def kinds(content: RecordDict) -> set[str]:
    return {name.partition("/")[0] for name in arrays_of(content)}


@pytest.fixture
def good(content: Any, measured: dict[str, float], told: Any) -> Callable[..., Behaviour]:
    """Return a builder of a good site whose arrays are all ``value``; ``changes`` to its gift."""

    def build(value: float = 1.0, **changes: Any) -> Behaviour:
        def answer(message: Message) -> RecordDict:
            said = told(message)
            if message.metadata.message_type == EVALUATE or not said["returns"]:
                return content(kept_state=1, **measured)
            if said["note.stage"] == "router":
                received = message.content[ARRAYS]
                sent = {n: received[n].numpy() for n in received if n.startswith("router/")}
            else:
                network = initial_weights(build_classifier(COMMON, TASK))
                sent = {f"expert/{n}": a for n, a in network.items()}
                sent["prototype"] = np.zeros(TASK.input_shape)
            filled = {n: np.full(a.shape, value, np.float32) for n, a in sent.items()}
            gift = {} if said["note.stage"] == "router" else changes
            arrays = {**filled, **{n.replace("__", "/"): a for n, a in gift.items()}}
            return content(arrays, kept_state=1, **measured)

        return answer

    return build


@pytest.fixture
def started(
    spy_grid: Any, fake_app: Any, participants: Participants, recorder: Any, good: Any
) -> Run:
    """Return a function that runs two expert rounds and two of the router over fake sites."""

    def start(min_sites: int = 0, **special: Behaviour) -> tuple[Any, RoundLoop]:
        common = dataclasses.replace(COMMON, min_sites=min_sites)
        own = PICSRSettings(expert_rounds=2)
        strategy = RoundLoop(PICSR(common, own, participants), [recorder], "/somewhere")
        strategy.state = strategy.method.initial_state()
        grid = spy_grid(fake_app(good(), **special))
        strategy.start(grid, common.rounds, 20)
        return grid, strategy

    return start


def experts_of(strategy: PICSR) -> list[str]:
    arrays = strategy.state.arrays
    found = sorted(n.removeprefix("prototype/") for n in arrays if n.startswith("prototype/"))
    assert found == sorted({n.split("/")[1] for n in arrays if n.startswith("expert/")})
    assert arrays["router/importance.weight"].shape == (len(found), len(found))
    return found


def test_an_expert_leaves_its_site_once_and_a_prototype_only_with_it(
    shared_run: SharedRun, tiny: Tiny, told: Any
) -> None:
    grid, _, _ = shared_run(tiny("picsr", rounds=4, expert_rounds=2))
    sent, replies = grid.sent[3:], grid.replies[3:]  # after the hellos
    assert [kinds(r.content) for r in replies[::3]] == [
        set(),
        {"expert", "prototype"},
        {"router"},
        {"router"},
        set(),
    ]
    routed = {"expert", "prototype", "router"}
    assert [kinds(m.content) for m in sent[::3]] == [set(), set(), routed, routed, routed]
    stages = [told(m)["note.stage"] for m in sent[::3]]
    assert stages == ["experts"] * 2 + ["router"] * 3
    assert [told(m)["returns"] for m in sent[::3]] == [False, True, True, True, False]
    for messages in (sent, replies):
        for first, *others in zip(*[iter(messages)] * 3, strict=True):
            names = set(arrays_of(first.content))
            assert all(set(arrays_of(other.content)) == names for other in others)


def test_experts_reach_the_other_sites_as_they_were_sent(shared_run: SharedRun, tiny: Tiny) -> None:
    grid, strategy, _ = shared_run(tiny("picsr", rounds=4, expert_rounds=2))
    given = dict(zip(ALL, grid.replies[6:9], strict=True))  # of round 2, after the hellos
    last = grid.sent[-1].content[ARRAYS]
    for site, reply in given.items():
        for name, array in reply.content[ARRAYS].items():
            wire = f"prototype/{site}" if name == "prototype" else name.replace("/", f"/{site}/")
            np.testing.assert_array_equal(last[wire].numpy(), array.numpy())
    assert experts_of(strategy) == ALL


def test_finetuned_experts_part_from_the_fedavg_model_and_are_sent_no_weights_again(
    spied_run: Run, tiny: Tiny, recorder: Any, told: Any
) -> None:
    own = {"experts": "finetuned", "warmup_rounds": 1, "expert_rounds": 2}
    grid, _ = spied_run(tiny("picsr", rounds=4, **own), [recorder])
    sent = grid.sent[3:]
    stages = [told(m)["note.stage"] for m in sent[::3]]
    assert stages == ["warmup", "experts", "experts", "router", "router"]
    average = recorder.states[0].arrays
    for message in sent[3:6]:
        for name, array in message.content[ARRAYS].items():
            np.testing.assert_array_equal(array.numpy(), average[name])
    assert not any(arrays_of(message.content) for message in sent[6:9])


def test_a_run_ends_with_a_routing_document_of_its_own_values(
    shared_run: SharedRun, tiny: Tiny
) -> None:
    _, strategy, _ = shared_run(tiny("picsr", rounds=4, expert_rounds=2))
    values = {"s1a": {f"routing.{site}.mean": 1 / 3 for site in ALL}}
    found = strategy.method.documents(strategy.state, values)["routing.json"]
    assert found["experts"] == ALL
    distances = found["prototype distances"]
    for kind in ("input", "embedded"):
        assert np.shape(distances[kind]) == (3, 3)
        assert np.diag(distances[kind]).tolist() == [0, 0, 0]
        assert distances[kind][0][1] == pytest.approx(distances[kind][1][0])
        assert distances[kind][0][1] > 0


def bad_gifts() -> dict[str, dict[str, Any]]:
    return {
        r"'expert/head.4.bias' contains non-finite values": {
            "expert__head.4.bias": np.full(10, np.nan, np.float32)
        },
        r"'expert/head.4.bias' is float32 \(9,\), expected float32 \(10,\)": {
            "expert__head.4.bias": np.zeros(9, np.float32)
        },
        r"'prototype' contains non-finite values": {
            "prototype": np.full((1, 16, 16), np.inf, np.float32)
        },
        r"'prototype' is float32 \(16, 16\), expected float32 \(1, 16, 16\)": {
            "prototype": np.zeros((16, 16), np.float32)
        },
        r"missing \[\], surplus \['row'\]": {"row": np.zeros(3, np.float32)},
    }


@pytest.mark.parametrize("index", range(5))
def test_an_expert_that_cannot_be_used_stops_the_run_or_stays_out(
    started: Run, good: Any, recorder: Any, index: int
) -> None:
    said, changes = list(bad_gifts().items())[index]
    bad = good(**changes)
    with pytest.raises(SiteError, match=f"site s2a, round 2, phase train: .*{said}"):
        started(s2a=bad)
    recorder.failures.clear()
    _, strategy = started(min_sites=2, s2a=bad)
    assert experts_of(strategy) == ["s1a", "s3a"]
    assert [(round_, site) for round_, _, site, _ in recorder.failures] == [(2, "s2a")]


def test_a_router_that_is_not_finite_never_reaches_the_mean(
    started: Run, good: Any, told: Any
) -> None:
    def poisons(message: Message) -> RecordDict:
        value = np.nan if told(message)["note.stage"] == "router" else 1.0
        answer: RecordDict = good(value)(message)
        return answer

    with refuses(SiteError, "s2a", "3"):
        started(s2a=poisons)
    _, strategy = started(min_sites=2, s2a=poisons)
    assert experts_of(strategy) == ALL
    assert strategy.state.arrays["router/importance.bias"].tolist() == [1, 1, 1]


def test_a_site_that_drops_out_before_it_gave_its_expert_has_none_and_trains_the_router_later(
    started: Run, good: Any, told: Any, recorder: Any
) -> None:
    grid, strategy = started(min_sites=2, s2a=fail_in_rounds([2], told, good(4.0)))
    assert experts_of(strategy) == ["s1a", "s3a"]
    assert [(round_, site) for round_, _, site, _ in recorder.failures] == [(2, "s2a")]
    to_s2a = [m.content for m in grid.sent if m.metadata.dst_node_id == 1002]
    experts = [name for name in arrays_of(to_s2a[2]) if name.startswith("expert/")]
    assert {name.split("/")[1] for name in experts} == {"s1a", "s3a"}
    # its router counts all the same: (1 + 4 + 1) / 3
    assert strategy.state.arrays["router/importance.bias"].tolist() == [2, 2]


def test_a_site_that_drops_out_after_it_gave_its_expert_is_still_heard(
    started: Run, good: Any, told: Any, recorder: Any
) -> None:
    _, strategy = started(min_sites=2, s2a=fail_in_rounds([3, 4, 5], told, good(4.0)))
    arrays = strategy.state.arrays
    assert experts_of(strategy) == ALL
    assert (arrays["expert/s2a/head.4.bias"] == 4).all()
    assert (arrays["prototype/s2a"] == 4).all()
    assert arrays["router/importance.bias"].tolist() == [1, 1, 1]
    assert [(round_, site) for round_, _, site, _ in recorder.failures][:2] == [
        (3, "s2a"),
        (4, "s2a"),
    ]


@pytest.mark.parametrize("round_", [1, 2, 3])
def test_without_min_sites_a_site_that_drops_out_stops_the_run(
    started: Run, good: Any, told: Any, round_: int
) -> None:
    with refuses(SiteError, "s2a", round_):
        started(s2a=fail_in_rounds([round_], told, good()))


FEW = "site s2a sends no prototype: it has fewer than 37 training samples"


def test_a_site_of_few_samples_is_refused_before_anything_of_it_left(
    spied_run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        SiteError, match=rf"{FEW} \('picsr.prototype-min-count'\).* 0 of 3 can, but 3 "
    ):
        spied_run(tiny("picsr", prototype_min_count=37))
    usual = PICSRSite.admit

    def admit(site: PICSRSite, session: SiteSession) -> None:
        few = dataclasses.replace(site.settings, prototype_min_count=37)
        usual(PICSRSite(few) if session.silo.name == "s2a" else site, session)

    monkeypatch.setattr(PICSRSite, "admit", admit)
    with pytest.raises(
        SiteError, match=rf"{FEW}.* 2 of 3 can, but 3 are needed \('run.min-sites'\)"
    ):
        spied_run(tiny("picsr"))
    grid, strategy = spied_run(tiny("picsr", min_sites=2))
    assert strategy.method.participants.sites() == experts_of(strategy) == ["s1a", "s3a"]
    (told,) = strategy.method.participants.refused
    assert told.startswith(f"s2a: {FEW}")
    (sent,) = [m for m in grid.sent if m.metadata.dst_node_id == 1002]
    assert sent.metadata.message_type == HELLO
    (reply,) = [m for m in grid.replies if m.metadata.src_node_id == 1002]
    assert reply.has_error()
    assert not reply.has_content()


def test_the_floor_for_sums_holds_for_prototypes_too(spied_run: Run) -> None:
    values = {
        "dataset": "heart-synthetic",
        "method": "picsr",
        "picsr.expert-rounds": 1,
        "rounds": 2,
    }
    told = "site cleveland sends no prototype: it has fewer than 200 training samples"
    with pytest.raises(SiteError, match=told):
        spied_run({**values, "standardise": "declared", "sums-min-count": 200})


@pytest.mark.parametrize(("weight", "finite"), [(1e38, False), (0.5, True)])
def test_an_expert_that_overflows_on_its_own_prototype_stays_out(
    started: Run, good: Any, recorder: Any, told: Any, weight: float, finite: bool
) -> None:
    def overflows(message: Message) -> RecordDict:
        value = weight if told(message)["note.stage"] == "experts" else 1.0
        answer: RecordDict = good(value)(message)
        return answer

    _, strategy = started(min_sites=2, s2a=overflows)
    reason = (
        "array 'expert/encoder.stages.0.weight' has a number beyond 1e+06: if training has "
        "diverged, lower 'train.learning-rate'"
    )
    assert recorder.failures == ([] if finite else [(2, "train", "s2a", reason)])
    assert experts_of(strategy) == (ALL if finite else ["s1a", "s3a"])
    if not finite:
        with refuses(SiteError, "s2a", "2"):
            started(s2a=overflows)
