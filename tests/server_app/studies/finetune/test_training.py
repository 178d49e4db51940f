"""One training: the epoch that is kept, and what is predicted with it."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.kinds import Task
from fedsilo.server_app.studies.finetune.tasks import Pooled, Segmentation, predicted_masks
from fedsilo.server_app.studies.finetune.training import Study, train

CPU = Compute(torch.device("cpu"), bf16=False)


class Dots(nn.Module):
    """Finds bright pixels: a logit per pixel, of its brightness, times one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(-1.0))

    def forward(self, images: Tensor) -> Tensor:
        one = self.weight * images[:, 0]
        return torch.stack([-one, one], dim=1)


def dots(count: int) -> Split:
    masks = (torch.rand(count, 4, 4, generator=torch.Generator().manual_seed(count)) > 0.5).byte()
    return Split(masks[:, None] * 255, masks)


def study(epochs: int = 30, rate: float = 0.3) -> Study:
    settings = CommonSettings(width=2, device="cpu", learning_rate=rate, batch_size=2, mc_passes=0)
    pooled = Pooled(dots(4), dots(3), dots(2), Task((1, 4, 4), 2), (), ("a",), ("a", "a"))
    return Study(Segmentation("unet"), settings, pooled, CPU, 1, epochs)


def test_the_best_epoch_is_chosen_on_validation_images_and_tested() -> None:
    found = train(study(), Dots(), 0)
    by_epoch = {e: v for e, split, metric, v in found.curves if (split, metric) == ("val", "dice")}
    assert list(by_epoch) == list(range(1, 31))
    assert by_epoch[found.epoch] == max(by_epoch.values()) == 1
    assert found.val["dice"] == 1
    assert found.test == pytest.approx(
        {"dice": 1, "jaccard": 1, "dice-pooled": 1, "miou": 1, "loss": found.test["loss"]}
    )
    losses = {e: v for e, split, metric, v in found.curves if (split, metric) == ("val", "loss")}
    equal = [e for e, dice in by_epoch.items() if dice == 1]
    assert found.epoch == min(equal, key=lambda e: losses[e]), "of equals the one of least loss"


def test_the_arrays_are_those_of_the_best_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    order = iter([0.2, 0.9, 0.5, 1.0])  # three epochs, then the test images
    seen: list[float] = []

    def measured(self: object, network: nn.Module, *_: object) -> dict[str, float]:
        seen.append(cast(Dots, network).weight.item())
        return {"dice": next(order), "loss": 1.0}

    monkeypatch.setattr(Segmentation, "measured", measured)
    found = train(study(3), Dots(), 0)
    assert found.epoch == 2
    assert float(found.arrays["weight"]) == seen[1] == seen[3] != seen[2]
    assert found.val["dice"] == 0.9


def test_predictions_do_not_depend_on_how_images_are_batched() -> None:
    images = dots(40).inputs
    network = Dots()
    with torch.no_grad():
        network.weight.fill_(2.0)
    assert torch.equal(predicted_masks(network, images, CPU), (images[:, 0] > 0).long())
