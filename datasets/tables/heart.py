"""Fed-Heart-Disease: four hospitals of the UCI heart disease data, divided as in FLamby.

It has 740 patients and 13 features, and predicts label 0 against 1 to 4: FLamby (du Terrail et al.,
NeurIPS 35, 2022, pages 5315 to 5334), which PICSR (Enouen et al. 2024) follows. A cholesterol of 0,
as in all Swiss patients, means that it was not measured: ``heart-imputed`` and ``heart-indicator``
treat it that way. The synthetic counterpart has sites with the same sizes, features and label
rates, but no real patient.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.files.text_files import csv_lines
from fedsilo.core.seeding import derive_seed
from fedsilo.core.tasks import CLASSIFICATION, REGRESSION
from fedsilo.datasets.downloads.public_files import PublicFiles, public_data
from fedsilo.datasets.tables.columns import Column
from fedsilo.datasets.tables.labels import Label
from fedsilo.datasets.tables.schema import TableSchema, read_schema
from fedsilo.datasets.tables.table_data_set import TableDataSet
from fedsilo.datasets.tables.table_files import Lines

_PULSE = "thalach"  # the largest pulse in an exercise test, in beats per minute


@cache
def _schema() -> TableSchema:
    """Read the schema of the UCI files, once per process."""
    return read_schema(Path(__file__).with_name("heart.yaml"))


@dataclass(frozen=True, eq=False)
class Heart(TableDataSet):
    """The four UCI files; a site needs only its own.

    Attributes:
        name: the data set's name.
        cholesterol: keys of the schema to override in the column 'chol'.
    """

    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION,)
    name: str = "heart"
    cholesterol: Mapping[str, Any] = field(default_factory=dict)

    @property
    def licence(self) -> PublicFiles:
        """Licence, source and files of the UCI data, under every name of this data set."""
        return public_data()["heart"]

    def schema(self, places: Places) -> TableSchema:
        """Return the schema of the UCI files, changed for this data set's treatment of cholesterol.

        In the column 'chol', ``self.cholesterol`` sets keys such as 'unmeasured'. ``places`` is not
        used.
        """
        columns = []
        for column in _schema().columns:
            if column.name == "chol":
                column = column.model_copy(update=self.cholesterol)
            columns.append(column)
        return _schema().model_copy(update={"columns": columns})

    def lines_of(self, site: str, schema: TableSchema, places: Places) -> tuple[Lines, str]:
        """Read the UCI file of a site from the data directory in ``places``, and check its MD5.

        ``schema.sites`` maps each site to the name of its file.

        Returns:
            All lines of the file that are not empty, as (line number, cells), and the file's path
            as text, for errors.

        Raises:
            DataError: no data directory is named, the file is missing, or its MD5 is not the
                published one.
        """
        name, published = schema.sites[site], self.licence
        path = published.find(places, [name]) / name
        content = path.read_bytes()
        checksum = hashlib.md5(content, usedforsecurity=False).hexdigest()
        published_checksums = {file.name: file.md5 for file in published.files}
        if checksum != published_checksums[name]:
            raise DataError(
                f"{path} must have MD5 {published_checksums[name]}, but has {checksum}, because it "
                "was altered or truncated: run 'fedsilo fetch heart --data-dir DIR'"
            )
        return csv_lines(content.decode(), str(path)), str(path)


@dataclass(frozen=True)
class _Population:
    """A synthetic hospital.

    Attributes:
        patients: number of patients.
        disease: share of patients with the disease.
        age: mean age in years.
        chol: mean cholesterol in mg/dl; 0 if it is not measured.
        male: share of men.
    """

    patients: int
    disease: float
    age: float
    chol: float
    male: float


# Sizes and label rates come from the real sites without rows that lack a value.
_POPULATIONS: Mapping[str, _Population] = {
    "cleveland": _Population(303, 139 / 303, 54, 246, 0.68),
    "hungary": _Population(261, 98 / 261, 48, 250, 0.72),
    "switzerland": _Population(46, 45 / 46, 55, 0, 0.9),
    "va": _Population(130, 101 / 130, 59, 180, 0.97),
}


class SyntheticHeart(TableDataSet):
    """The data set ``heart-synthetic``: synthetic patients in the format of the UCI files."""

    name = "heart-synthetic"
    origin = "made-up"
    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION,)

    def schema(self, places: Places) -> TableSchema:
        """Return the schema of the UCI files."""
        return _schema()

    def lines_of(self, site: str, schema: TableSchema, places: Places) -> tuple[Lines, str]:
        """Generate the site's table, and return its lines with a name for errors."""
        where = f"heart-synthetic, {site}"
        return csv_lines(synthetic_text(site), where), where


