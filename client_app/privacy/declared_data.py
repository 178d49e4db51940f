"""A hospital's declaration of its data at 'trust: sums', the same until it counts them again.

What a site says of itself, and every threshold that it can be refused by, would otherwise follow
its exact counts: twelve runs with twelve batch sizes told how many patients there are. So a site
reads its data once, keeps what it may say of them with counts that are rounded down, and answers
each hello and each admission by what it has kept, without opening the data. A patient more or less
changes nothing that leaves until the hospital removes the file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.datasets.io.sealed_folders import json_digest
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping, keys_with
from fedsilo.models.contract.site_facts import FeatureStatistics
from fedsilo.models.networks.kinds import Task

FILE = "declared-data.json"
_MOST = 100  # data sets, and ways to read one, of which something is kept
_LEAST_STEP = 4  # samples between the counts that are told apart
_DIGITS = 3  # binary digits that are kept of larger counts
_DECISIVE = ("dataset", *keys_with(CommonSettings, "partition", "silo", "sampling", "split"))


@dataclass(frozen=True)
class DeclaredData:
    """A data set, read in one way, as far as it may be told.

    Attributes:
        input_type: torch's name for the type of the inputs.
        has_figures: whether the schema declares means and deviations.
        at_least: samples of each class, by split, rounded down.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    distribution: str
    input_shape: tuple[int, ...]
    input_type: str
    classes: int
    class_names: tuple[str, ...]
    features: tuple[str, ...]
    schema: str
    has_figures: bool
    at_least: dict[str, list[int]]

    @classmethod
    def of(cls, silo: Silo) -> "DeclaredData":
        """Declare a silo's data."""
        return cls(
            silo.distribution,
            tuple(silo.task.input_shape),
            str(silo.train.inputs.dtype).removeprefix("torch."),
            silo.task.classes,
            tuple(silo.classes),
            tuple(silo.features),
            silo.schema,
            silo.declared is not None,
            {
                split: [rounded_down(count) for count in counts]
                for split, counts in silo.label_counts().items()
            },
        )

    def stand_in(self, name: str) -> Silo:
        """Return a silo of empty samples, as many as are declared, for what needs no patients."""
        nothing = torch.zeros(1, dtype=getattr(torch, self.input_type))
        splits = {}
        for split, counts in self.at_least.items():
            labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
            splits[split] = Split(nothing.expand(len(labels), *self.input_shape), labels)
        width = len(self.features)
        figures = FeatureStatistics(torch.zeros(width).numpy(), torch.ones(width).numpy())
        return Silo(
            name,
            self.distribution,
            Task(self.input_shape, self.classes),
            train=splits["train"],
            val=splits["val"],
            test=splits["test"],
            fingerprints={},
            features=self.features,
            classes=self.class_names,
            declared=figures if self.has_figures else None,
            schema=self.schema,
        )


def rounded_down(count: int) -> int:
    """Round a count down to three binary digits, and to a multiple of 4: 199 to 192, 23 to 20."""
    step = max(_LEAST_STEP, 1 << max(0, count.bit_length() - _DIGITS))
    return count - count % step


def declared_data(folder: Path, settings: CommonSettings, load: Callable[[], Silo]) -> DeclaredData:
    """Return the declaration of a data set; the data are read for it the first time.

    Args:
        folder: of what the hospital keeps over all runs.
        settings: the run's, with the hospital's own folders; some decide what the data are.
        load: reads the data, where nothing is kept of them yet.

    Raises:
        DataError: they cannot be read.
        CheckpointError: the file is damaged or cannot be written.
    """
    file: OwnFile[dict[str, DeclaredData]] = OwnFile(
        folder / FILE,
        dict[str, DeclaredData],
        f"the hospital's own {FILE}",
        "bring it back, or remove it to have the data counted again",
    )
    values, own = as_mapping(settings), data_set(settings.dataset).settings
    decisive = sorted({*_DECISIVE, *own, *keys_with(CommonSettings, "pixels")})
    key = json_digest([[name, values[name]] for name in decisive])
    with file.locked():
        known = file.read({})
        if key in known:
            return known[key]
        known[key] = DeclaredData.of(load())
        newest = list(known)[-_MOST:]
        file.write({name: known[name] for name in newest})
    return known[key]
