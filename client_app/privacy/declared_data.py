"""A hospital's declaration of its data at 'trust: sums', unchanged until it counts them again.

Without it, a site's hello, and every threshold that can refuse it, would depend on its
exact counts: twelve runs with twelve batch sizes would reveal the number of patients. So a site
reads its data once and stores a declaration with counts that are rounded down. Each hello and each
admission uses the declaration, without opening the data. One patient more or less then changes
nothing that leaves, until the hospital removes the file.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from fedsilo.client_app.site.own_file import OwnFile
from fedsilo.core.errors import RefusedError
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.removed import with_former_keys
from fedsilo.core.settings_schema import Value, as_mapping, keys_with
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.core.tasks import CLASSIFICATION, numeric_columns
from fedsilo.datasets.partition.cuts import cut_keys
from fedsilo.datasets.registry import data_set
from fedsilo.datasets.silo.silos import Silo, Split
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.tasks.task import task_named

FILE = "declared-data.json"
_MOST = 100  # the most declarations, one for each data set and way to read it
_LEAST_STEP = 4  # the smallest step between declared counts, in samples
_DIGITS = 3  # larger counts are rounded down to this many binary digits
# Settings of how values are read, which change no count
_HOW = {*keys_with(CommonSettings, "pixels"), "data.standardise"}


@dataclass(frozen=True)
class DeclaredData:
    """The facts about one data set that a hospital at trust 'sums' shows the server.

    Attributes:
        input_type: the dtype of the inputs, such as "float32".
        has_figures: whether the schema declares means and deviations of the features.
        at_least: lower bounds on the samples of each stratum, such as each class, by split.
        samples: a digest of the settings that decide which samples there are; empty in declarations
            from an older version.
        task: the name of the task that the labels are for.
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
    samples: str = ""
    task: str = CLASSIFICATION

    @classmethod
    def of(cls, silo: Silo) -> "DeclaredData":
        """Build the declaration for a silo, with its label counts rounded down.

        A declaration has the facts about the data that the server may learn at trust 'sums', but no
        samples. A count keeps its first three binary digits and becomes a multiple of 4: 199
        becomes 192, and 3 becomes 0. The field ``samples``, a digest of the settings that choose
        the samples, stays empty.
        """
        at_least = {}
        for split, counts in silo.label_counts().items():
            at_least[split] = [round_down(count) for count in counts]
        return cls(
            silo.distribution,
            tuple(silo.shape.input_shape),
            str(silo.train.inputs.dtype).removeprefix("torch."),
            silo.shape.outputs,
            tuple(silo.classes),
            tuple(silo.features),
            silo.schema,
            silo.declared is not None,
            at_least,
            task=silo.task,
        )

    def stand_in(self, name: str) -> Silo:
        """Build a silo with zero inputs and the declared label counts, for checks without data.

        The silo gets ``name``. If the schema of the data has means and deviations of the features,
        they become 0 and 1.
        """
        nothing = torch.zeros(1, dtype=getattr(torch, self.input_type))
        task = task_named(self.task)
        splits = {}
        for split, counts in self.at_least.items():
            labels = task.stand_in_labels(counts, self.classes)
            splits[split] = Split(nothing.expand(len(labels), *self.input_shape), labels)
        width = len(numeric_columns(self.task, self.features, self.class_names))
        declared = None
        if self.has_figures:
            declared = FeatureStatistics(torch.zeros(width).numpy(), torch.ones(width).numpy())
        return Silo(
            name,
            self.distribution,
            NetworkShape(self.input_shape, self.classes),
            train=splits["train"],
            val=splits["val"],
            test=splits["test"],
            fingerprints={},
            features=self.features,
            classes=self.class_names,
            declared=declared,
            schema=self.schema,
            task=self.task,
        )


def round_down(count: int) -> int:
    """Round a count down to three binary digits and to a multiple of 4: 199 to 192, 23 to 20."""
    step = max(_LEAST_STEP, 1 << max(0, count.bit_length() - _DIGITS))
    return count - count % step


def declared_data(folder: Path, settings: CommonSettings, load: Callable[[], Silo]) -> DeclaredData:
    """Return a data set's stored declaration, or read the data and store a new declaration.

    A declaration has rounded sample counts, which the server gets instead of the exact ones. There
    is one for each data set and for each way to read it. Another way to read the same samples, such
    as another image size, gets the counts of the earlier declaration. Otherwise a server could have
    the samples counted again and see when a count changes. For the same reason this function
    deletes no declaration.

    Args:
        folder: the folder that the hospital keeps over all runs.
        settings: the run's settings with the hospital's own folders.
        load: reads the data; called only without a stored declaration.

    Raises:
        RefusedError: 100 other declarations are stored already, and only the hospital can remove
            them.
        DataError: the data cannot be read.
        CheckpointError: the file is damaged or cannot be written.
    """
    file: OwnFile[dict[str, DeclaredData]] = OwnFile(
        folder / FILE,
        dict[str, DeclaredData],
        f"the hospital's own {FILE}",
        "bring it back, or remove it to have the data counted again",
    )
    decisive = _decisive(settings)
    counted = {key: value for key, value in decisive.items() if key not in _HOW}
    # Keys have the names of 0.1: its declarations must hold, or the data would be counted again
    key = json_digest(sorted(with_former_keys(decisive).items()))
    samples = json_digest(sorted(with_former_keys(counted).items()))
    with file.lock():
        known = file.read({})
        if key in known:
            return known[key]
        if len(known) >= _MOST:
            raise RefusedError(
                f"this hospital has declared {_MOST} ways to read its data ('{FILE}' in its "
                "'state-dir'), so no more are added: use the settings of an earlier run, or have "
                "the hospital remove that file"
            )
        new = replace(DeclaredData.of(load()), samples=samples)
        # Reading the same samples in another way must not make the hospital count them again
        for earlier in known.values():
            if earlier.samples == samples and earlier.classes == new.classes:
                new = replace(new, at_least=earlier.at_least)
        known[key] = new
        file.write(known)
    return new


def _decisive(settings: CommonSettings) -> dict[str, Value]:
    """Return the settings that decide which samples a site has and how they are read, by key.

    They are 'dataset', the settings that this data set uses, and 'split.partition' with the
    settings of ``cut_keys``. Without test folds, the number of the test fold is left out, because
    it decides nothing. The same holds for validation folds.
    """
    read = {"dataset", "split.partition", *data_set(settings.dataset).settings}
    values = as_mapping(settings)
    decisive = {key: values[key] for key in read | set(cut_keys(settings.partition))}
    # Without folds, the number of the fold decides nothing
    if not values["split.test-folds"]:
        decisive.pop("split.test-fold", None)
    if not values["split.val-folds"]:
        decisive.pop("split.val-fold", None)
    return decisive
