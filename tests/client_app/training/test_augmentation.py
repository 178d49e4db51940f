"""Augmentation by torchvision's names: what it does to images, and to nobody's random numbers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedsilo.client_app.training.augmentation import augmenter, check_augmentation, check_images
from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import SiteNetwork
from tests.support.fixes import refused

CPU = torch.device("cpu")
FLIP = "[{RandomHorizontalFlip: {p: 1.0}}]"
EITHER = "[{RandomHorizontalFlip: {p: 0.5}}]"


def images(count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.arange(count * 12).reshape(count, 1, 3, 4).to(dtype)


def augmented(text: str, batch: Tensor, *key: int | str, seed: int = 1) -> Tensor:
    labels = torch.arange(len(batch))
    changed, same = augmenter(CommonSettings(seed=seed, augmentation=text), key, CPU)(batch, labels)
    assert same is labels
    return changed


def test_masks_move_with_their_images_and_keep_their_colours() -> None:
    masks = (images(32)[:, 0] % 4 == 0).to(torch.uint8)
    pictures = masks[:, None] * 200
    text = "[{RandomHorizontalFlip: {p: 0.5}}, {ColorJitter: {brightness: [0.5, 0.5]}}]"
    augment = augmenter(CommonSettings(seed=1, augmentation=text), (1, "a"), CPU)
    for kind in (torch.uint8, torch.int16):
        changed, moved = augment(pictures.to(kind), masks)
        assert (moved.dtype, type(moved)) == (torch.uint8, Tensor)
        assert not torch.equal(moved, masks)
        assert torch.equal(changed[:, 0] > changed.min(), moved.bool())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
def test_a_flip_mirrors_each_image_and_keeps_its_type(dtype: torch.dtype) -> None:
    batch = images(2, dtype)
    flipped = augmented(FLIP, batch, 1, "a")
    assert torch.equal(flipped, batch.flip(-1))
    assert flipped.dtype == dtype


def test_the_dark_of_a_radiograph_stays_dark_beyond_its_edges() -> None:
    darkest = torch.full((1, 1, 4, 4), -32768, dtype=torch.int16)
    moved = augmented("[{RandomAffine: {degrees: 0, translate: [1.0, 1.0]}}]", darkest, 1, "a")
    assert torch.equal(moved, darkest)


def test_images_of_a_batch_are_changed_each_by_itself_and_alike_for_the_same_key() -> None:
    batch = images(64)
    first = augmented(EITHER, batch, 1, "a")
    mirrored = [torch.equal(one, two.flip(-1)) for one, two in zip(first, batch, strict=True)]
    assert 10 < sum(mirrored) < 54
    assert torch.equal(first, augmented(EITHER, batch, 1, "a"))
    others = [((2, "a"), 1), ((1, "b"), 1), ((1, "a"), 2)]
    assert not any(torch.equal(first, augmented(EITHER, batch, *k, seed=s)) for k, s in others)
    augment = augmenter(CommonSettings(seed=1, augmentation=EITHER), (1, "a"), CPU)
    labels = torch.zeros(64)
    again = augment(batch, labels)[0]
    assert not torch.equal(again, augment(batch, labels)[0]), "the second batch has its own key"


def test_a_batch_without_images_as_private_batches_may_be_stays_as_it_is() -> None:
    assert augmented(EITHER, images(0), 1, "a").shape == images(0).shape


def test_transforms_of_transforms_are_made() -> None:
    text = (
        "[{RandomApply: {transforms: [RandomHorizontalFlip, {RandomVerticalFlip: {p: 1}}], p: 1}}]"
    )
    once = augmented(text, images(1), 1, "a")
    assert any(torch.equal(once, images(1).flip(d)) for d in ([-2], [-2, -1]))


class Noting(SiteNetwork):
    """Notes its inputs and what dropout leaves of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.inputs: list[Tensor] = []
        self.dropped: list[Tensor] = []

    def encode(self, inputs: Tensor) -> Tensor:
        return inputs

    def classify(self, features: Tensor) -> Tensor:
        return features

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.inputs.append(inputs)
        self.dropped.append(nn.functional.dropout(torch.ones(50), 0.5))
        return self.weight.sum()


def test_training_sees_augmented_images_in_the_same_order_and_with_the_same_dropout() -> None:
    settings = CommonSettings(batch_size=4, local_epochs=2)
    split, seen = Split(images(8, torch.float32), torch.zeros(8, dtype=torch.long)), {}
    for text in ("", FLIP):
        seen[text] = network = Noting()
        own = replace(settings, augmentation=text)
        LocalTraining(network, split, own, Compute(CPU, bf16=False), (1, "a")).run()
    plain, flipped = seen[""], seen[FLIP]
    assert len(plain.inputs) == 4
    for one, two in zip(plain.inputs, flipped.inputs, strict=True):
        assert torch.equal(one.flip(-1), two)
    assert torch.equal(torch.stack(plain.dropped), torch.stack(flipped.dropped))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[{RandomFlip: {}}]", "unknown transform of torchvision v2 'RandomFlip'"),
        ("[{RandomRotation: {}}]", "missing 1 required positional argument: 'degrees'"),
        ("[{RandomRotation: {degrees: ten}}]", "transform 'RandomRotation' is refused"),
        ("[{RandomHorizontalFlip: 0.5}]", "transform 'RandomHorizontalFlip' is refused"),
        ("[{RandomApply: {transforms: [Nothing]}}]", "unknown transform"),
        ("{RandomHorizontalFlip: {p: 1}}", "it must be a list, as"),
        ("[{A: {}, B: {}}]", "write a list as"),
        ("[3]", "write a list as"),
    ],
)
def test_an_augmentation_that_cannot_be_made_is_refused_in_one_line(text: str, told: str) -> None:
    said = refused(lambda: check_augmentation(CommonSettings(augmentation=text), is_table=False))
    assert told in said
    assert "\n" not in said
    if text[0] == "{":
        assert "'train.augmentation'" in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[{CenterCrop: {size: 2}}]", "of images of (1, 3, 4) torch.uint8: images must keep"),
        ("[{Grayscale: {num_output_channels: 3}}]", "makes (3, 3, 4) torch.uint8 of images"),
        ("[{MixUp: {num_classes: 2}}]", "is refused"),  # takes labels too
    ],
)
def test_an_augmentation_that_does_not_fit_a_sites_images_is_refused(text: str, told: str) -> None:
    split = Split(images(2), torch.tensor([0, 1]))
    silo = Silo("a", "D1", NetworkShape((1, 3, 4), 2), split, split, split, {})
    check_images(CommonSettings(augmentation=FLIP), silo)
    said = refused(lambda: check_images(CommonSettings(augmentation=text), silo))
    assert told in said
