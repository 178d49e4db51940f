"""A hospital's declaration of its data at 'trust: sums', unchanged until it counts them again.

Otherwise a site's hello, and every threshold by which it can be refused, would follow its exact
counts: twelve runs with twelve batch sizes would tell the number of patients. So a site reads its
data once and stores a declaration with counts that are rounded down. Each hello and each admission
uses the declaration, without opening the data. One patient more or less then changes nothing that
leaves, until the hospital removes the file.
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
_MOST = 100  # the most declarations that are kept, one per data set and way to read it
_LEAST_STEP = 4  # counts are rounded to at least this many samples
_DIGITS = 3  # larger counts keep this many binary digits
_DECISIVE = ("dataset", *keys_with(CommonSettings, "partition", "silo", "sampling", "split"))


@dataclass(frozen=True)
class DeclaredData:
    """The facts about one data set that the site may tell.

    Attributes:
        input_type: torch's name for the type of the inputs.
        has_figures: whether the schema declares means and standard deviations.
        at_least: the samples of each class, by split, rounded down.
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
        """Declare the data of a silo."""
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
        """Build a silo of as many zero samples as declared, for checks that need no patients."""
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
    """Round a count down to three binary digits and to a multiple of 4: 199 to 192, 23 to 20."""
    step = max(_LEAST_STEP, 1 << max(0, count.bit_length() - _DIGITS))
    return count - count % step


def declared_data(folder: Path, settings: CommonSettings, load: Callable[[], Silo]) -> DeclaredData:
    """Return the declaration of a data set; read the data only the first time.

    Args:
        folder: the folder that the hospital keeps over all runs.
        settings: the run's, with the hospital's own folders; some decide which samples there are.
        load: reads the data if there is no declaration yet.

    Raises:
        DataError: the data cannot be read.
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
