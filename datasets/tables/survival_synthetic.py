"""The data set ``survival-synthetic``: made-up cancer patients of four hospitals.

Times to death are exponential. Age, stage, nodes and treatment change the hazard in the same way
everywhere, and each hospital has its own baseline hazard. Follow-up ends at a uniform time. All
times are whole months, so some are equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from fedsilo.core.files.locations import Places
from fedsilo.core.files.text_files import csv_lines
from fedsilo.core.seeding import derive_seed
from fedsilo.core.tasks import SURVIVAL
from fedsilo.datasets.tables.schema import TableSchema, read_schema
from fedsilo.datasets.tables.table_data_set import TableDataSet
from fedsilo.datasets.tables.table_files import Lines


@dataclass(frozen=True)
class _Population:
    """A made-up hospital.

    Attributes:
        patients: number of patients.
        age: mean age in years.
        hazard: deaths per month of a patient of 60 years in stage 1 without nodes and treatment.
        longest: the longest follow-up in months.
    """

    patients: int
    age: float
    hazard: float
    longest: float


_POPULATIONS: Mapping[str, _Population] = {
    "harbour": _Population(220, 61.0, 0.010, 90.0),
    "hill": _Population(160, 66.0, 0.014, 60.0),
    "lake": _Population(120, 58.0, 0.008, 75.0),
    "valley": _Population(90, 69.0, 0.020, 48.0),
}


@cache
def _schema() -> TableSchema:
    return read_schema(Path(__file__).with_name("survival_synthetic.yaml"))


class SyntheticSurvival(TableDataSet):
    """Made-up tables with the columns of ``survival_synthetic.yaml``."""

    name = "survival-synthetic"
    origin = "made-up"
    tasks = (SURVIVAL,)
    headline = ("c-index", "brier", "loss")

    def schema(self, places: Places) -> TableSchema:
        """Return the schema of all four hospitals, whatever ``places`` is."""
        return _schema()

    def lines_of(self, site: str, schema: TableSchema, places: Places) -> tuple[Lines, str]:
        """Make the site's table, and return its lines with a name for errors."""
        where = f"survival-synthetic, {site}"
        return csv_lines(made_up_text(site), where), where


@cache
def made_up_text(site: str) -> str:
    """Draw the patients of a made-up hospital, and return their table as CSV text.

    The header is age, stage, nodes, treated, months, died. 'months' is the time to death or to the
    end of follow-up, whichever is earlier, rounded up to whole months. 'died' is 1 if death is
    earlier, and otherwise 0. The text is the same in every run, and is cached in this process.
    ``site`` is a key of ``_POPULATIONS``.
    """
    population = _POPULATIONS[site]
    rng = np.random.default_rng(derive_seed(0, "survival-synthetic", site))
    count = population.patients
    age = np.clip(rng.normal(population.age, 10.0, count), 30, 95).round()
    stage = rng.choice(3, count, p=(0.45, 0.35, 0.2)) + 1
    nodes = rng.poisson(1.5 * (stage - 1) + 0.3)
    treated = rng.integers(0, 2, count)
    risk = 0.03 * (age - 60) + 0.5 * (stage - 1) + 0.1 * nodes - 0.6 * treated
    # A constant hazard gives exponential times with the mean 1 / hazard. The factor exp(risk) is
    # the same at all times, as Cox's model assumes
    death = rng.exponential(1 / (population.hazard * np.exp(risk)))
    end = rng.uniform(6.0, population.longest, count)
    months = np.ceil(np.minimum(death, end)).astype(int)
    columns = (age.astype(int), stage, nodes, treated, months, (death <= end).astype(int))
    lines = ["age,stage,nodes,treated,months,died"]
    for row in zip(*columns, strict=True):
        lines.append(",".join(map(str, row)))
    return "\n".join(lines) + "\n"


SURVIVAL_SYNTHETIC = SyntheticSurvival()
