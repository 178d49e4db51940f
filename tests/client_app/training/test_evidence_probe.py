"""What an evidential network says of its certainty: by hand, and who is asked for it when."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import EvidenceProbe, measure
from fedsilo.core.messages import METRICS
from fedsilo.core.metric_names import BINS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import SiteNetwork
from tests.support.lab import evaluate

CPU = Compute(torch.device("cpu"), bf16=False)
# Sums 4.2, 2 and 25: confidences 0.714, 0.85, 0.96 and vacuities 0.476, 1, 0.08
ALPHAS = [[3.0, 1.2], [0.3, 1.7], [1.0, 24.0]]
LABELS = torch.tensor([0, 1, 0])  # predicted 0, 1, 1: right, right, wrong
Opened = Callable[..., Lab]


class LogAlpha(SiteNetwork):
    """A network whose tokens are log alpha; its dropout would take all of them away."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(1.0)

    def encode(self, inputs: Tensor) -> Tensor:
        return inputs

    def classify(self, features: Tensor) -> Tensor:
        dropped: Tensor = self.drop(features)
        return dropped

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        raise AssertionError("measuring needs no training loss")


def watched(binned: bool) -> dict[str, float]:
    watch = EvidenceProbe(LogAlpha(), LABELS, binned)
    tokens = torch.tensor(ALPHAS).log()
    watch.see(tokens[:2])
    watch.see(tokens[2:])
    return watch.values()


def test_vacuity_is_the_mean_over_all_batches_of_classes_by_strength() -> None:
    found = watched(binned=False)
    assert found == {"vacuity": pytest.approx((2 / 4.2 + 2 / 2 + 2 / 25) / 3)}


def test_bins_count_samples_and_hits_by_confidence_and_by_vacuity() -> None:
    assert BINS == 10
    found = watched(binned=True)
    expected = {
        "reliability": {7: (1, 1, 3 / 4.2), 8: (1, 1, 0.85), 9: (1, 0, 0.96)},
        "certainty": {0: (1, 0, 0.08), 4: (1, 1, 2 / 4.2), 9: (1, 1, 1.0)},
    }
    assert len(found) == 1 + 2 * BINS * 3
    for kind, bins in expected.items():
        for place in range(BINS):
            parts = [found[f"{kind}.{place}.{part}"] for part in ("count", "right", "mean")]
            assert parts == pytest.approx(bins.get(place, (0, 0, 0))), f"{kind} {place}"


def evidential(common: CommonSettings) -> CommonSettings:
    return dataclasses.replace(common, loss="evidential", dropout=0.5, mc_passes=3)


def test_the_watch_draws_no_random_number_and_leaves_dropout_as_it_was(
    common: CommonSettings, silo: Silo
) -> None:
    settings = evidential(common)
    network = cast(SiteNetwork, build_classifier(settings, silo.shape))
    key = (1, "s1a", "incoming", "test")
    plain = measure(network, silo.test, settings, CPU, key)
    watch = EvidenceProbe(network, silo.test.labels, binned=True)
    told = measure(network, silo.test, settings, CPU, key, watch)
    assert {name: told[name] for name in plain} == plain
    assert 0 < told["vacuity"] <= 1
    other = measure(network, silo.test, settings, CPU, (2, *key[1:]))
    assert other["entropy"] != plain["entropy"], "dropout is on, and its draws show"


@pytest.mark.parametrize("passes", [0, 3])
def test_the_watch_sees_the_network_without_dropout_however_many_passes(
    passes: int, common: CommonSettings, silo: Silo
) -> None:
    settings = dataclasses.replace(evidential(common), mc_passes=passes)
    network = build_classifier(settings, silo.shape)
    watch = EvidenceProbe(network, silo.test.labels, binned=False)
    found = measure(network, silo.test, settings, CPU, (1, "s1a"), watch)
    with torch.no_grad():
        strength = network.eval()(silo.test.inputs).exp().sum(dim=1)
    assert found["vacuity"] == pytest.approx((10 / strength).mean().item(), rel=1e-5)


def told_by(method: Lab) -> dict[str, Any]:
    return dict(evaluate(method)[METRICS])


def has_bins(metrics: dict[str, Any], split: str) -> bool:
    return any(key.startswith(f"incoming.{split}.reliability.") for key in metrics)


@pytest.mark.parametrize(
    ("phase", "least", "binned"),
    [("evaluate", 1, True), ("evaluate", 10, True), ("evaluate", 11, False), ("train", 1, False)],
)
def test_bins_are_sent_at_the_final_evaluation_of_enough_test_samples_alone(
    opened: Opened, weights: dict[str, Any], phase: str, least: int, binned: bool
) -> None:
    own = {"loss": "evidential", "mc_passes": 0}
    method = opened("fedavg", weights, own=own, phase=phase)
    # As a hospital's node config sets it; a run of images cannot
    method.common = dataclasses.replace(method.common, sums_min_count=least)
    found = told_by(method)
    assert {"incoming.val.vacuity", "incoming.test.vacuity"} <= found.keys()
    assert has_bins(found, "test") is binned, "the site has ten test samples"
    assert not has_bins(found, "val"), "of the test data alone, however many these are"
    if binned:
        for kind in ("reliability", "certainty"):
            bins = [f"incoming.test.{kind}.{place}" for place in range(BINS)]
            assert sum(found[f"{place}.count"] for place in bins) == 10
            right = sum(found[f"{place}.right"] for place in bins)
            assert right / 10 == pytest.approx(found["incoming.test.accuracy"])


@pytest.mark.parametrize(
    ("phase", "least", "counted"),
    [("evaluate", 10, True), ("evaluate", 11, False), ("train", 1, False)],
)
def test_every_network_counts_by_class_and_bin_at_the_final_evaluation_of_enough_test_samples(
    opened: Opened, weights: dict[str, Any], phase: str, least: int, counted: bool
) -> None:
    method = opened("fedavg", weights, phase=phase)
    method.common = dataclasses.replace(method.common, sums_min_count=least)
    found = told_by(method)
    families = ("incoming.test.class.", "incoming.test.confidence.", "incoming.test.uncertainty.")
    assert [any(key.startswith(family) for key in found) for family in families[1:]] == [
        counted
    ] * 2
    assert not [key for key in found if key.startswith(families[0]) and not key.endswith(".false")]
    assert not [
        key for key in found if key.startswith(("incoming.val.confidence.", "trained.test."))
    ]


def test_a_network_that_is_not_evidential_is_asked_for_no_vacuity(
    opened: Opened, weights: dict[str, Any]
) -> None:
    found = told_by(opened("fedavg", weights, phase="evaluate"))
    assert not [key for key in found if "vacuity" in key or "reliability" in key]
