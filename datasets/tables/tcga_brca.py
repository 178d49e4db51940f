"""Fed-TCGA-BRCA: survival of breast cancer patients in six regions, divided as in FLamby.

It has 1,088 patients and 39 features of clinical data from The Cancer Genome Atlas: FLamby (du
Terrail et al., NeurIPS 35, 2022, pages 5315 to 5334), whose files and split it uses. The label is
the time to death in days, of patients of whom most are censored.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.files.text_files import csv_lines
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.tasks import SURVIVAL
from fedsilo.datasets.downloads.public_files import public_data
from fedsilo.datasets.silo.row_splits import RowSplit, cut_fold
from fedsilo.datasets.silo.silos import strata_of
from fedsilo.datasets.tables.parsing import ParsedTable
from fedsilo.datasets.tables.schema import TableSchema, read_schema
from fedsilo.datasets.tables.table_data_set import TableDataSet
from fedsilo.datasets.tables.table_files import Lines

_PATIENTS, _FOLDS = "brca.csv", "dataset_creation_scripts/train_test_split.csv"
# Training patients of each region, which come first in the lines of a site
_TRAINING = {
    "northeast": 248,
    "south": 156,
    "west": 164,
    "midwest": 129,
    "europe": 129,
    "canada": 40,
}


@cache
def _schema() -> TableSchema:
    """Read the schema of FLamby's file, once per process."""
    return read_schema(Path(__file__).with_name("tcga_brca.yaml"))


class TcgaBrca(TableDataSet):
    """FLamby's two files; each site reads its own region's patients."""

    name = "tcga-brca"
    tasks = (SURVIVAL,)
    headline = ("c-index", "brier", "loss")

    def schema(self, places: Places) -> TableSchema:
        """Return the schema of FLamby's file, whatever ``places`` is."""
        return _schema()

    def lines_of(self, site: str, schema: TableSchema, places: Places) -> tuple[Lines, str]:
        """Select a region's patients from the table of FLamby, a benchmark for federated learning.

        FLamby divides the patients into regions, and each region into a training fold and a test
        fold. Patients of other regions are left out.

        Returns:
            The table's header, the region's training patients, and then its test patients, each in
            the table's order. The second value, 'brca.csv, SITE', is the name for errors.

        Raises:
            DataError: a file is missing, or its MD5 is not the published one.
        """
        patients = self._read(_PATIENTS, places)
        folds = dict(cells[::2] for _, cells in self._read(_FOLDS, places)[1:])
        number = list(schema.sites).index(site)
        chosen = [patients[0]]
        for fold in (f"train_{number}", f"test_{number}"):
            chosen += [line for line in patients[1:] if folds.get(line[1][0]) == fold]
        return chosen, f"{_PATIENTS}, {site}"

    def _read(self, name: str, places: Places) -> Lines:
        """Read the table of patients or the list of folds, and return its lines.

        Args:
            name: the file's name, ``_PATIENTS`` or ``_FOLDS``.
            places: names the data directory.

        Raises:
            DataError: the file is missing, or its MD5 is not the published one.
        """
        published = public_data()[self.name]
        path = published.find(places, [name]) / name
        content = path.read_bytes()
        expected: Mapping[str, str] = {file.name: file.md5 for file in published.files}
        checksum = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if checksum != expected[name]:
            raise DataError(
                f"{path} must have MD5 {expected[name]}, but has {checksum}, because it was "
                f"altered or truncated: run 'fedsilo fetch {self.name} --data-dir DIR'"
            )
        return csv_lines(content.decode(), str(path))

    def _split(
        self, table: ParsedTable, schema: TableSchema, settings: CommonSettings, where: str
    ) -> RowSplit:
        """Split a region's rows into training, validation and test rows.

        - If 'split.test-folds' is 0, the test rows are the test patients of FLamby, a benchmark.
          They come last in ``table``, after FLamby's training patients. If 'split.val-folds' is
          above 0, a validation fold is cut from the training patients.
        - Otherwise all patients are divided into test folds, and FLamby's split is ignored.

        If 'split.use-test' is false, the test rows are dropped.

        Raises:
            DataError: there are too few rows for the folds.
        """
        if settings.test_folds:
            return super()._split(table, schema, settings, where)
        rows = np.arange(len(table.labels))
        count = _TRAINING[where.rpartition(", ")[2]]
        strata = strata_of(table.labels, schema.label.task)
        train, val = cut_fold("val", rows[:count], strata, settings, where, None)
        test = rows[count:]
        if not settings.use_test:
            test = test[:0]
        return RowSplit(train, val, test)


TCGA_BRCA = TcgaBrca()
