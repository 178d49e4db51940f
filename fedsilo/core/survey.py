"""A site's answer to a survey, which pydantic checks at the site and again at the server.

A suppressed count is None. The cells of a histogram are in the order of its edges (below the first
edge, between two edges, above the last one), or there is one cell per level. If samples can lack a
value, one more cell at the end counts these samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

VERSION = 1
ABOUT = "about"
_MOST = 10**9  # samples
_NAMES, _CELLS, _LENGTH = 2000, 200, 200  # features or classes; cells of one; characters


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it is not printable text")
    return text


Text = Annotated[str, Field(max_length=_LENGTH), AfterValidator(_check_printable)]
Count = Annotated[int, Field(ge=0, le=_MOST)] | None
Cells = Annotated[list[Count], Field(max_length=_NAMES)]
Number = Annotated[float, Field(ge=-1e300, le=1e300, allow_inf_nan=False)]
SplitName = Annotated[str, Field(pattern="^(train|val|test)$")]


class Part(BaseModel):
    """Base of the parts of an answer. Values are not converted, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class MeasuredFeature(Part):
    """A feature that is counted, with the edges or levels that its data set declares.

    Attributes:
        name: the feature's name.
        edges: rising edges of a number's cells.
        levels: the levels of a category. A feature without edges and levels gets no histogram.
        lacking: whether the histogram has one more cell, for the samples without a value.
    """

    name: Text
    edges: Annotated[list[Number], Field(max_length=_CELLS)] = []
    levels: Annotated[list[Text], Field(max_length=_NAMES)] = []
    lacking: bool = False

    @model_validator(mode="after")
    def _check_edges(self) -> MeasuredFeature:
        if self.edges and self.levels:
            raise ValueError("a feature has edges or levels, not both")
        if any(low >= high for low, high in pairwise(self.edges)):
            raise ValueError("the edges do not rise")
        return self

    @property
    def cells(self) -> int:
        """The number of cells in the histogram; 0 for a feature with neither edges nor levels.

        A feature has a cell for each level. Without levels, k edges make k + 1 cells. The first and
        the last of these are for values beyond the outer edges. A feature with edges or levels has
        one more cell if ``lacking`` is True, for samples without a value.
        """
        # k edges make k + 1 cells, because values below the first and above the last count too
        known = len(self.levels) or (len(self.edges) + 1 if self.edges else 0)
        return known + self.lacking if known else 0


class About(Part):
    """The origin of an answer, and the classes and features that its other parts describe.

    Attributes:
        version: version of this form.
        site: the site's name.
        simulated: whether the site is simulated.
        dataset: the data set's name.
        on: day of the answer, YYYY-MM-DD. A hospital repeats its first answer, with that day.
        changed: whether the data have changed since that day.
        floor: counts below this number are suppressed.
        classes: names of the classes.
        features: the features in ``histograms``, ``means`` and ``percentiles``.
        file_features: the features in ``files`` and ``file_percentiles``.
    """

    version: int = VERSION
    site: Text
    simulated: bool
    dataset: Text
    on: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    changed: bool = False
    floor: Annotated[int, Field(ge=1, le=_MOST)]
    classes: Annotated[list[Text], Field(min_length=2, max_length=_NAMES)]
    features: Annotated[list[MeasuredFeature], Field(max_length=_NAMES)]
    file_features: Annotated[list[MeasuredFeature], Field(max_length=20)] = []


class MeanAndDeviation(Part):
    """Mean and standard deviation."""

    mean: Number
    sd: Annotated[Number, Field(ge=0)]


class LeftOut(Part):
    """Samples that no split holds.

    Attributes:
        count: for a table, the number of rows with a value that is missing or out of range; for
            images, the number of files that cannot be decoded.
        missing: column -> number of rows with a missing or out-of-range value in that column; empty
            for images.
    """

    count: Count
    missing: Annotated[dict[Text, Count], Field(max_length=_NAMES)] = {}


ByFeature = Annotated[dict[Text, Cells], Field(max_length=_NAMES)]


