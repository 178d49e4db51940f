"""A site's answer to a survey: pydantic checks it at the site, and again at the server.

A count is None where the site suppressed it. A histogram's cells are in the order of its edges
(below the first, between two, above the last), or one per level; if samples can lack a value, a
last cell counts those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from fedsilo.models.contract.site_facts import SPLITS

VERSION = 1
ABOUT = "about"
_MOST = 10**9  # samples
_NAMES, _CELLS, _LENGTH = 2000, 200, 200  # features or classes; cells of one; characters


def _plain(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it is not printable text")
    return text


def _split(name: str) -> str:
    if name not in SPLITS:
        raise ValueError(f"a split is not one of {', '.join(SPLITS)}")
    return name


Text = Annotated[str, Field(max_length=_LENGTH), AfterValidator(_plain)]
Count = Annotated[int, Field(ge=0, le=_MOST)] | None
Cells = Annotated[list[Count], Field(max_length=_NAMES)]
Number = Annotated[float, Field(ge=-1e300, le=1e300, allow_inf_nan=False)]
SplitName = Annotated[str, AfterValidator(_split)]


class Part(BaseModel):
    """A part of an answer; nothing in it is converted, and nothing unknown passes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Measured(Part):
    """What is counted: a feature with the edges, or the levels, that its data set declares.

    One without either has no histogram; ``lacking``: its last cell is of samples without a value.
    """

    name: Text
    edges: Annotated[list[Number], Field(max_length=_CELLS)] = []
    levels: Annotated[list[Text], Field(max_length=_NAMES)] = []
    lacking: bool = False

    @model_validator(mode="after")
    def _orderly(self) -> Measured:
        if self.edges and self.levels:
            raise ValueError("a feature has edges or levels, not both")
        if any(low >= high for low, high in pairwise(self.edges)):
            raise ValueError("the edges do not rise")
        return self

    @property
    def cells(self) -> int:
        """How many cells its histogram has, or 0 if it has none."""
        known = len(self.levels) or (len(self.edges) + 1 if self.edges else 0)
        return known + self.lacking if known else 0


class About(Part):
    """Whose answer it is, and what its other parts count.

    Attributes:
        version: of this form.
        site: the site's name.
        simulated: whether it is a simulated one.
        dataset: the data set's name.
        on: the day of the answer; of a hospital that of its first one, which is given again.
        changed: whether the data have changed since.
        floor: counts below it are suppressed.
        classes: names of the labels.
        features: what ``histograms``, ``means`` and ``percentiles`` are of.
        file_features: what ``files`` is of.
    """

    version: int = VERSION
    site: Text
    simulated: bool
    dataset: Text
    on: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    changed: bool = False
    floor: Annotated[int, Field(ge=1, le=_MOST)]
    classes: Annotated[list[Text], Field(min_length=2, max_length=_NAMES)]
    features: Annotated[list[Measured], Field(max_length=_NAMES)]
    file_features: Annotated[list[Measured], Field(max_length=20)] = []


class Spread(Part):
    """Mean and standard deviation."""

    mean: Number
    sd: Annotated[Number, Field(ge=0)]


class LeftOut(Part):
    """Samples that are in no split.

    Attributes:
        count: rows without a value, or files that cannot be decoded.
        missing: of a table, by column those that have no value in it.
    """

    count: Count
    missing: Annotated[dict[Text, Count], Field(max_length=_NAMES)] = {}


ByFeature = Annotated[dict[Text, Cells], Field(max_length=_NAMES)]


class Survey(Part):
    """A site's answer; a part that its hospital keeps is None.

    Attributes:
        about: see there.
        samples: per split.
        labels: per split, by class.
        left_out: what is in no split.
        histograms: per split and feature.
        means, percentiles: per split and feature; of percentiles the 5th and the 95th.
        files: by feature of the files, over all splits; ``file_percentiles`` the same.
    """

    about: About
    samples: dict[SplitName, Count] | None = None
    labels: dict[SplitName, Cells] | None = None
    left_out: LeftOut | None = None
    histograms: dict[SplitName, ByFeature] | None = None
    means: dict[SplitName, dict[Text, Spread]] | None = None
    percentiles: dict[SplitName, dict[Text, tuple[Number, Number]]] | None = None
    files: ByFeature | None = None
    file_percentiles: dict[Text, tuple[Number, Number]] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Survey:
        classes, about = len(self.about.classes), self.about
        if any(len(cells) != classes for cells in (self.labels or {}).values()):
            raise ValueError("'labels' are not one count a class")
        for by_name in (self.histograms or {}).values():
            _check_cells("histograms", by_name, about.features)
        _check_cells("files", self.files or {}, about.file_features)
        known = {feature.name for feature in about.features}
        by_split: list[Mapping[str, Any]] = [*(self.means or {}).values()]
        by_split += [*(self.percentiles or {}).values()]
        of_files = {feature.name for feature in about.file_features}
        odd = not (self.file_percentiles or {}).keys() <= of_files
        if odd or any(not by_name.keys() <= known for by_name in by_split):
            raise ValueError("it has a statistic of a feature that 'about' does not name")
        return self

    def to_config(self) -> dict[str, str]:
        """Return the parts as keys and values of a ConfigRecord, each as JSON."""
        content = self.model_dump(mode="json", exclude_none=False)
        return {
            key.replace("_", "-"): json.dumps(value)
            for key, value in content.items()
            if value is not None
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Survey:
        """Read the parts back.

        Raises:
            ValueError, RecursionError: it is none; server and site may run different versions.
        """
        content = {}
        for key, value in config.items():
            if type(value) is not str:
                raise ValueError(f"'{key:.40}' is not text")
            content[key.replace("-", "_")] = json.loads(value, parse_constant=_no_number)
        return cls.model_validate_json(json.dumps(content))


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _check_cells(part: str, by_name: Mapping[str, list[Count]], measured: list[Measured]) -> None:
    cells = {one.name: one.cells for one in measured}
    if len(cells) != len(measured):
        raise ValueError("two features have one name")
    for name, counts in by_name.items():
        if len(counts) != cells.get(name):
            raise ValueError(f"'{part}' does not fit the features that 'about' names")
