"""The schema of a table, as its YAML file has it: typed columns, a label, marks of missing values.

A categorical column becomes one feature per level except the first (one-hot, first level dropped).
Levels are declared, not collected from the data, so that all hospitals have the same features
without exchanging anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from fedsilo.core.files.declarations import FileModel, Text, fault, misfit, number, whole
from fedsilo.core.files.sealed_folders import json_digest
from fedsilo.core.files.text_files import Marks, same_text
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.core.tasks import CLASSIFICATION, TASKS
from fedsilo.datasets.silo.declared_silos import ClassLists, Sites, read_declared
from fedsilo.datasets.silo.measures import ColumnWords

_MOST_EDGES = 64


def _in_one_form(levels: list[str]) -> list[str]:
    return list(map(same_text, levels))


def _keys_in_one_form(names: dict[str, str]) -> dict[str, str]:
    return {same_text(level): name for level, name in names.items()}


def _are_rising(numbers: list[float], most: int) -> bool:
    """Tell whether there are at most ``most`` numbers, each above the one before it."""
    return len(numbers) <= most and numbers == sorted(set(numbers))


def _one_character(text: str) -> str:
    if len(text) != 1:
        raise misfit("must be one character")
    return text


class Column(FileModel):
    """A column of a table.

    Attributes:
        name: its name.
        kind: 'numeric', 'categorical' or 'ignored'.
        levels: the possible values of a categorical column.
        mean, std: statistics to standardise a numeric column with; both or neither.
        edges: bin edges of its histogram in a survey; without them they follow from mean and std.
        range: lowest and highest possible value of a numeric column, in its ``unit``. ``fedsilo
            predict`` refuses other values; ``TableSchema.out_of_range`` decides about training
            rows.
        unmeasured: values of a numeric column that mean "not measured"; they are imputed, whatever
            the schema's policy.
        indicator: whether to add a feature ``column=unmeasured``: 1 if the value is imputed, else
            0.
        title: a name for people.
        unit: the unit of the numbers.
        level_names: level -> a name for people.
    """

    model_config = ConfigDict(title="a column")

    name: Text
    kind: Literal["numeric", "categorical", "ignored"] = "numeric"
    levels: Annotated[list[Text], AfterValidator(_in_one_form)] = Field(default_factory=list)
    mean: Annotated[float, number(-1e300, 1e300)] | None = None
    std: Annotated[float, number(1e-12, 1e300)] | None = None
    edges: list[Annotated[float, number(-1e300, 1e300)]] = Field(default_factory=list)
    range: list[Annotated[float, number(-1e300, 1e300)]] = Field(default_factory=list)
    unmeasured: Annotated[list[Text], AfterValidator(_in_one_form)] = Field(default_factory=list)
    indicator: bool = False
    title: Text = ""
    unit: Text = ""
    level_names: Annotated[dict[Text, Text], AfterValidator(_keys_in_one_form)] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _consistent(self) -> Column:
        sentence = self._find_fault()
        if sentence:
            raise fault(f"column '{self.name}' {sentence}")
        return self

    def _find_fault(self) -> str:
        """Describe how the column's keys contradict each other and what to do; '' if they do not.

        Only the first contradiction is described.
        """
        is_numeric = self.kind == "numeric"
        different = len(set(self.levels))
        if (self.kind == "categorical") != bool(self.levels) or different < len(self.levels):
            return (
                f"is {self.kind} with {len(self.levels)} levels, of which {different} differ: a "
                "categorical column, and no other, lists its levels, each once"
            )
        if "=" in self.name and self.kind != "ignored":
            return "has '=' in its name, as levels do: rename it"
        if different == 1:
            return "has only one level: declare it as 'ignored'"
        if (self.mean is None) != (self.std is None):
            return "declares one of 'mean' and 'std': give both or none"
        if self.edges and not (is_numeric and _are_rising(self.edges, _MOST_EDGES)):
            return (
                f"has 'edges', but they must be up to {_MOST_EDGES} rising numbers of a numeric "
                "column: correct them"
            )
        is_pair = len(self.range) == 2 and _are_rising(self.range, 2)
        if self.range and not (is_numeric and is_pair):
            return (
                "has a 'range', but it must be the lowest and the highest possible value of a "
                "numeric column: correct it"
            )
        if not is_numeric and (self.unmeasured or self.indicator):
            return (
                f"is {self.kind}, but has 'unmeasured' or 'indicator', which only numeric columns "
                "have: list its mark of a missing value under the schema's 'missing'"
            )
        if self.unit and not is_numeric:
            return f"is {self.kind}, but has a 'unit', which only numeric columns have: remove it"
        if not set(self.level_names) <= set(self.levels):
            return "has 'level-names', but not all of them name one of its 'levels': correct them"
        return ""

    def unmeasured_marks(self) -> Marks:
        """Return the values that mean "not measured"; numbers match by value, as '0.0' and '0'."""
        return Marks(self.unmeasured)

    def words(self) -> ColumnWords:
        """Return the column's title and level names as shown to people.

        The title is followed by the column's name, if it differs, and the unit, in brackets: 'Age
        (age, years)'. A level reads 'name (level)'; unnamed levels are omitted.
        """
        title = self.title or self.name
        within = []
        if title != self.name:
            within.append(self.name)
        if self.unit:
            within.append(self.unit)
        if within:
            title = f"{title} ({', '.join(within)})"
        levels = {}
        for level, name in self.level_names.items():
            levels[level] = f"{name} ({level})"
        return ColumnWords(title, levels)

    def range_text(self) -> str:
        """Return the range with its unit, such as '50 to 1500 mg/dl'; '' without a range."""
        if not self.range:
            return ""
        low, high = self.range
        return f"{low:g} to {high:g} {self.unit}".rstrip()

    def survey_edges(self) -> tuple[float, ...]:
        """Return the bin edges of the column's histogram in a survey.

        They are the declared edges or, without any, the seven edges from mean - 3 std to mean + 3
        std in steps of one std; () if neither edges nor mean and std are declared.
        """
        if self.edges or self.mean is None or self.std is None:
            return tuple(self.edges)
        # From three standard deviations below the mean to three above
        return tuple(self.mean + step * self.std for step in range(-3, 4))


class Label(FileModel):
    """The column that is predicted, the last one if there is no header.

    Attributes:
        column: its name.
        task: what is predicted: one of the ``classes``, or a number (regression).
        classes: class name -> the values that mean it, in class order; empty for a number.
        unit: the unit of a number, shown next to its name.
        mean, std: statistics to standardise a number with; both or neither.
    """

    model_config = ConfigDict(title="'label'")

    column: Text
    task: Literal["classification", "regression"] = CLASSIFICATION
    classes: ClassLists = Field(default_factory=dict)
    unit: Text = ""
    mean: Annotated[float, number(-1e300, 1e300)] | None = None
    std: Annotated[float, number(1e-12, 1e300)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Label:
        is_number = TASKS[self.task].numeric
        if is_number and self.classes:
            raise fault(
                "'label' has 'classes', but task 'regression' predicts a number: remove one"
            )
        if not is_number and not self.classes:
            raise fault("'label' lacks the key 'classes': name the values of each class")
        if not is_number and (self.unit or self.mean is not None or self.std is not None):
            raise fault(
                "'label' has 'unit', 'mean' or 'std', which only numbers have: remove them, or set "
                "its 'task' to 'regression'"
            )
        if (self.mean is None) != (self.std is None):
            raise fault("'label' declares one of 'mean' and 'std': give both or none")
        return self

    def names(self) -> tuple[str, ...]:
        """Return the names of the classes; of a number its column, with the unit in brackets."""
        if not TASKS[self.task].numeric:
            return tuple(self.classes)
        if self.unit:
            return (f"{self.column} ({self.unit})",)
        return (self.column,)


class TableSchema(FileModel):
    """The format of every hospital's table.

    Attributes:
        columns: the columns without the label; in file order if there is no header.
        label: the label's column, and its classes in class order or that it is a number.
        missing: texts that mark a missing value.
        policy: ``drop`` rows with a missing value, or ``impute`` it with the pooled mean.
        out_of_range: ``drop`` training rows with a value out of range, or ``keep`` them, as
            published results need. Both count these rows; ``fedsilo predict`` always refuses them.
        header: whether the first line names the columns.
        delimiter: the character between values.
        sites: site -> CSV, Excel or Parquet file.
        test_share: share of test rows if the settings have no test folds.
        split_seed: random state of that split.
    """

    model_config = ConfigDict(title="the schema")

    columns: list[Column]
    label: Label
    missing: list[Text] = Field(default_factory=lambda: ["", "?"])
    policy: Literal["drop", "impute"] = "drop"
    out_of_range: Literal["drop", "keep"] = "drop"
    header: bool = True
    delimiter: Annotated[Text, AfterValidator(_one_character)] = ","
    sites: Sites
    test_share: Annotated[float, number(0.0, 0.9)] = 0.34
    split_seed: Annotated[int, whole(0, 2**32 - 1, "2^32 - 1")] = 43

    @model_validator(mode="after")
    def _consistent(self) -> TableSchema:
        names = self.column_names()
        if len(set(names)) != len(names):
            raise fault(
                "two columns have one name, or the label is among 'columns': rename or remove one"
            )
        if not self.used_columns():
            raise fault("no column is 'numeric' or 'categorical': declare at least one")
        for column in self.indicator_columns():
            if self.policy == "drop" and not column.unmeasured:
                raise fault(
                    f"column '{column.name}' has an 'indicator' that would always be 0: list the "
                    "values that mean 'not measured' under 'unmeasured', or set 'policy' to "
                    "'impute'"
                )
        return self

    @property
    def classes(self) -> Mapping[str, list[str]]:
        """Class name -> the label's values that mean it, in class order."""
        return self.label.classes

    def column_names(self) -> list[str]:
        """Return the names of all columns, with the label's last."""
        names = [column.name for column in self.columns]
        return [*names, self.label.column]

    def features(self) -> tuple[str, ...]:
        """Return the features' names, in the order of ``RowReader.features``.

        First come the numeric columns, then ``column=level`` for all levels except each column's
        first, then ``column=unmeasured`` for indicators. Ignored columns have no feature.
        """
        names = [column.name for column in self.numeric_columns()]
        for column in self.columns:
            names += [f"{column.name}={level}" for level in column.levels[1:]]
        names += [f"{column.name}=unmeasured" for column in self.indicator_columns()]
        return tuple(names)

    def numeric_columns(self) -> list[Column]:
        """Return the columns of kind 'numeric', in order."""
        return [column for column in self.columns if column.kind == "numeric"]

    def indicator_columns(self) -> list[Column]:
        """Return the columns with an indicator, a feature that is 1 if the value is imputed."""
        return [column for column in self.columns if column.indicator]

    def used_columns(self) -> list[str]:
        """Return the names of the columns that become features."""
        return [column.name for column in self.columns if column.kind != "ignored"]

    def count_missing(self, rows: npt.NDArray[np.float32]) -> dict[str, int]:
        """Count the missing values (NaN) of rows (n, features) by column.

        Returns:
            Column -> count; columns without missing values are left out.
        """
        features = self.features()
        missing = np.isnan(rows).sum(axis=0)
        counts = {}
        for column in self.columns:
            if column.kind == "ignored":
                continue
            # A missing level is NaN in all features of its column
            feature = f"{column.name}={column.levels[1]}" if column.levels else column.name
            count = int(missing[features.index(feature)])
            if count:
                counts[column.name] = count
        return counts

    def find_out_of_range(self, rows: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.bool_]]:
        """Find the values of rows (n, features) that are outside their column's range.

        Returns:
            Column -> (n,) bool, True where the row's value is outside; only columns with a range.
            NaN counts as in range.
        """
        features = self.features()
        outside = {}
        for column in self.numeric_columns():
            if column.range:
                # Both are float32: otherwise a value at the edge could be beyond it
                low, high = np.array(column.range, dtype=np.float32)
                values = rows[:, features.index(column.name)]
                outside[column.name] = (values < low) | (values > high)
        return outside

    def digest(self, with_units: bool = False) -> str:
        """Return a SHA-256 of everything that must be equal at all sites to share one model.

        This covers columns (name, kind, levels, mean, std, unmeasured, indicator), label, classes,
        marks of missing values and the policy, but not ranges, titles, histogram edges or sites.

        Args:
            with_units: whether to add the units of numbers, which may differ between hospitals' own
                tables. Published tables leave units out, so that their runs keep the digest of
                earlier versions.
        """
        columns: list[Any] = []
        marked: list[Any] = []
        for column in self.columns:
            columns.append([column.name, column.kind, column.levels, column.mean, column.std])
            if column.unmeasured or column.indicator:
                marked.append([column.name, sorted(column.unmeasured), column.indicator])
        classes: list[Any] = [[name, sorted(values)] for name, values in self.classes.items()]
        if TASKS[self.label.task].numeric:
            classes = [self.label.task, self.label.unit, self.label.mean, self.label.std]
        facts = [
            columns,
            [self.label.column, classes],
            [sorted(map(same_text, self.missing)), self.policy],
        ]
        if marked:
            # A schema without such columns keeps the digest of earlier versions
            facts.append(marked)
        units = {column.name: column.unit for column in self.columns if column.unit}
        if units and with_units:
            facts.append([units])
        return json_digest(facts)

    def missing_marks(self) -> Marks:
        """Return the texts that mark a missing value; numbers match by value, '-9.0' like '-9'."""
        return Marks(self.missing)

    def declared_statistics(self) -> FeatureStatistics | None:
        """Return mean and standard deviation of every feature, (features,) each, as declared.

        A one-hot feature has mean 1 / levels, which also replaces a missing value, and standard
        deviation 1. An indicator has 0.5 and 0.5, which turns 0 and 1 into -1 and 1.

        Returns:
            None if any numeric column, or a numeric label, declares no mean and std. The label's
            are last.
        """
        means: list[float] = []
        stds: list[float] = []
        for column in self.numeric_columns():
            if column.mean is None or column.std is None:
                return None
            means.append(column.mean)
            stds.append(column.std)
        for column in self.columns:
            if column.levels:
                # The first level has no feature: the features of all other levels are 0 there
                features = len(column.levels) - 1
                means += [1 / len(column.levels)] * features
                stds += [1.0] * features
        indicators = len(self.indicator_columns())
        means += [0.5] * indicators
        stds += [0.5] * indicators
        if TASKS[self.label.task].numeric:
            if self.label.mean is None or self.label.std is None:
                return None
            means.append(self.label.mean)
            stds.append(self.label.std)
        return FeatureStatistics(np.array(means), np.array(stds))

    def key(self) -> dict[str, Any]:
        """Return everything in the schema that decides a cached silo's content, as JSON values.

        Titles and names of levels are left out. So are keys that newer versions added, if they have
        no value, so that a schema keeps the key of earlier versions.
        """
        content = self.model_dump()
        columns = content.pop("columns")
        label = content.pop("label")
        for column in columns:
            for name in ("unmeasured", "indicator", "unit"):
                # Without them a column keeps the key of earlier versions
                if not column[name]:
                    del column[name]
            for name in ("title", "level_names"):
                del column[name]  # words, which change no row
        if not any(column["range"] for column in columns):
            del content["out_of_range"]
        named = {"columns": columns, "label": label["column"], "classes": label["classes"]}
        if TASKS[self.label.task].numeric:
            named["outcome"] = label
        return {**named, **content}


def read_schema(path: Path) -> TableSchema:
    """Read and validate the schema in a YAML file; docs/tables.md shows an example.

    Raises:
        DataError: the file is missing or not valid YAML, or a key is unknown, missing, has a wrong
            type or contradicts another key.
    """
    return read_declared(path, TableSchema)
