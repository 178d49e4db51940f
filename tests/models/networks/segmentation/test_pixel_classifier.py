"""Segmentation networks as a site's network, and those of others."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.segmentation.pixel_classifier import build_pixel_classifier
from tests.support.errors import refuses

SHAPE = NetworkShape((1, 8, 8), 3)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], CommonSettings]:
    """Return a builder of settings with the network ``plugged_masks:build``."""

    def make(build: Any) -> CommonSettings:
        module = ModuleType("plugged_masks")
        module.build = build  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "plugged_masks", module)
        return CommonSettings(network="plugged_masks:build", task="segmentation")

    return make


def test_the_network_of_another_gives_its_logits_and_a_loss(
    named: Callable[[Any], CommonSettings],
) -> None:
    settings = named(lambda input_shape, classes: nn.Conv2d(1, classes, 3, padding=1))
    network = build_pixel_classifier(settings, SHAPE).eval()
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(network(images), network.encoder(images))
    assert (network.tokens, network.channels) == (64, 3)
    assert network.loss(images, torch.zeros(2, 8, 8, dtype=torch.int64)).ndim == 0
    again = build_pixel_classifier(settings, SHAPE)
    assert torch.equal(again.encoder.weight, network.encoder.weight), "a function of the seed"
    with pytest.raises(AttributeError):
        _ = network.vit


@pytest.mark.parametrize(
    "build",
    [
        lambda input_shape, classes: nn.Conv2d(1, classes, 3),  # two pixels are missing
        lambda input_shape, classes: nn.Conv2d(1, classes + 1, 1),
        lambda input_shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)),
    ],
)
def test_a_network_without_a_logit_for_each_pixel_is_refused(
    build: Any, named: Callable[[Any], CommonSettings]
) -> None:
    with refuses(SettingError, "(2, 3, 8, 8)"):
        build_pixel_classifier(named(build), SHAPE)


@pytest.mark.parametrize("name", ["conv", "timm:resnet18"])
def test_a_network_of_whole_images_is_refused(name: str) -> None:
    with refuses(SettingError, f"'{name}'", "'task'", "unet"):
        build_pixel_classifier(CommonSettings(network=name, task="segmentation"), SHAPE)
