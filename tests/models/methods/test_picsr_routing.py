"""What a router reveals: routing metrics, parts of distances, and the routing document."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.models.methods.picsr import (
    PICSRSettings,
    Router,
    build_router,
    feature_contributions,
    prototype_distances,
    routing_document,
    routing_metrics,
)

CORNERS = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
POINTS = st.tuples(*[st.floats(-5, 5, width=32)] * 3)


def _identity_router(features: int = 2) -> Router:
    """Return a router whose f gives the features back."""
    own = PICSRSettings(router_width=features)
    router = Router(features=features, experts=2, settings=own)
    with torch.no_grad():
        router.embedding[1].weight.copy_(torch.eye(features))
        router.embedding[1].bias.zero_()
    return router


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
    parts = feature_contributions(_identity_router(), torch.tensor([3.0, 4.0]), CORNERS)
    assert parts[0].tolist() == [pytest.approx(9 / 5), pytest.approx(16 / 5)]
    assert parts[0].sum().item() == pytest.approx(5)


def test_a_sample_on_a_prototype_has_no_distance_to_explain() -> None:
    parts = feature_contributions(_identity_router(), torch.tensor([3.0, 4.0]), CORNERS)
    assert parts[1].tolist() == [0.0, 0.0]


def test_a_feature_that_f_does_not_see_adds_nothing() -> None:
    router = _identity_router()
    with torch.no_grad():
        router.embedding[1].weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    parts = feature_contributions(router, torch.tensor([3.0, 4.0]), CORNERS[:1])
    assert parts[0].tolist() == [pytest.approx(6.0), 0.0]


def test_a_feature_may_bring_a_sample_nearer() -> None:
    router = _identity_router()
    with torch.no_grad():
        router.embedding[1].weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    # f is the difference of the two features: 5 - 2 = 3
    parts = feature_contributions(router, torch.tensor([5.0, 2.0]), CORNERS[:1])
    assert parts[0].tolist() == [pytest.approx(5.0), pytest.approx(-2.0)]


@settings(max_examples=40, deadline=None)
@given(sample=POINTS, corners=st.lists(POINTS, min_size=1, max_size=3))
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
    router = _identity_router()
    with torch.no_grad():
        router.embedding[1].weight.mul_(3)
    found = prototype_distances(router, {"a": CORNERS[0], "b": CORNERS[1]})
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
