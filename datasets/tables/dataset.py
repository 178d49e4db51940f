"""Silos that are tables: each hospital's own CSV, read by a shared schema, split and cached."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch

from datasets.digits.pools import Places, find_places
from datasets.io.atomic_files import build_folder
from datasets.silo.row_splits import SPLIT_KEYS, check_folds, split_rows
from datasets.silo.silos import DataSet, Silo, Split, no_such_silo, open_silo, save_silo
from datasets.tables.parsing import Table, TableSchema, parse_table, read_text
from models.contract.errors import DataError
from models.contract.settings import CommonSettings
from models.contract.settings_schema import as_mapping

SCHEMA_FILE = "schema.yaml"
_MAKER = 2  # raise it when the same settings make other arrays, so that no old cache is read


class TableDataSet(DataSet):
    """A data set whose sites are tables of one schema."""

    settings = frozenset({"standardise", *SPLIT_KEYS})
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

    def load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        """Read, split and cache a site's table."""
        schema = self.schema(places)
        if name not in schema.sites:
            raise no_such_silo(name, list(schema.sites))
        text, where = self.text_of(name, schema, places)
        cut = [as_mapping(settings)[key] for key in SPLIT_KEYS]
        facts = [_MAKER, self.name, name, dataclasses.asdict(schema), cut, text]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        target = places.cache / f"{self.name}-silos" / f"{name}-{key}"
        if not target.is_dir():
            table = parse_table(text, schema, where)
            build_folder(target, _Making(table, schema, name, settings, where).fill)
        return open_silo(target, len(schema.classes))


@dataclasses.dataclass(frozen=True)
class _Making:
    """The making of one site's folder."""

    table: Table
    schema: TableSchema
    name: str
    settings: CommonSettings
    where: str

    def fill(self, folder: Path) -> None:
        """Split the table and write its parts."""
        share, seed = self.schema.test_share, self.schema.split_seed
        split = split_rows(self.table.labels, self.settings, share, seed, self.where)
        if len(split.train) < 2:
            raise DataError(
                f"{self.where}: {len(split.train)} training rows are left "
                f"({self.table.dropped} rows were dropped for missing values); at least 2 are "
                "needed: add rows, or set the schema's 'policy' to 'impute'"
            )
        parts = {
            part: Split(
                torch.from_numpy(self.table.rows[getattr(split, part)]),
                torch.from_numpy(self.table.labels[getattr(split, part)]),
            )
            for part in ("train", "val", "test")
        }
        save_silo(folder, parts, self._facts())

    def _facts(self) -> dict[str, Any]:
        declared = self.schema.declared()
        return {
            "name": self.name,
            "distribution": self.name,
            "features": self.schema.features(),
            "classes": list(self.schema.classes),
            "dropped": self.table.dropped,
            "schema": self.schema.digest(),
            "declared": declared and {"mean": declared.mean.tolist(), "std": declared.std.tolist()},
        }


class OwnTables(TableDataSet):
    """``table``: the user's own CSV files and ``schema.yaml``, in the data directory."""

    name = "table"

    def schema(self, places: Places) -> TableSchema:
        """Read ``schema.yaml``."""
        from datasets.tables.schema_file import read_schema  # pydantic, only where it is used

        return read_schema(self._folder(places) / SCHEMA_FILE)

    def text_of(self, site: str, schema: TableSchema, places: Places) -> tuple[str, str]:
        """Read the site's CSV."""
        path = self._folder(places) / schema.sites[site]
        return read_text(path), str(path)

    def _folder(self, places: Places) -> Path:
        if places.data is None:
            raise DataError(
                f"data set '{self.name}' needs a folder with {SCHEMA_FILE} and the sites' CSV "
                "files: set 'data-dir' or $FEDSILO_DATA"
            )
        return places.data


TABLE = OwnTables()
