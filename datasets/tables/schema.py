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
from fedsilo.core.tasks import TASKS
from fedsilo.datasets.silo.declared_silos import Sites, read_declared
from fedsilo.datasets.tables.columns import Column
from fedsilo.datasets.tables.labels import Label


def _one_character(text: str) -> str:
    if len(text) != 1:
        raise misfit("must be one character")
    return text


class TableSchema(FileModel):
    """The format of every hospital's table.

    Attributes:
        columns: the columns without the label; in file order if there is no header.
        label: the label's column, and its classes in class order or that it is a number.
        missing: strings that mark a missing value.
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
        return [*names, *self.label.columns()]

    def features(self) -> tuple[str, ...]:
        """Return the names of all features, in the order of the columns of the feature matrix.

        First come the names of the numeric columns. Then comes ``column=level`` for each level of a
        categorical column except its first, and then ``column=unmeasured`` for each column with an
        indicator.
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
        """Count the missing values (NaN) of each column in ``rows``, (n, features).

        A missing value of a categorical column is NaN in several features, but counts once.

        Returns:
            Column -> count. Columns without missing values, and ignored columns, are left out.
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
        """Find the values in ``rows``, (n, features), that are outside their column's range.

        Returns:
            Column -> (n,) bool, True where the row's value is outside the range. Only columns with
            a range are included. Missing values (NaN) and values at an end of the range are in
            range.
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
        """Compute a SHA-256 of all parts of the schema that sites must share to train one model.

        These parts are:

        - For each column its name, kind, levels, mean, std, unmeasured marks and indicator.
        - The label's column and classes, or for a regression its column, unit, mean and std.
        - The marks of missing values and the policy.

        Ranges, titles, histogram edges and sites are not included.

        Args:
            with_units: whether to add the units of the columns, which may differ between hospitals'
                own tables.
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
            [*self.label.columns(), classes],
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
        """Return the marks of a missing value, where numbers match by value, '-9.0' like '-9'."""
        return Marks(self.missing)

    def declared_statistics(self) -> FeatureStatistics | None:
        """Return mean and standard deviation of every feature, to standardise the features.

        - A numeric column has its declared values.
        - A one-hot feature of a column with L levels has mean 1 / L and standard deviation 1.
        - An indicator has mean 0.5 and standard deviation 0.5.

        Returns:
            The statistics, (features,) each, in the order of ``features``, then those of a numeric
            label. None if a numeric column or label has no declared mean and std.
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
        """Return the parts of the schema that decide a silo's content, for a key of the cache.

        The result has JSON values. Titles and names of levels are left out, because they change no
        value. A column's 'unmeasured', 'indicator' and 'unit' are left out if they are empty.
        'out_of_range' is left out if no column has a range.
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
        if label["time"]:
            named["time"] = label["time"]
        return {**named, **content}


def read_schema(path: Path) -> TableSchema:
    """Read a table's schema from a YAML file and validate it.

    docs/tables.md shows an example of a schema.

    Raises:
        DataError: the file is missing or is not valid YAML, a key is unknown or missing, or a value
            has a wrong type or contradicts the value of another key.
    """
    return read_declared(path, TableSchema)