@cache
def synthetic_text(site: str) -> str:
    """Draw the patients of a synthetic hospital, and return them as CSV text without a header.

    Each patient is a line in the format of UCI's real heart data. The text is the same in every
    run. ``_POPULATIONS`` gives the hospital's number of patients, share of the disease, and mean
    values. Patients with the disease differ most in age, pulse, ST depression, angina and type of
    chest pain. ``site`` is a key of ``_POPULATIONS``.
    """
    population = _POPULATIONS[site]
    rng = np.random.default_rng(derive_seed(0, "heart-synthetic", site))
    sick = round(population.patients * population.disease)
    disease = rng.permutation(np.arange(population.patients) < sick)
    return "".join(_patient(rng, population, bool(ill)) for ill in disease)


def _patient(rng: np.random.Generator, population: _Population, ill: bool) -> str:
    """Draw a patient as one CSV line in the format of UCI's heart data: 13 features and the label.

    Slope, vessels and thallium are missing ('?'). The cholesterol is 0 if the hospital does not
    measure it. The label is the stage of the disease: random from 1 to 4 if the patient is ill, and
    0 if not.

    Args:
        rng: draws the values.
        population: the hospital's mean values.
        ill: whether the patient has the disease.
    """
    shift = 1 if ill else -1
    pains = (0.05, 0.1, 0.15, 0.7) if ill else (0.1, 0.35, 0.35, 0.2)
    # Age, sex, chest pain, blood pressure, cholesterol, sugar, ECG, pulse, angina: the files' order
    values = [
        np.clip(rng.normal(population.age + 2 * shift, 8), 28, 77),
        rng.random() < population.male,
        rng.choice(4, p=pains) + 1,
        np.clip(rng.normal(131 + shift, 17), 90, 200),
        population.chol and np.clip(rng.normal(population.chol + 5 * shift, 50), 100, 600),
        rng.random() < 0.15 + 0.05 * ill,
        rng.choice(3, p=(0.55, 0.15, 0.3)),
        np.clip(rng.normal(140 - 10 * shift, 22), 70, 200),
        rng.random() < 0.35 + 0.2 * shift,
    ]
    depression = max(0.0, rng.normal(0.8 + 0.5 * shift, 0.8))
    stage = rng.integers(1, 5) if ill else 0
    numbers = ",".join(str(round(float(value))) for value in values)
    return f"{numbers},{depression:.1f},?,?,?,{stage}\n"


class PulseOfSyntheticHeart(SyntheticHeart):
    """The data set ``heart-synthetic-pulse``: the same patients, with the pulse as outcome."""

    name = "heart-synthetic-pulse"
    tasks = (REGRESSION,)

    def schema(self, places: Places) -> TableSchema:
        """Return the schema with 'thalach' as the outcome; the disease is not a feature."""
        return _pulse_schema()

    def lines_of(self, site: str, schema: TableSchema, places: Places) -> tuple[Lines, str]:
        """Return the lines of data set 'heart-synthetic', with the pulse moved to the end as label.

        The second value is the name of the table, for errors.
        """
        lines, where = super().lines_of(site, schema, places)
        place = [column.name for column in _schema().columns].index(_PULSE)
        moved = []
        for number, cells in lines:
            moved.append((number, [*cells[:place], *cells[place + 1 :], cells[place]]))
        return moved, where


@cache
def _pulse_schema() -> TableSchema:
    """Build the schema for predicting a patient's largest pulse in an exercise test by regression.

    In the heart data's schema, the pulse moves from the features to the label. The usual label,
    heart disease, becomes an ignored column.
    """
    disease = Column(name=_schema().label.column, kind="ignored")
    columns = [column for column in _schema().columns if column.name != _PULSE]
    label = Label(column=_PULSE, task="regression", unit="beats per minute")
    return _schema().model_copy(update={"columns": [*columns, disease], "label": label})


HEART, HEART_SYNTHETIC = Heart(), SyntheticHeart()
HEART_SYNTHETIC_PULSE = PulseOfSyntheticHeart()
# A cholesterol of 0 is imputed like a missing value; with an indicator a feature says where
HEART_IMPUTED = Heart("heart-imputed", {"unmeasured": ["0"]})
HEART_INDICATOR = Heart("heart-indicator", {"unmeasured": ["0"], "indicator": True})
