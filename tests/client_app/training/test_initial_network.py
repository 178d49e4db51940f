"""Class weights, by hand: balanced ones, given ones, and the loss that they weigh."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.initial_network import (
    check_class_weights,
    class_weights,
    effective_samples,
    initial_classifier,
    refuse_small,
)
from fedsilo.client_app.training.loop import add_gradients
from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.privacy.dp_sgd import clipped_gradients
from fedsilo.models.privacy.release import UNITS, Release
from tests.support.errors import refuses


def silo_of(*labels: int, classes: int = 3) -> Silo:
    split = Split(torch.randn(len(labels), 2), torch.tensor(labels))
    return Silo("a", "D1", NetworkShape((2,), classes), split, split, split, {})


def settings_of(weights: str, **more: object) -> CommonSettings:
    own = {"network": "logistic", "dropout": 0.0, **more}
    return CommonSettings(class_weights=weights, **own)  # type: ignore[arg-type]


def test_balanced_weights_are_samples_over_classes_times_those_of_the_class() -> None:
    silo = silo_of(0, 0, 0, 0, 1, 1, 2, 2)  # n = 8, K = 3
    assert class_weights(settings_of("balanced"), silo).tolist() == pytest.approx(
        [8 / (3 * 4), 8 / (3 * 2), 8 / (3 * 2)]
    )


def test_effective_samples_are_the_squared_sum_over_the_sum_of_squares() -> None:
    """Balanced, of 3 and 1: 4 / (1/3 + 1/1); of a weight for one class that class alone."""
    silo = silo_of(0, 0, 0, 1)
    for weights, worth in (("balanced", 3.0), ("0,2,0", 1.0), ("0,0,2", 0.0)):
        each = class_weights(settings_of(weights), silo)[silo.train.labels]
        assert effective_samples(each) == pytest.approx(worth)


def test_a_class_without_samples_is_none_of_the_classes_that_are_balanced() -> None:
    weights = class_weights(settings_of("balanced"), silo_of(0, 0, 0, 2))
    assert weights.tolist() == pytest.approx([4 / (2 * 3), 0, 4 / (2 * 1)])
    assert weights[[0, 0, 0, 2]].mean() == pytest.approx(1.0)


def test_the_loss_is_the_mean_of_each_samples_weight_times_its_own() -> None:
    silo = silo_of(0, 1, 2)
    network = initial_classifier(settings_of("0.5,1,3"), silo)
    inputs, labels = silo.train.inputs, torch.tensor([2, 0, 0])
    logits = network(inputs)
    each = [cross_entropy(logits[[k]], labels[[k]]).item() for k in range(3)]
    expected = (3 * each[0] + 0.5 * each[1] + 0.5 * each[2]) / 3
    assert network.loss(inputs, labels).item() == pytest.approx(expected)
    assert initial_classifier(settings_of("none"), silo).criterion is cross_entropy


def test_parts_of_a_batch_and_single_samples_add_up_to_the_weighted_batch() -> None:
    silo = silo_of(0, 1, 2, 2)
    settings = settings_of("0.5,1,3")
    network = initial_classifier(settings, silo)
    inputs, labels = silo.train.inputs, silo.train.labels
    gradients = {}
    for part in (0, 2):
        network.zero_grad()
        own = replace(settings, micro_batch=part)
        add_gradients(network.loss, inputs, labels, own, Compute(torch.device("cpu"), bf16=False))
        gradients[part] = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    release = Release(100.0, 1.0, 1, torch.Generator())
    sums, _ = clipped_gradients(network, network.loss, inputs, labels, release)
    sums = {name: (total.double() * 100.0 / UNITS).float() for name, total in sums.items()}
    for whole, parts, single in zip(*gradients.values(), sums.values(), strict=True):
        torch.testing.assert_close(whole, parts)
        torch.testing.assert_close(whole, single / 4)


@pytest.mark.parametrize("weights", ["1,2", "[1, 2]", "1, 2, 3, 4"])
def test_another_number_of_weights_than_classes_is_refused(weights: str) -> None:
    check_class_weights(settings_of(weights))
    with refuses(SettingError, 3, 0, 1, 2):
        class_weights(settings_of(weights), silo_of(0, 1, 2))


@pytest.mark.parametrize("weights", ["even", "1,-1", "0,0", "1,,2", "nan,1", "inf,1", ""])
def test_weights_that_are_none_are_refused(weights: str) -> None:
    with pytest.raises(SettingError, match="it must be none, balanced, or a number"):
        check_class_weights(settings_of(weights))


def test_weights_of_an_evidential_loss_are_refused() -> None:
    for more in ({"loss": "evidential"}, {"network": "vit"}):
        with pytest.raises(SettingError, match="are for the cross-entropy"):
            check_class_weights(settings_of("balanced", **more))
    check_class_weights(settings_of("balanced", network="vit", loss="cross-entropy"))


@pytest.mark.parametrize(("light", "fewest"), [(1.0, 8), (0.05, 8), (0.001, 3), (0.0, 3)])
def test_samples_behind_a_step_are_those_of_some_weight(light: float, fewest: int) -> None:
    weights = torch.tensor([1.0] * 3 + [light] * 5)
    batches = [torch.arange(8), torch.tensor([0, 0, 1, 2, 3, 4, 5, 6, 7])]
    refuse_small(batches, fewest, weights)
    with refuses(RefusedError, fewest, "minimum-batch"):
        refuse_small(batches, fewest + 1, weights)
    with refuses(RefusedError, "0", "minimum-batch"):
        refuse_small([torch.arange(0)], 1, weights)