class Survey(Part):
    """A site's answer to a survey. A part that the hospital withholds is None.

    Attributes:
        about: the origin of the answer, see ``About``.
        samples: split -> number of samples.
        labels: split -> samples of each class.
        left_out: the samples that no split holds.
        histograms: split -> feature -> counts of the cells.
        means: split -> feature -> mean and standard deviation.
        percentiles: split -> feature -> 5th and 95th percentile.
        files: feature of the files -> counts of the cells, over all splits.
        file_percentiles: feature of the files -> 5th and 95th percentile, over all splits.
    """

    about: About
    samples: dict[SplitName, Count] | None = None
    labels: dict[SplitName, Cells] | None = None
    left_out: LeftOut | None = None
    histograms: dict[SplitName, ByFeature] | None = None
    means: dict[SplitName, dict[Text, MeanAndDeviation]] | None = None
    percentiles: dict[SplitName, dict[Text, tuple[Number, Number]]] | None = None
    files: ByFeature | None = None
    file_percentiles: dict[Text, tuple[Number, Number]] | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> Survey:
        """Check that the parts of a site's answer match the classes and features in ``about``.

        The part ``about`` says to which classes and features the other parts belong. For example,
        labels must have one count per class. ``_find_problems`` has all rules. pydantic calls this
        function once it has built the answer.

        Returns:
            The answer, unchanged.

        Raises:
            ValueError: a part does not match. The message describes only the first problem.
        """
        problem = next(self._find_problems(), "")
        if problem:
            raise ValueError(problem)
        return self

    def _find_problems(self) -> Iterator[str]:
        """Yield a sentence for each part of a site's answer that does not match the part ``about``.

        ``about`` declares the classes, the features of samples and the features of files. Labels
        need one count per class. Each histogram, also in ``files``, must belong to a declared
        feature and have as many cells as that feature declares. Means and percentiles must belong
        to declared features, but some may be missing. ``samples`` and ``left_out`` are not checked.
        A part that the site withholds (None) is skipped.
        """
        about = self.about
        for cells in (self.labels or {}).values():
            if len(cells) != len(about.classes):
                yield "'labels' do not have one count per class"
        for histograms in (self.histograms or {}).values():
            yield from _find_cell_problems("histograms", histograms, about.features)
        yield from _find_cell_problems("files", self.files or {}, about.file_features)
        # Means and percentiles need not be complete: a site withholds those that would reveal a
        # patient
        named: list[tuple[Mapping[str, Any], list[MeasuredFeature]]] = []
        named.append((self.file_percentiles or {}, about.file_features))
        for means in (self.means or {}).values():
            named.append((means, about.features))
        for percentiles in (self.percentiles or {}).values():
            named.append((percentiles, about.features))
        for statistics, features in named:
            if not statistics.keys() <= {feature.name for feature in features}:
                yield "it has a statistic of a feature that 'about' does not name"

    def to_config(self) -> dict[str, str]:
        """Convert a site's answer to the entries of a ConfigRecord: name of a part -> JSON string.

        The answer has counts and statistics of the site's data. In the names of its parts '-'
        replaces '_'. A part that the site withholds (None) is left out. Within a part, each count
        that the site withholds becomes null.
        """
        config = {}
        for name, value in self.model_dump(mode="json", exclude_none=False).items():
            # Only a whole part may be absent: within a part, None is a suppressed count
            if value is not None:
                config[name.replace("_", "-")] = json.dumps(value)
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Survey:
        """Build a site's answer to a survey from the entries of a ConfigRecord.

        A survey asks each site for counts and statistics of its data.

        Args:
            config: maps the name of each part, with '-' in place of '_', to a JSON string. The part
                ``about`` is required. A part that is missing was withheld by the site, and becomes
                None.

        Raises:
            ValueError: an entry is not a string, or the entries are not a valid answer to a survey.
            RecursionError: the JSON of an entry is nested too deeply.
        """
        content = {}
        for key, value in config.items():
            if type(value) is not str:
                raise ValueError(f"'{key:.40}' is not text")
            content[key.replace("-", "_")] = json.loads(value, parse_constant=_refuse_constant)
        return cls.model_validate_json(json.dumps(content))


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _find_cell_problems(
    part: str, by_name: Mapping[str, list[Count]], measured: list[MeasuredFeature]
) -> Iterator[str]:
    """Yield a sentence for each feature whose histogram does not have the declared number of cells.

    A histogram of a feature that was not declared counts as such a histogram. If two declared
    features have the same name, the first sentence says so.

    Args:
        part: the part of the site's answer that has the histograms, "histograms" or "files". The
            sentences name it.
        by_name: feature -> counts of the cells.
        measured: the features that the answer declares, each with its number of ``cells``.
    """
    cells = {feature.name: feature.cells for feature in measured}
    if len(cells) != len(measured):
        yield "two features have the same name"
    for name, counts in by_name.items():
        if len(counts) != cells.get(name):
            yield f"'{part}' does not fit the features that 'about' names"
