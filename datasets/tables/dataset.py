"""Silos that are tables: each hospital's own CSV, read by a shared schema, split and cached."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.locations import Places, data_folder, find_places
from fedsilo.datasets.io.text_files import read_text
from fedsilo.datasets.silo.cache import cached_silo
from fedsilo.datasets.silo.measures import LeftOutRows, Measure
from fedsilo.datasets.silo.row_splits import SPLIT_KEYS, check_folds, split_rows
from fedsilo.datasets.silo.silos import SPLITS, DataSet, Silo, Split, no_such_silo, save_silo
from fedsilo.datasets.tables.columns import column_measures
from fedsilo.datasets.tables.parsing import TableSchema, left_out_rows, parse_table
from fedsilo.datasets.tables.schema_file import read_schema
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping

SCHEMA_FILE = "schema.yaml"
_MAKER = 2  # raise it when the same settings make other arrays, so that no old cache is read


class TableDataSet(DataSet):
    """A data set whose sites are tables of one schema."""

    settings = frozenset({"standardise", *SPLIT_KEYS})
    is_table = True
    headline = ("accuracy", "balanced-accuracy", "auc", "calibration-error")

    @abstractmethod
    def schema(self, places: Places) -> TableSchema:
        """Return the schema; its ``sites`` are the silos' names."""

    @abstractmethod
    def text_of(self, site: str, schema: TableSchema, places: Places) -> tuple[str, str]:
        """Return the CSV text of a site, and what to call it in errors."""

    def check(self, settings: CommonSettings) -> None:
        """Refuse folds that are not there."""
        check_folds(settings)

    def silo_names(self, settings: CommonSettings) -> list[str]:
        """Return the schema's sites, in its order."""
        return list(self.schema(find_places(settings.data_dir, settings.cache_dir)).sites)

    def measures(self, silo: Silo, settings: CommonSettings, places: Places) -> list[Measure]:
        """Return the columns: numbers with their edges, categories by their levels."""
        return column_measures(self.schema(places), silo)

    def left_out(self, silo: Silo, settings: CommonSettings, places: Places) -> LeftOutRows:
        """Return the rows that are left out, and in which columns they lack a value."""
        schema = self.schema(places)
        text, where = self.text_of(silo.name, schema, places)
        return left_out_rows(text, schema, where)

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Read, split and cache a site's table."""
        schema = self.schema(places)
        if name not in schema.sites:
            raise no_such_silo(name, list(schema.sites))
        text, where = self.text_of(name, schema, places)
        cut = [as_mapping(settings)[key] for key in SPLIT_KEYS]
        facts = [_MAKER, self.name, name, dataclasses.asdict(schema), cut, text]
        folder = places.cache / f"{self.name}-silos"
        making = _Making(text, schema, name, settings, where)
        return cached_silo(folder, name, facts, len(schema.classes), making.fill)


@dataclasses.dataclass(frozen=True)
class _Making:
    """The making of one site's folder."""

    text: str
    schema: TableSchema
    name: str
    settings: CommonSettings
    where: str

    def fill(self, folder: Path) -> None:
        """Read the table, split it and write its parts."""
        import torch

        table = parse_table(self.text, self.schema, self.where)
        share, seed = self.schema.test_share, self.schema.split_seed
        split = split_rows(table.labels, self.settings, share, seed, self.where)
        if len(split.train) < 2:
            raise DataError(
                f"{self.where}: {len(split.train)} training rows are left "
                f"({table.dropped} rows were dropped for missing values); at least 2 are "
                "needed: add rows, or set the schema's 'policy' to 'impute'"
            )
        parts = {
            part: Split(
                torch.from_numpy(table.rows[getattr(split, part)]),
                torch.from_numpy(table.labels[getattr(split, part)]),
            )
            for part in SPLITS
        }
        save_silo(folder, parts, self._facts(table.dropped))

    def _facts(self, dropped: int) -> dict[str, Any]:
        declared = self.schema.declared()
        return {
            "name": self.name,
            "distribution": self.name,
            "features": self.schema.features(),
            "classes": list(self.schema.classes),
            "dropped": dropped,
            "schema": self.schema.digest(),
            "declared": declared and {"mean": declared.mean.tolist(), "std": declared.std.tolist()},
        }


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
