"""A regression at a hospital: sums of gradients and Hessians over its patients, if enough share.

The rules for what a hospital sums follow DataSHIELD's ``ds.glm`` (Gaye et al. 2014): patients per
coefficient, and patients in each of two categories. One rule is fedsilo's own: at the coefficients
that the server sends, the sums must rest on at least 'privacy.sums-min-count' patients in effect.
Without it a server could send coefficients at which only one patient has any weight.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod
from fedsilo.client_app.session import SiteSession
from fedsilo.core.errors import RefusedError, SiteError
from fedsilo.core.one_line import format_count
from fedsilo.datasets.silo.silos import SPLITS, Silo, log_once
from fedsilo.models.maths.glm import (
    Family,
    Floats,
    UndeterminedError,
    effective_patients,
    fit_alone,
    moments_of,
    sums_at,
    weights_and_residuals,
)
from fedsilo.models.methods.glm import (
    BETA,
    BETA_REST,
    CENTERS,
    DEVIATIONS,
    ESTIMATES,
    OWN_FIT,
    SUMS,
    USABLE,
    VARIANCES,
    GLMSettings,
    ScaleNotes,
    find_columns,
)
from fedsilo.models.privacy.fixed_point import split_numbers
from fedsilo.models.privacy.summed_metrics import TRAIN_LOSS

_PATIENTS_EACH = 3  # patients per coefficient, as DataSHIELD's nfilter.glm of 0.33


@dataclass(frozen=True)
class Patients:
    """A hospital's patients as a regression takes them.

    Attributes:
        columns: the columns that explain, (n, columns) float64 in their own units; NaN is missing.
        outcome: (n,) float64, without missing values.
    """

    columns: Floats
    outcome: Floats

    def in_units(self, centers: Floats, deviations: Floats) -> Floats:
        """Return outcome and columns in the server's units, (n, k); the outcome comes first.

        Missing values stay NaN.

        Args:
            centers: subtracted from outcome and columns, (k,).
            deviations: then divide them, (k,).
        """
        return (np.column_stack([self.outcome, self.columns]) - centers) / deviations


class GLMSite(SiteMethod):
    """Sums over all of the site's patients: those of the training, validation and test data."""

    settings: GLMSettings
    phases = ("train", OWN_FIT)

    def admit(self, session: SiteSession) -> None:
        """Check columns, outcomes and floors, unless the hospital has only declared its data yet.

        Raises:
            SiteError: a column or an outcome cannot be used, or too few patients share a value.
        """
        if session.stand_in is None:
            self._read_patients(session)

    def train(self, lab: Lab) -> Outgoing:
        """Send sums over this site's patients: of each column, or at the received coefficients.

        Raises:
            RefusedError: the sums would rest on too few patients.
            SiteError: the message has an impossible scale.
        """
        notes, arrays = ScaleNotes.from_values(lab.instruction.notes), lab.arrays()
        if not (notes.scale > 0 and notes.grid > 0 and math.isfinite(notes.scale * notes.grid)):
            raise SiteError(f"site {lab.site}: 'scale' and 'grid' must be above 0")
        if notes.moments:
            moments = moments_of(self._values(lab))
            vector, loss = moments.vector(), 0.0
        else:
            x, y = self._design(lab)
            beta = arrays[BETA].double().numpy() + arrays[BETA_REST].double().numpy()
            self._refuse_concentrated(lab, x, y, beta)
            sums = sums_at(self.settings.family, x, y, beta)
            vector, loss = sums.vector(), -sums.objective / sums.patients
        # The server weighs a reply by training samples, and in a secret sum by at most B of them
        weight = len(lab.session.silo.train)
        if lab.common.secure_aggregation != "none":
            weight = min(weight, lab.session.limits.secure_samples)
        parts = split_numbers(vector / (weight * notes.scale), notes.grid)
        lab.metrics[TRAIN_LOSS] = loss  # every reply to this phase has one
        return Outgoing(send=dict(zip(SUMS, map(torch.from_numpy, parts), strict=True)))

    def own_fit(self, lab: Lab) -> Outgoing:
        """Send the coefficients of this site's patients alone, and their variances.

        Both are zeros if these patients determine no coefficients.
        """
        x, y = self._design(lab)
        usable = 1.0
        try:
            beta, covariance = fit_alone(self.settings.family, x, y)
            variances = np.diag(covariance)
            self._refuse_concentrated(lab, x, y, beta)
        except (UndeterminedError, np.linalg.LinAlgError, RefusedError) as reason:
            log_once(f"site {lab.site}: no fit of its own: {reason}")
            beta, variances, usable = np.zeros(x.shape[1]), np.zeros(x.shape[1]), 0.0
        send = {
            ESTIMATES: torch.from_numpy(beta),
            VARIANCES: torch.from_numpy(variances.copy()),
            USABLE: torch.tensor([usable]),
        }
        return Outgoing(send=send)

    def _values(self, lab: Lab) -> Floats:
        """Return outcome and columns in the server's units, (n, k); NaN is missing.

        Raises:
            SiteError: the units are impossible.
        """
        arrays = lab.arrays()
        centers = arrays[CENTERS].double().numpy()
        deviations = arrays[DEVIATIONS].double().numpy()
        if not ((deviations > 0).all() and np.isfinite(centers / deviations).all()):
            raise SiteError(f"site {lab.site}: '{DEVIATIONS}' must be above 0")
        return self._read_patients(lab.session).in_units(centers, deviations)

    def _design(self, lab: Lab) -> tuple[Floats, Floats]:
        """Return the design (n, k) with a first column of 1, and the outcomes (n,).

        A missing value becomes 0, the mean of all sites.
        """
        values = self._values(lab)
        columns = np.nan_to_num(values[:, 1:], nan=0.0)
        return np.column_stack([np.ones(len(values)), columns]), values[:, 0]

    def _refuse_concentrated(self, lab: Lab, x: Floats, y: Floats, beta: Floats) -> None:
        """Check that weights and residuals are spread over enough patients.

        A linear model's Hessian is the same at all coefficients, so it needs no check.

        Raises:
            RefusedError: they rest on fewer than 'privacy.sums-min-count' patients in effect.
        """
        floor = lab.common.sums_min_count
        if self.settings.family == "linear" or floor <= 1:
            return
        for values in weights_and_residuals(self.settings.family, x, y, beta):
            effective = effective_patients(values)
            if effective < floor:
                raise RefusedError(
                    f"site {lab.site}: at these coefficients the sums would rest on "
                    f"{effective:.1f} patients in effect, but {floor} are needed "
                    "('privacy.sums-min-count'): a column may separate the outcomes; leave columns "
                    "out, or leave out the site"
                )

    def _read_patients(self, session: SiteSession) -> Patients:
        """Read the columns and outcomes, and check them.

        Raises:
            SiteError: a column or an outcome cannot be used.
            RefusedError: too few patients share a value, or are complete.
        """
        silo, settings, floor = session.silo, self.settings, session.settings.sums_min_count
        chosen = find_columns(silo.features, settings.outcome, settings.columns)
        rows, labels = _all_rows(silo)
        outcome = labels
        if chosen.outcome is not None:
            outcome = rows[:, chosen.outcome]
        columns = rows[:, chosen.columns]
        lacking = np.isnan(outcome)[:, None]
        if settings.missing == "drop":
            lacking = np.column_stack([np.isnan(columns), lacking])
        _refuse_few_incomplete(silo.name, lacking, floor)
        complete = ~lacking.any(axis=1)
        if not complete.all():
            left_out = format_count(int((~complete).sum()), "patient")
            log_once(f"site {silo.name}: {left_out} with missing values left out of the regression")
        patients = Patients(columns[complete], outcome[complete])
        _refuse_outcomes(silo.name, settings.family, patients.outcome)
        names = [silo.features[place] for place in chosen.columns]
        _refuse_few_patients(silo.name, patients, names, settings.family, floor)
        return patients


