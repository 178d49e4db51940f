"""The facts that a site reports about itself at the start of a run, and statistics of features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from fedsilo.core.one_line import one_line
from fedsilo.core.settings_schema import adapter_of, key_of
from fedsilo.core.tasks import CLASSIFICATION, TASKS, count_strata, numeric_columns

SPLITS = ("train", "val", "test")
Vector = npt.NDArray[Any]


@dataclass(frozen=True)
class Sums:
    """Sums over the known values of each feature, (features,) float64 each.

    Attributes:
        count: the number of values that are not missing.
        total: the sum of these values.
        squares: the sum of their squares.
    """

    # SiteFacts, which hold sums, are validated by pydantic, which does not know arrays
    __pydantic_config__: ClassVar = {"arbitrary_types_allowed": True}

    count: Vector
    total: Vector
    squares: Vector


@dataclass(frozen=True)
class FeatureStatistics:
    """Mean and standard deviation of each feature, (features,) float64 each; ``std`` is above 0."""

    mean: Vector
    std: Vector


@dataclass(frozen=True)
class SiteFacts:
    """A site's identity, and numbers that describe its data, but never a row of the data.

    Attributes:
        site: the site's name.
        distribution: the group of sites with similar data that the site belongs to.
        input_shape: shape of one input, without the batch.
        classes: number of outputs of a network for the labels, such as the number of classes.
        label_counts: split -> samples of each stratum of the task, such as each class; empty if
            the site reveals only sums over sites.
        fingerprints: split -> SHA-256 of its samples.
        simulated: whether the site is simulated, and keeps its private state in the run directory.
        features: names of a table's features; empty for images.
        sums: sums over the training rows of a table's features and of a numeric outcome, if these
            are standardised over all sites.
        dropped: number of samples that no split holds.
        schema: digest of a table's schema, or of images' classes and size.
        backbone: digest of the weights that the network starts from; empty if these are random.
        class_names: names of the classes; empty if they have none.
        floor: the site's 'sums-min-count': no mean over fewer samples leaves the site.
        software: versions, revision and device of a hospital, by name.
        measured: the splits that the site sends measurements for; a hospital may withhold some.
        task: the name of the task that the labels are for.
    """

    site: str
    distribution: str
    input_shape: tuple[int, ...]
    classes: int
    label_counts: dict[str, list[int]]
    fingerprints: dict[str, str]
    simulated: bool = False
    features: tuple[str, ...] = ()
    sums: Sums | None = None
    dropped: int = 0
    schema: str = ""
    backbone: str = ""
    class_names: tuple[str, ...] = ()
    floor: int = 1
    measured: tuple[str, ...] = SPLITS
    software: dict[str, str] = field(default_factory=dict)
    task: str = CLASSIFICATION

    def columns(self) -> tuple[str, ...]:
        """Return the names of the columns that ``sums`` cover: features and a numeric outcome."""
        return numeric_columns(self.task, self.features, self.class_names)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Split -> number of samples; empty if the site reveals only sums over sites."""
        return {split: sum(counts) for split, counts in self.label_counts.items()}

    @cached_property
    def measured_splits(self) -> list[str]:
        """The splits that have samples and for which the site sends measurements.

        They are in the order of the site's label counts. A site that reveals only sums over sites
        has no label counts. Its empty splits are then unknown, and the result is every split in
        ``measured``, the splits for which it sends measurements.
        """
        if not self.label_counts:
            return list(self.measured)
        splits = []
        for split, counts in self.label_counts.items():
            if sum(counts) > 0 and split in self.measured:
                splits.append(split)
        return splits

    def to_config(self) -> dict[str, Any]:
        """Convert the site's facts to the entries of a ConfigRecord, a mapping of plain values.

        The keys are the names of the fields, with '-' in place of '_'. Mappings and lists of
        strings become JSON. Sums become three lists of numbers: ``sums-count``, ``sums-total`` and
        ``sums-squares``. Missing sums and an empty field ``software`` are left out.
        """
        said = {key_of(name): getattr(self, name) for name in _PLAIN}
        said |= {key_of(name): json.dumps(getattr(self, name)) for name in _AS_JSON}
        if not self.software:
            said.pop("software")
        if self.sums is not None:
            said |= {f"sums-{part}": values.tolist() for part, values in vars(self.sums).items()}
        return said | {"input-shape": list(self.input_shape)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SiteFacts:
        """Build the facts from the entries of a ConfigRecord.

        Args:
            config: the entries that ``to_config`` made. Some entries may be missing: then
                ``software`` is empty, ``task`` is classification, and ``sums`` is None. All other
                entries are required.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError: the
            entries are not valid facts. A site may send anything, so callers catch all of these.
        """
        config = {"software": "{}", "task": CLASSIFICATION, **config}
        said = {name: config[key_of(name)] for name in _PLAIN}
        said |= {name: json.loads(config[key_of(name)]) for name in _AS_JSON}
        read = _validate_facts(cls, json.dumps(said))
        fault = _find_split_fault(read)
        if fault:
            raise ValueError(fault)
        return replace(read, sums=_read_sums(config, len(read.columns())))


_PLAIN = (
    *("site", "distribution", "input_shape", "classes", "simulated", "dropped", "schema"),
    *("backbone", "floor", "task"),
)
_AS_JSON = ("label_counts", "fingerprints", "features", "class_names", "measured", "software")


def _validate_facts(cls: type, text: str) -> SiteFacts:
    """Build a site's facts from JSON, without converting values to the types of the fields.

    pydantic checks the types in strict mode.

    Args:
        cls: the class to build, normally ``SiteFacts``.
        text: a JSON object that maps the names of fields to values. A field that has a default may
            be missing.

    Raises:
        ValueError: the text is not valid JSON, a field is missing, or a value does not have the
            type of its field. The error names the first such field by its key.
    """
    kind: type = cls  # mypy does not take the class of a dataclass for hashable, as a cache needs
    try:
        facts: SiteFacts = adapter_of(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # Invalid JSON has no place
        place = ", ".join(f"'{key_of(str(step))}'" for step in first["loc"])
        raise ValueError(": ".join(filter(None, [place, first["msg"]]))) from None
    return facts


def _find_split_fault(facts: SiteFacts) -> str:
    """Describe the first fault in a site's task, label counts or measured splits.

    The description is a clause, and is empty if there is no fault. These rules are checked in this
    order:

    - The task must be in the table ``TASKS``.
    - The label counts of each split must have one count per stratum of the task. A stratum is a
      group of samples, such as a class. No count may be negative.
    - If there are label counts, they must include the split train, whose counts may be 0.
    - The measured splits, for which the site sends metrics, must be among train, val and test.
    """
    if facts.task not in TASKS:
        return f"'task' is '{one_line(facts.task, 40)}', which is none of {', '.join(TASKS)}"
    strata = count_strata(facts.task, facts.classes)
    for split, counts in facts.label_counts.items():
        if len(counts) != strata:
            return f"'label-counts' of {split} have {len(counts)} numbers, not {strata}"
        if min(counts, default=0) < 0:
            return f"'label-counts' of {split} are not whole numbers of 0 or more"
    # Every reply's weight is checked against the counts of the training samples
    if facts.label_counts and "train" not in facts.label_counts:
        return "'label-counts' lack the split train"
    if not set(facts.measured) <= set(SPLITS):
        return f"'measured' names splits other than {', '.join(SPLITS)}"
    return ""


def _read_sums(config: Mapping[str, Any], features: int) -> Sums | None:
    """Read the sums over a table's training rows from the entries of a ConfigRecord.

    Args:
        config: the entries "sums-count", "sums-total" and "sums-squares", each a list of numbers.
        features: the length that each list must have. It is the number of features, plus 1 for an
            outcome that is a number.

    Returns:
        The sums; None if the entry "sums-count" is missing.

    Raises:
        ValueError: a list does not have ``features`` finite numbers, or a count or a sum of squares
            is negative.
        KeyError: one of the other two entries is missing.
    """
    if "sums-count" not in config:
        return None
    parts = {}
    for part in ("count", "total", "squares"):
        values = np.array([float(value) for value in config[f"sums-{part}"]])
        is_negative = part != "total" and bool((values < 0).any())
        if len(values) != features or not np.isfinite(values).all() or is_negative:
            least = "" if part == "total" else " of 0 or more"
            raise ValueError(f"'sums-{part}' are not {features} finite numbers{least}")
        parts[part] = values
    return Sums(**parts)
