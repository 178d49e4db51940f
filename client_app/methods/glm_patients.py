"""The patients of a hospital as a regression takes them, and the rules that they must meet.

The rules on counts are those of DataSHIELD's ``ds.glm`` (Gaye et al. 2014): enough patients per
coefficient, and enough in each of two categories. In Cox's model there must be enough events per
coefficient, because only events determine it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedsilo.client_app.session import SiteSession
from fedsilo.core.errors import RefusedError, SiteError
from fedsilo.core.one_line import format_count
from fedsilo.datasets.silo.silos import SPLITS, Silo, log_once
from fedsilo.models.maths.cox import FollowUp
from fedsilo.models.maths.glm import Floats, Outcomes, has_intercept
from fedsilo.models.methods.glm import ChosenColumns, GLMSettings, find_columns

# Patients per coefficient, as DataSHIELD's nfilter.glm of 0.33; in Cox's model events
_EACH = 3


@dataclass(frozen=True)
class Patients:
    """A hospital's patients as a regression takes them.

    Attributes:
        columns: the columns that explain, (n, columns) float64 in their own units; NaN is missing.
        outcome: (n,) float64, without missing values; in Cox's model 1 for an event, otherwise 0.
        times: the times to the event or to censoring, (n,) float64; None unless the model is Cox's.
    """

    columns: Floats
    outcome: Floats
    times: Floats | None = None

    def lacking(self) -> npt.NDArray[np.bool_]:
        """Return a Boolean mask (patients, values) that is True where a value is missing.

        The values are in this order: the columns, the outcome and, in Cox's model, the time.
        """
        values = [self.columns, self.outcome]
        if self.times is not None:
            values.append(self.times)
        return np.isnan(np.column_stack(values))

    def in_units(self, centers: Floats, deviations: Floats) -> Floats:
        """Return the outcome and then the columns in the server's units, (n, 1 + columns).

        A value's centre is subtracted, and the difference divided by its deviation. Missing values
        stay NaN.

        Args:
            centers: the centres of outcome and columns, (1 + columns,).
            deviations: their deviations, (1 + columns,).
        """
        return (np.column_stack([self.outcome, self.columns]) - centers) / deviations

    def design(
        self, centers: Floats, deviations: Floats, settings: GLMSettings
    ) -> tuple[Floats, Outcomes]:
        """Return the design matrix (n, k) of the regression, and the outcomes of its n patients.

        The columns are in the server's units. The first column of the matrix is all ones, except in
        Cox's model. A missing value becomes 0 in these units, which is the server's centre. In
        Cox's model the outcomes are times and events in their own units.

        Args:
            centers: the centres of outcome and columns, (1 + columns,).
            deviations: their deviations, (1 + columns,).
            settings: the settings of the regression.
        """
        values = self.in_units(centers, deviations)
        columns = np.nan_to_num(values[:, 1:], nan=0.0)
        if self.times is not None:
            return columns, FollowUp(self.times, self.outcome, settings.ties)
        return np.column_stack([np.ones(len(values)), columns]), values[:, 0]


def read_patients(session: SiteSession, settings: GLMSettings) -> Patients:
    """Read the columns and outcomes of all the site's patients, and check them.

    The patients are those of the training, validation and test data. Patients without an outcome or
    a time are left out. With 'glm.missing' "drop", those without a value in a chosen column are
    left out too. The site's log says how many are left out.

    Raises:
        SettingError: the settings name a column that the table lacks, or name one twice.
        SiteError: the outcomes or times do not suit the family of the regression.
        RefusedError: there are too few patients or events (``_count_faults``). Too few patients
            lack the same values, or belong to one category of a two-valued column.
    """
    silo, floor = session.silo, session.settings.sums_min_count
    chosen = find_columns(silo.features, settings)
    rows, labels = _all_rows(silo)
    patients = _take_columns(rows, labels, chosen)
    if (patients.times is not None) != (settings.family == "cox"):
        raise SiteError(
            f"site {silo.name}: the label is the time to an event, which a {settings.family} model "
            "does not explain: set 'glm.family' to 'cox', or name an outcome as 'glm.outcome'"
        )
    lacking = patients.lacking()
    _refuse_few_incomplete(silo.name, lacking, settings.missing, floor)
    needed = lacking
    if settings.missing == "mean":
        needed = lacking[:, patients.columns.shape[1] :]
    patients = _leave_out(silo.name, patients, np.asarray(needed.any(axis=1)))
    fault = _outcome_fault(settings, patients)
    if fault:
        raise SiteError(f"site {silo.name}: {fault}")
    names = [silo.features[place] for place in chosen.columns]
    fault = next(_count_faults(patients, names, settings, floor), "")
    if fault:
        raise RefusedError(
            f"site {silo.name} sends no sums: {fault}; choose other columns, or leave out the site"
        )
    return patients


def _all_rows(silo: Silo) -> tuple[Floats, Floats]:
    """Return the features (n, features) and labels (n, ...) of all splits, float64."""
    parts = [silo.splits()[split] for split in SPLITS]
    rows = torch.cat([part.inputs for part in parts]).double().numpy()
    labels = torch.cat([part.labels for part in parts]).double().numpy()
    return rows, labels


def _take_columns(rows: Floats, labels: Floats, chosen: ChosenColumns) -> Patients:
    """Select the columns, outcomes and times that a regression uses from all rows of a table.

    NaN marks missing values. The settings may choose an outcome column and a time column:

    - Without an outcome column, the label is the outcome. A label (n, 2) has the time first and the
      event second, and both are used.
    - With an outcome column, the label is ignored.
    - With a time column, it gives the times in any case. If neither this column nor the label gives
      times, ``times`` is None.

    Args:
        rows: the features, (n, features).
        labels: the labels, (n,) or (n, 2).
        chosen: the indices of the chosen features.
    """
    outcome, times = labels, None
    if labels.ndim == 2:
        times, outcome = labels.T
    if chosen.outcome is not None:
        outcome, times = rows[:, chosen.outcome], None
    if chosen.time is not None:
        times = rows[:, chosen.time]
    return Patients(rows[:, chosen.columns], outcome, times)


def _leave_out(site: str, patients: Patients, is_left_out: npt.NDArray[np.bool_]) -> Patients:
    """Return all patients except those for whom ``is_left_out`` (n,) is True.

    If any are left out, a line in the site's log says how many. It begins with the name ``site``
    and gives missing values as the reason.
    """
    if not is_left_out.any():
        return patients
    left_out = format_count(int(is_left_out.sum()), "patient")
    log_once(f"site {site}: {left_out} with missing values left out of the regression")
    times = patients.times
    if times is not None:
        times = times[~is_left_out]
    return Patients(patients.columns[~is_left_out], patients.outcome[~is_left_out], times)


def _outcome_fault(settings: GLMSettings, patients: Patients) -> str:
    """Describe why the outcomes or times do not suit the regression's family, and a remedy.

    - A logistic model needs outcomes of 0 and 1.
    - A Poisson model needs whole numbers of at least 0.
    - Cox's model needs events of 0 or 1, and times that are not negative.

    A linear model takes all values. If all values suit, the result is an empty string.
    """
    family, outcome, times = settings.family, patients.outcome, patients.times
    remedy = "correct 'glm.outcome' or its values"
    if family == "logistic" and not np.isin(outcome, (0, 1)).all():
        return f"a logistic model needs outcomes of 0 and 1: {remedy}"
    if family == "poisson" and (outcome < 0).any():
        return f"a count cannot be negative: {remedy}"
    if family == "poisson" and (outcome != np.floor(outcome)).any():
        return f"a count must be a whole number: {remedy}"
    if times is None:
        return ""
    if not np.isin(outcome, (0, 1)).all():
        return f"an event must be 1, and 0 if the patient is censored: {remedy}"
    if (times < 0).any():
        return (
            f"a time to an event cannot be negative: correct the values of '{settings.time}', or "
            "give the column a 'range' in the schema, which leaves such rows out"
        )
    return ""


def _refuse_few_incomplete(
    site: str, lacking: npt.NDArray[np.bool_], missing: str, floor: int
) -> None:
    """Check that no combination of missing values occurs in only a few patients.

    Each combination needs at least ``floor`` patients. Patients without a missing value are not
    counted. Otherwise a server could find single patients: it could compare two regressions, of
    which only one uses a column that these patients lack. It could also change the value that
    replaces missing ones, which changes only their part of the sums.

    Args:
        site: the site's name, for the error.
        lacking: whether each of a patient's values is missing, (n, values).
        missing: the setting 'glm.missing', for the error.
        floor: 'privacy.sums-min-count', the fewest patients with one combination.

    Raises:
        RefusedError: a combination occurs in at least one patient, but in fewer than ``floor``.
    """
    patterns = Counter(map(bytes, lacking.astype(np.uint8)))
    patterns.pop(bytes(lacking.shape[1]), None)
    if patterns and min(patterns.values()) < floor:
        raise RefusedError(
            f"site {site}: fewer than {floor} patients ('privacy.sums-min-count') lack the same "
            f"values, so sums with 'glm.missing' set to '{missing}' could reveal them: complete "
            "these values or leave the rows out of the table, choose other columns, or leave out "
            "the site"
        )


def _count_faults(
    patients: Patients, names: list[str], settings: GLMSettings, floor: int
) -> Iterator[str]:
    """Yield a sentence for each number of patients or events that is too small for the regression.

    - There must be at least ``floor`` patients and at least three per coefficient. In Cox's model
      the same holds for events.
    - In each column with exactly two values, both values must have at least ``floor`` patients. In
      a logistic model this also holds for the outcome.

    Args:
        patients: the patients in the regression.
        names: the names of the explanatory columns, with one coefficient each. An intercept is one
            more coefficient.
        settings: the settings of the regression.
        floor: 'privacy.sums-min-count'.
    """
    needed = max(floor, _EACH * (len(names) + int(has_intercept(settings.family))))
    count = len(patients.outcome)
    if count < needed:
        yield (
            f"it has {count} patients, but at least {needed} are needed ('privacy.sums-min-count' "
            f"is {floor}, and {_EACH} patients are needed per coefficient)"
        )
    categories = dict(zip(names, patients.columns.T, strict=True))
    if settings.family == "cox":
        yield from _event_faults(patients.outcome, needed)
    elif settings.family == "logistic":
        categories["outcome"] = patients.outcome
    yield from _category_faults(categories, floor)


def _event_faults(events: Floats, needed: int) -> Iterator[str]:
    """Yield the reasons why a hospital has too few events for Cox's model, a sentence for each.

    Without any event, the first sentence says that the patients tell nothing about the hazard. If
    there are fewer than ``needed`` events, a sentence says so. With enough events nothing is
    yielded.

    Args:
        events: 1 for each patient with an event, otherwise 0, (n,).
        needed: the minimum number of events.
    """
    if not events.any():
        yield "it has no event, so its patients say nothing about the hazard"
    if events.sum() < needed:
        yield (
            f"fewer than {needed} of its patients have an event, but at least that many are needed "
            f"('privacy.sums-min-count', and {_EACH} events per coefficient)"
        )


def _category_faults(categories: Mapping[str, Floats], floor: int) -> Iterator[str]:
    """Yield a sentence for each two-valued column in which one value has too few patients.

    Columns with any other number of values are not checked. Missing values are not counted.

    Args:
        categories: the values of each column (n,), by the column's name.
        floor: the fewest patients for each of the two values.
    """
    for name, values in categories.items():
        levels, counts = np.unique(values[~np.isnan(values)], return_counts=True)
        if len(levels) == 2 and counts.min() < floor:
            yield (
                f"one of the two categories of '{name}' has fewer than {floor} patients "
                "('privacy.sums-min-count')"
            )
