"""Load silos that are tables: each hospital's own file, read by a shared schema."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedsilo.core.errors import DataError, FedsiloError
from fedsilo.core.files.locations import Places, data_folder, find_places
from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.tasks import CLASSIFICATION, REGRESSION, SURVIVAL
from fedsilo.datasets.silo.measures import ColumnWords, LeftOutRows, Measure
from fedsilo.datasets.silo.row_splits import SPLIT_KEYS, RowSplit, split_rows, split_values
from fedsilo.datasets.silo.silos import (
    DataSet,
    Silo,
    Split,
    cached_silo,
    save_silo,
    strata_of,
)
from fedsilo.datasets.tables.parsing import ParsedTable, parse_table
from fedsilo.datasets.tables.schema import TableSchema, read_schema
from fedsilo.datasets.tables.table_files import Lines, read_table

SCHEMA_FILE = "schema.yaml"
_MAKER = 2  # raise it when the same settings make other arrays, so that no old cache is read
_MAKER_OF_OWN = 3  # the same for users' own tables, which keep copies in one part


class TableDataSet(DataSet):
    """A data set whose sites are tables with one schema."""

    settings = frozenset({"data.standardise", *SPLIT_KEYS})
    is_table = True
    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION, REGRESSION, SURVIVAL)
    headline: ClassVar[tuple[str, ...]] = (
        "accuracy",
        "balanced-accuracy",
        "auc",
        "calibration-error",
    )

    @abstractmethod
    def schema(self, places: Places) -> TableSchema:
        """Return the schema, in which the keys of ``sites`` are the silos' names."""

    @abstractmethod
    def lines_of(self, site: str, schema: TableSchema, places: Places) -> tuple[Lines, str]:
        """Read the lines of a site's table, and return them with the table's name for errors."""

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the schema's sites, in its order."""
        return list(self.schema(places).sites)

    def column_words(self, settings: CommonSettings) -> Mapping[str, ColumnWords]:
        """Return each column's words for people: its title with the unit, and its levels' names.

        A level is one of the values of a categorical column. A level without a name is left out.
        The mapping is empty if the schema is not on this machine or cannot be read.
        """
        try:
            schema = self.schema(find_places(settings.data_dir, settings.cache_dir))
        except FedsiloError:  # only hospitals have it
            return {}
        return {column.name: column.words() for column in schema.columns}

    def notices(self, settings: CommonSettings) -> list[str]:
        """Describe how many rows are kept although a value is out of range.

        Returns:
            A list with one sentence, or an empty list in these cases:

            - There are no such rows, or the schema drops them.
            - The data cannot be loaded on this machine.
            - The tables are a user's own. Each site then logs such rows when it opens its table.
        """
        places = find_places(settings.data_dir, settings.cache_dir)
        rows = 0
        values: Counter[str] = Counter()
        try:
            schema = self.schema(places)
            if schema.out_of_range != "keep" or self.origin == "own":
                return []
            for site in schema.sites:
                inputs = self._load(site, settings, places).inputs().values()
                table = np.concatenate([part.numpy() for part in inputs])
                outside = schema.find_out_of_range(table)
                rows += int(np.any(list(outside.values()), axis=0).sum())
                values.update({name: int(of.sum()) for name, of in outside.items()})
        except FedsiloError:  # the site itself reports it
            return []
        parts = []
        for column in schema.columns:
            if values[column.name]:
                number, words = values[column.name], column.words().title
                parts.append(f"{number} of {words}, possible: {column.range_text()}")
        if not rows:
            return []
        return [
            f"{self.name}: {format_count(rows, 'row')} with an impossible value are kept "
            f"('out-of-range: keep'): {'; '.join(parts)}"
        ]

    def measures(self, silo: Silo, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return the silo's columns for histograms: numbers with edges, categories with levels."""
        return column_measures(self.schema(places), silo)

    def left_out(self, silo: Silo, settings: CommonSettings, places: Places) -> LeftOutRows:
        """Read the site's table again, and count the rows that are left out for their values.

        The result has the total number of these rows. A column's number counts the rows left out
        because their value in this column is missing. If the schema's 'out-of-range' is 'drop',
        rows whose value is out of range count too.

        Raises:
            DataError: the table is missing or invalid.
        """
        schema = self.schema(places)
        lines, where = self.lines_of(silo.name, schema, places)
        return parse_table(lines, schema, where).left_out

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Open a site's silo from the cache, and create it there if it is missing.

        The site's table is read in both cases, because the cache finds the silo by the table's
        lines.

        Raises:
            DataError: the table is missing or invalid, or has too few rows to be split.
        """
        schema = self.schema(places)
        lines, where = self.lines_of(name, schema, places)
        # The lines themselves are in the key: a file that changed gives another silo, and a copy of
        # it elsewhere the same
        maker = _MAKER_OF_OWN if self.origin == "own" else _MAKER
        key = [maker, self.name, name, schema.key(), split_values(settings), lines]

        def fill(folder: Path) -> None:
            table = parse_table(lines, schema, where)
            rows = self._split(table, schema, settings, where)
            parts = {}
            for part, chosen in vars(rows).items():
                parts[part] = Split.of(table.rows[chosen], table.labels[chosen])
            facts = self._facts(name, schema, table.left_out.count)
            save_silo(folder, parts, facts, self._notes_of(table, where))

        folder = places.cache / f"{self.name}-silos"
        return cached_silo(folder, name, key, len(schema.label.names()), fill)

    def _split(
        self, table: ParsedTable, schema: TableSchema, settings: CommonSettings, where: str
    ) -> RowSplit:
        """Split the rows of a table into training, validation and test rows.

        If 'split.test-folds' is above 0, the chosen fold is the test part. Otherwise the test part
        is a random share, and the schema has the share and the seed. Validation rows come from
        'split.val-folds'. All copies of a row stay in one part of a user's own table, so that no
        test row is a copy of a training row. Other tables keep their published split.

        Raises:
            DataError: there are too few rows or groups of copies to split, or fewer than 2 training
                rows.
        """
        dropped = table.left_out.count
        if dropped:
            where = f"{where} ({format_count(dropped, 'row')} left out)"
        groups = None
        if self._count_copies(table):
            groups = [f"row {number}" for number in table.contents]
        share, seed = schema.test_share, schema.split_seed
        strata = strata_of(table.labels, schema.label.task)
        rows = split_rows(strata, settings, share, seed, where, groups)
        if len(rows.train) < 2:
            raise DataError(
                f"{where}: {len(rows.train)} training rows are left, but at least 2 are "
                "needed: add rows, or, if rows are left out for missing values, set the schema's "
                "'policy' to 'impute'"
            )
        return rows

    def _count_copies(self, table: ParsedTable) -> int:
        """Count the rows that repeat an earlier row, or return 0 for public tables."""
        if self.origin != "own":
            return 0
        return len(table.contents) - len(set(table.contents.tolist()))

    def _notes_of(self, table: ParsedTable, where: str) -> list[str]:
        """Build the notes on a user's own table for the site's log, or [] for any other table.

        The result has ``table.notes`` and, if some rows repeat an earlier row, a sentence with
        their number.
        """
        if self.origin != "own":
            return []
        notes = [f"{where}: {note}" for note in table.notes]
        copies = self._count_copies(table)
        if copies:
            notes.append(
                f"{where}: {copies} of {len(table.contents)} rows are copies of another; a split "
                "keeps copies in one part"
            )
        return notes

    def _facts(self, name: str, schema: TableSchema, dropped: int) -> dict[str, Any]:
        """Return the facts about a table that are written into the silo's file, by key.

        - 'name' and 'distribution' are both the silo's ``name``. 'dropped' is the number of rows
          left out.
        - 'features', 'classes' and 'task' are the schema's features, outputs and task.
        - 'schema' is the schema's digest. It covers units only in a user's own table.
        - 'declared' has the lists 'mean' and 'std' of all features and of a numeric label. It is
          None if the schema lacks one of these numbers.
        """
        statistics = schema.declared_statistics()
        declared = None
        if statistics:
            declared = {"mean": statistics.mean.tolist(), "std": statistics.std.tolist()}
        return {
            "name": name,
            "distribution": name,
            "features": schema.features(),
            "classes": list(schema.label.names()),
            "dropped": dropped,
            "schema": schema.digest(with_units=self.origin == "own"),
            "declared": declared,
            "task": schema.label.task,
        }


def column_measures(schema: TableSchema, silo: Silo) -> list[Measure]:
    """Collect each column's values in all splits of a silo, in the schema's order, for histograms.

    The values of a numeric column are its numbers. Those of a categorical column are the indices of
    the samples' levels, from 0 in the schema's order. Missing values are NaN. Ignored columns are
    left out.
    """
    inputs = {part: values.double().numpy() for part, values in silo.inputs().items()}
    features = schema.features()
    measures = []
    for column in schema.columns:
        may_lack = schema.policy != "drop" or bool(column.unmeasured)
        values = {}
        if column.kind == "numeric":
            place = features.index(column.name)
            for split, rows in inputs.items():
                values[split] = rows[:, place]
            measures.append(Measure(column.name, values, column.survey_edges(), may_lack=may_lack))
        elif column.kind == "categorical":
            # The first level has no feature: it is number 0, other levels are numbers 1, 2, ...
            places = [features.index(f"{column.name}={level}") for level in column.levels[1:]]
            numbers = np.arange(1.0, len(column.levels))
            for split, rows in inputs.items():
                values[split] = rows[:, places] @ numbers
            measures.append(Measure(column.name, values, levels=column.levels, may_lack=may_lack))
    return measures


class OwnTables(TableDataSet):
    """The data set ``table``: the user's tables and ``schema.yaml``, in the data directory."""

    name = "table"
    origin = "own"

    def schema(self, places: Places) -> TableSchema:
        """Read the file ``schema.yaml`` in the data directory.

        Raises:
            DataError: no data directory is named, or the schema is missing or invalid.
        """
        return read_schema(self._folder(places) / SCHEMA_FILE)

    def lines_of(self, site: str, schema: TableSchema, places: Places) -> tuple[Lines, str]:
        """Read the site's CSV, Excel or Parquet file, and return its lines and the file's path.

        The file is in the data directory that ``places`` names. ``schema`` has the file's name
        there and a CSV file's delimiter.

        Raises:
            DataError: no data directory is named, or the file is missing, damaged, or larger than
                allowed when unpacked.
            SettingError: the package that reads this format is not installed.
        """
        path = self._folder(places) / schema.sites[site]
        return read_table(path, schema.delimiter), str(path)

    def _folder(self, places: Places) -> Path:
        return data_folder(places, self.name, f"with {SCHEMA_FILE} and the sites' tables")


TABLE = OwnTables()
