"""The router by hand: two features, prototypes at corners, embeddings one can add up."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.standardisation import pooled_statistics, standardise, sums_of
from fedsilo.models.methods.picsr import (
    PICSRNetwork,
    PICSRSettings,
    Router,
    build_router,
    invert_distances,
    prototype,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.mixture import Mixture
from fedsilo.models.networks.site_network import TokenClassifier

CORNERS = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 8.0]])
ROWS, IMAGES = Task((2,), 2), Task((1, 16, 16), 3)
POINTS = st.tuples(*[st.floats(-50, 50)] * 2)


def _identity_router(experts: int, **own: str) -> Router:
    """Return a router whose f gives the two features back."""
    router = Router(features=2, experts=experts, settings=PICSRSettings(router_width=2, **own))  # type: ignore[arg-type]  # texts only
    with torch.no_grad():
        layer = router.embedding[1]
        layer.weight.copy_(torch.eye(2))
        layer.bias.zero_()
    return router


def _network(task: Task, sites: int) -> PICSRNetwork:
    names = [f"s{index}" for index in range(sites)]
    experts: dict[str, TokenClassifier] = {
        name: build_classifier(CommonSettings(seed=index, width=1), task)
        for index, name in enumerate(names)
    }
    draw = torch.Generator().manual_seed(3)
    prototypes = {name: torch.randn(task.input_shape, generator=draw) for name in names}
    router = build_router(PICSRSettings(), task.input_shape, sites, 0)
    return PICSRNetwork(experts, prototypes, router)


def _batch(task: Task, count: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(count, *task.input_shape, generator=draw), torch.arange(count) % 2


def _train_step(network: PICSRNetwork, task: Task) -> None:
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
    figures = pooled_statistics([sums_of(rows) for rows in sites])
    seeing = torch.stack([prototype(standardise(rows, figures)) for rows in sites])
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
def test_any_number_of_experts_is_mixed_for_rows_and_images(task: Task, sites: int) -> None:
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
def test_training_changes_the_router_and_not_the_experts(task: Task) -> None:
    network = _network(task, 2)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    _train_step(network, task)
    after = network.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.startswith("router.") for name in changed)
    assert "prototypes" not in changed
    assert not any(name.startswith("experts.") for name in changed)
    # The running figures of batch norm are no parameters: only the mode keeps them still
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