def _all_rows(silo: Silo) -> tuple[Floats, Floats]:
    """Return the features (n, features) and labels (n,) of all splits, float64."""
    parts = [silo.splits()[split] for split in SPLITS]
    rows = torch.cat([part.inputs for part in parts]).double().numpy()
    labels = torch.cat([part.labels for part in parts]).double().numpy()
    return rows, labels


def _refuse_outcomes(site: str, family: Family, outcome: Floats) -> None:
    """Check that the outcomes suit the family.

    Raises:
        SiteError: an outcome of a logistic model is neither 0 nor 1, or a count is negative or not
            whole.
    """
    fault = ""
    if family == "logistic" and not np.isin(outcome, (0, 1)).all():
        fault = "a logistic model needs outcomes of 0 and 1"
    elif family == "poisson" and (outcome < 0).any():
        fault = "a count cannot be negative"
    elif family == "poisson" and (outcome != np.floor(outcome)).any():
        fault = "a count must be a whole number"
    if fault:
        raise SiteError(f"site {site}: {fault}: correct 'glm.outcome' or its values")


def _refuse_few_incomplete(site: str, lacking: npt.NDArray[np.bool_], floor: int) -> None:
    """Check that patients who are left out cannot be found by leaving out a column less.

    Two regressions that differ in one column differ in the patients who lack only that. So each
    pattern of missing columns must have no patient, or enough.

    Raises:
        RefusedError: some pattern has fewer patients than 'privacy.sums-min-count'.
    """
    patterns = Counter(map(bytes, lacking.astype(np.uint8)))
    patterns.pop(bytes(lacking.shape[1]), None)
    if patterns and min(patterns.values()) < floor:
        raise RefusedError(
            f"site {site}: fewer than {floor} patients ('privacy.sums-min-count') lack the same "
            "values, so another regression could reveal them: set 'glm.missing' to 'mean', choose "
            "other columns, or leave out the site"
        )


def _refuse_few_patients(
    site: str, patients: Patients, names: list[str], family: Family, floor: int
) -> None:
    """Check that enough patients are there, and share each of two categories.

    Raises:
        RefusedError: there are fewer patients than 'privacy.sums-min-count' or than three per
            coefficient, or a category has some patients but fewer than 'privacy.sums-min-count'.
    """
    count, needed = len(patients.outcome), _PATIENTS_EACH * (len(names) + 1)
    fault = ""
    if count < max(floor, needed):
        fault = (
            f"it has {count} patients, but at least {max(floor, needed)} are needed "
            f"('privacy.sums-min-count' is {floor}, and {_PATIENTS_EACH} patients are needed per "
            "coefficient)"
        )
    categories = dict(zip(names, patients.columns.T, strict=True))
    if family == "logistic":
        categories["outcome"] = patients.outcome
    for name, values in categories.items():
        levels, counts = np.unique(values[~np.isnan(values)], return_counts=True)
        if not fault and len(levels) == 2 and counts.min() < floor:
            fault = (
                f"one of the two categories of '{name}' has fewer than {floor} patients "
                "('privacy.sums-min-count')"
            )
    if fault:
        raise RefusedError(
            f"site {site} sends no sums: {fault}; choose other columns, or leave out the site"
        )
