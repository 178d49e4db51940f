"""Sites' images pooled: their order, their masks, and what cannot be learnt from."""

import dataclasses

import pytest
import torch
from torch import Tensor

from fedsilo.core.errors import DataError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.radiographs.masked_images import MASK_CLASSES
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.finetuning import tasks
from fedsilo.finetuning.tasks import chosen_sites, read_labelled_images, read_masked_images
from fedsilo.models.networks.kinds import NetworkShape


def test_validation_folds_of_one_s_own_leave_the_run_s_test_images_as_they_are() -> None:
    run = CommonSettings(dataset="angiogram-phantom", sample_share=0.08, image_size=32)
    ours = dataclasses.replace(run, val_folds=5)
    pooled = read_masked_images(ours, ["human", "animal"])
    silos = [load_silo(site, run) for site in ("human", "animal")]
    assert torch.equal(pooled.test.inputs, torch.cat([one.test.inputs for one in silos]))
    together = len(pooled.train) + len(pooled.val)
    assert together == sum(len(one.train) for one in silos)


def silo(name: str, masks: Tensor, size: int = 4) -> Silo:
    images = torch.zeros(len(masks), 1, size, size, dtype=torch.uint8)
    part = Split(images, masks)
    return Silo(
        name, name, NetworkShape((1, size, size), 2), part, part, part, {}, classes=MASK_CLASSES
    )


def masks_of(size: int, value: int) -> Tensor:
    return torch.full((2, size, size), value, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("silos", "told"),
    [
        (
            [silo("a", masks_of(3, 1))],
            "site a, train: a mask must have its image's size, but 2 images",
        ),
        (
            [silo("a", masks_of(4, 255))],
            "a mask must be 0 on the background and 1 on the catheter, but has 255",
        ),
        (
            [silo("a", masks_of(4, 0))],
            "all masks of the train images of angiogram-phantom are empty",
        ),
        ([silo("a", masks_of(4, 1)), silo("b", masks_of(8, 1), 8)], "images of different sizes"),
        ([silo("a", masks_of(4, 1)[:0])], "a of angiogram-phantom: no training images"),
    ],
)
def test_masks_that_cannot_be_learnt_from_are_refused(
    silos: list[Silo], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = {one.name: one for one in silos}
    monkeypatch.setattr(tasks, "load_masked_silo", lambda name, settings: by_name[name])
    settings = CommonSettings(dataset="angiogram-phantom")
    with pytest.raises(DataError, match=told):
        read_masked_images(settings, list(by_name))


def test_sites_are_pooled_in_their_order_and_test_images_know_theirs() -> None:
    settings = CommonSettings(silos=3, silo_train_size=40, silo_test_size=10)
    pooled = read_labelled_images(settings, ["s1a", "s3a"])
    parts = [load_silo(site, settings).test for site in ("s1a", "s3a")]
    assert torch.equal(pooled.test.inputs, torch.cat([part.inputs for part in parts]))
    assert torch.equal(pooled.test.labels, torch.cat([part.labels for part in parts]))
    assert pooled.origin == ("s1a",) * 10 + ("s3a",) * 10


def test_a_data_set_without_sites_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "silo_names", lambda settings: [])
    with pytest.raises(DataError, match="has no sites on this machine"):
        chosen_sites(CommonSettings(dataset="angiogram-phantom"), [])
