"""Silos that are tables: each hospital's own CSV, read by a shared schema, split and cached."""

import logging
from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places, data_folder
from fedsilo.core.files.text_files import read_text
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping
from fedsilo.datasets.silo.measures import LeftOutRows, Measure
from fedsilo.datasets.silo.row_splits import SPLIT_KEYS, split_rows
from fedsilo.datasets.silo.silos import DataSet, Silo, Split, cached_silo, save_silo
from fedsilo.datasets.tables.parsing import ParsedTable, parse_table
from fedsilo.datasets.tables.schema import TableSchema, read_schema

SCHEMA_FILE = "schema.yaml"
_MAKER = 2  # raise it when the same settings make other arrays, so that no old cache is read
_MAKER_OF_OWN = 3  # the same for tables of one's own, whose copies stay in one part


class TableDataSet(DataSet):
    """A data set whose sites are tables of one schema."""

    settings = frozenset({"data.standardise", *SPLIT_KEYS})
    is_table = True
    headline = ("accuracy", "balanced-accuracy", "auc", "calibration-error")

    @abstractmethod
    def schema(self, places: Places) -> TableSchema:
        """Return the schema; its ``sites`` are the silos' names."""

    @abstractmethod
    def text_of(self, site: str, schema: TableSchema, places: Places) -> tuple[str, str]:
        """Return the CSV text of a site, and what to call it in errors."""

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        """Return the schema's sites, in its order."""
        return list(self.schema(places).sites)

    def measures(self, silo: Silo, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return the columns: numbers with their edges, categories by their levels."""
        return column_measures(self.schema(places), silo)

    def left_out(self, silo: Silo, settings: CommonSettings, places: Places) -> LeftOutRows:
        """Return the rows that are left out, and in which columns they lack a value."""
        schema = self.schema(places)
        text, where = self.text_of(silo.name, schema, places)
        return parse_table(text, schema, where).left_out

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Read, split and cache a site's table."""
        schema = self.schema(places)
        text, where = self.text_of(name, schema, places)
        cut = [as_mapping(settings)[key] for key in SPLIT_KEYS]
        maker = _MAKER_OF_OWN if self.origin == "own" else _MAKER
        facts = [maker, self.name, name, schema.key(), cut, text]

        def fill(folder: Path) -> None:
            table = parse_table(text, schema, where)
            dropped = table.left_out.count
            place = where
            if dropped:
                place = f"{where} ({dropped} rows were dropped for missing values)"
            groups = self._groups(table, where)
            share, seed = schema.test_share, schema.split_seed
            rows = split_rows(table.labels, settings, share, seed, place, groups)
            if len(rows.train) < 2:
                raise DataError(
                    f"{place}: {len(rows.train)} training rows are left, but at least 2 are "
                    "needed: add rows, or set the schema's 'policy' to 'impute'"
                )
            parts = {}
            for part, chosen in vars(rows).items():
                parts[part] = Split.of(table.rows[chosen], table.labels[chosen])
            save_silo(folder, parts, _facts(name, schema, dropped))

        folder = places.cache / f"{self.name}-silos"
        return cached_silo(folder, name, facts, len(schema.classes), fill)

    def _groups(self, table: ParsedTable, where: str) -> list[str] | None:
        """Group the rows of equal content, so that a split keeps them in one part.

        Without this, a copy of a training row could be a test row. The site's log says how many
        copies there are. Public tables keep their published split.

        Returns:
            A name per row, or None where no two rows are equal.
        """
        copies = len(table.contents) - len(set(table.contents.tolist()))
        if not copies or self.origin != "own":
            return None
        logging.getLogger("flwr").warning(
            "fedsilo: %s: %d of %d rows are copies of another; a split keeps copies in one part",
            where,
            copies,
            len(table.contents),
        )
        return [f"row {number}" for number in table.contents]


def _facts(name: str, schema: TableSchema, dropped: int) -> dict[str, Any]:
    declared = schema.declared_statistics()
    return {
        "name": name,
        "distribution": name,
        "features": schema.features(),
        "classes": list(schema.classes),
        "dropped": dropped,
        "schema": schema.digest(),
        "declared": declared and {"mean": declared.mean.tolist(), "std": declared.std.tolist()},
    }


def column_measures(schema: TableSchema, silo: Silo) -> list[Measure]:
    """Return the columns of a silo that are read, in the schema's order."""
    inputs = {part: split.inputs.double().numpy() for part, split in silo.splits().items()}
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
            # The first level has no feature: it is number 0, the features of the others 1, 2, ...
            places = [features.index(f"{column.name}={level}") for level in column.levels[1:]]
            numbers = np.arange(1.0, len(column.levels))
            for split, rows in inputs.items():
                values[split] = rows[:, places] @ numbers
            measures.append(Measure(column.name, values, levels=column.levels, may_lack=may_lack))
    return measures


class OwnTables(TableDataSet):
    """``table``: the user's own CSV files and ``schema.yaml``, in the data directory."""

    name = "table"
    origin = "own"

    def schema(self, places: Places) -> TableSchema:
        """Read ``schema.yaml``."""
        return read_schema(self._folder(places) / SCHEMA_FILE)

    def text_of(self, site: str, schema: TableSchema, places: Places) -> tuple[str, str]:
        """Read the site's CSV."""
        path = self._folder(places) / schema.sites[site]
        return read_text(path), str(path)

    def _folder(self, places: Places) -> Path:
        return data_folder(places, self.name, f"with {SCHEMA_FILE} and the sites' CSV files")


TABLE = OwnTables()
