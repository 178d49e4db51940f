"""The data of fine-tuning: the images of several sites pooled, with labels or masks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedsilo.datasets.radiographs.masks import load_masked_silo
from fedsilo.datasets.registry import data_set, load_silo, silo_names
from fedsilo.datasets.silo.silos import SPLITS, Split
from fedsilo.models.contract.errors import DataError, SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.kinds import Task

_MISSING = {
    "train": "no training images",
    "val": "no validation images, by which the epoch is chosen: set 'val-folds'",
    "test": "no test images: set 'test-folds', or 'use-test' to true",
}


@dataclass(frozen=True)
class Pooled:
    """Images of all sites, in site order, with labels (n,) or masks (n, h, w)."""

    train: Split
    val: Split
    test: Split
    task: Task  # input shape and number of classes
    classes: tuple[str, ...]  # their names, or empty if they have none
    sites: tuple[str, ...]
    origin: tuple[str, ...]  # the site of each test image

    def sizes(self) -> dict[str, int]:
        """Return the number of images by split."""
        return {name: len(getattr(self, name)) for name in SPLITS}


def chosen_sites(settings: CommonSettings, wanted: Sequence[str]) -> list[str]:
    """Return the sites of the data set, or only those ``wanted``.

    Raises:
        SettingError: the data are a table, or there is no such site.
    """
    if data_set(settings.dataset).is_table:
        raise SettingError(
            f"fine-tuning is of images, and data set '{settings.dataset}' is a table: name another "
            "by --dataset"
        )
    names = silo_names(settings)
    if unknown := [site for site in wanted if site not in names]:
        raise SettingError(
            f"there is no site '{unknown[0]}' in '{settings.dataset}': its sites are "
            f"{', '.join(names)}"
        )
    return [site for site in names if site in wanted] if wanted else names


def pooled_labels(settings: CommonSettings, sites: Sequence[str]) -> Pooled:
    """Return images with their classes.

    Raises:
        DataError: a split has no images, or the sites' images or classes differ.
    """
    _refuse_no_sites(settings, sites)
    silos = [load_silo(site, settings) for site in sites]
    facts = {(silo.task, silo.classes) for silo in silos}
    if len(facts) > 1:
        raise DataError(f"sites {', '.join(sites)} have images or classes of different kinds")
    return _pool(settings, [silo.splits() for silo in silos], sites, *facts.pop())


def pooled_masks(settings: CommonSettings, sites: Sequence[str]) -> Pooled:
    """Return images with their masks.

    Raises:
        DataError: a split has no images; no training or validation image has a mask; a mask has
            not its image's size, or other values than 0 and 1; or the sites' images differ.
    """
    _refuse_no_sites(settings, sites)
    silos = [load_masked_silo(site, settings) for site in sites]
    for silo in silos:
        for name, split in silo.splits().items():
            _check_masks(f"{settings.dataset}, site {silo.name}, {name}", split)
    shapes = {silo.task.input_shape for silo in silos}
    if len(shapes) > 1:
        raise DataError(
            f"sites {', '.join(sites)} have images of different sizes "
            f"({', '.join(map(str, sorted(shapes)))}): set 'image-size'"
        )
    parts = [silo.splits() for silo in silos]
    pooled = _pool(settings, parts, sites, silos[0].task, silos[0].classes)
    for name in ("train", "val"):
        if not getattr(pooled, name).labels.any():
            raise DataError(
                f"no {name} image of {settings.dataset} has a mask that is not empty: there is "
                "nothing to learn; take more images or other sites"
            )
    return pooled


def _refuse_no_sites(settings: CommonSettings, sites: Sequence[str]) -> None:
    if not sites:
        raise DataError(f"data set '{settings.dataset}' has no sites on this machine")


def _check_masks(where: str, split: Split) -> None:
    images, masks = tuple(split.inputs.shape), tuple(split.labels.shape)
    if masks != (images[0], *images[2:]):
        raise DataError(
            f"{where}: {images[0]} images are {images[2]}x{images[3]} pixels, and their masks "
            f"{masks}: a mask must have its image's size"
        )
    if len(split) and (value := int(split.labels.max())) > 1:
        raise DataError(
            f"{where}: a mask holds {value}; it must be 0 on the background and 1 on the catheter"
        )


def _pool(
    settings: CommonSettings,
    parts: Sequence[dict[str, Split]],
    sites: Sequence[str],
    task: Task,
    classes: tuple[str, ...],
) -> Pooled:
    pooled = {}
    for name in SPLITS:
        inputs = torch.cat([part[name].inputs for part in parts])
        pooled[name] = Split(inputs, torch.cat([part[name].labels for part in parts]))
        if not len(inputs):
            raise DataError(f"{', '.join(sites)} of {settings.dataset}: {_MISSING[name]}")
    sizes = [len(part["test"]) for part in parts]
    origin = tuple(site for site, size in zip(sites, sizes, strict=True) for _ in range(size))
    return Pooled(**pooled, task=task, classes=classes, sites=tuple(sites), origin=origin)
