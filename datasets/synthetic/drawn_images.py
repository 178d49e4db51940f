"""Base class of small synthetic image sets: each site's images and labels are drawn, then split."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsilo.core.files.locations import Places
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.radiographs.endovascular import read_square
from fedsilo.datasets.silo.row_splits import SPLIT_KEYS, split_rows, split_values
from fedsilo.datasets.silo.silos import (
    DataSet,
    ImageReader,
    Silo,
    Split,
    cached_silo,
    save_silo,
    strata_of,
)

SIZE = 32  # pixels per side
_SHARE = 0.25  # share of test images if there are no test folds
_MAKER = 1  # raise it when the same settings make other images

Drawn = tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]


class DrawnImages(DataSet):
    """A made-up data set of 8-bit images (1, 32, 32), for one task other than classification.

    Class attributes:
        sites: the names of the sites.
        names: the names of the findings, of the number or of the event.
    """

    origin = "made-up"
    settings = frozenset(SPLIT_KEYS)
    sites: ClassVar[tuple[str, ...]]
    names: ClassVar[tuple[str, ...]]

    @abstractmethod
    def draw(self, site: str) -> Drawn:
        """Draw all images of a site, the same in every run.

        Returns:
            Images (n, 1, 32, 32), and labels (n, ...) in the form of the task.
        """

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the sites."""
        return list(self.sites)

    def image_reader(self, site: str, settings: CommonSettings, places: Places) -> ImageReader:
        """Return a function that decodes an 8-bit image or DICOM to uint8 (1, 32, 32)."""
        return lambda path: read_square(path, 8, SIZE)[None]

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Open a site's silo from the cache, and draw its images there if it is missing.

        If the settings have no test folds, a quarter of the images are test images. Validation
        images come from the settings' validation folds. All splits have about the same shares of
        the task's strata, such as patients with and without an event.

        Raises:
            DataError: there are too few images for the folds.
        """
        facts: list[Any] = [_MAKER, name, split_values(settings)]
        # Splits keep the shares of the task's strata, such as patients with an event
        (task,) = self.tasks

        def fill(folder: Path) -> None:
            images, labels = self.draw(name)
            where, strata = f"{self.name}, {name}", strata_of(labels, task)
            rows = split_rows(strata, settings, _SHARE, settings.fold_seed, where)
            parts = {}
            for part, chosen in vars(rows).items():
                parts[part] = Split.of(images[chosen], labels[chosen])
            known = {"name": name, "distribution": name, "classes": self.names, "task": task}
            save_silo(folder, parts, known | {"schema": json_digest([self.names, SIZE])})

        folder = places.cache / f"{self.name}-silos"
        return cached_silo(folder, name, facts, len(self.names), fill)
