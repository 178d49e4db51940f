"""A regression at a hospital: sums of gradients and Hessians over enough of its patients.

The patients must meet DataSHIELD's rules on counts (``glm_patients``). One rule is fedsilo's own:
at the coefficients that the server sends, the sums must rest on at least 'privacy.sums-min-count'
patients in effect. Without it a server could send coefficients at which only one patient has any
weight.
"""

import math

import numpy as np
import torch

from fedsilo.client_app.masked_part import MaskedPart
from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod
from fedsilo.client_app.methods.glm_path import follow_path
from fedsilo.client_app.methods.glm_patients import read_patients
from fedsilo.client_app.privacy.proven_sums import ProvenSum
from fedsilo.client_app.session import SiteSession
from fedsilo.core.errors import RefusedError, SiteError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.datasets.silo.silos import log_once
from fedsilo.models.maths.glm import (
    Floats,
    Outcomes,
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
    CONSTANT,
    DEVIATIONS,
    ESTIMATES,
    OWN_FIT,
    SUMS,
    UNCLIPPED,
    USABLE,
    VARIANCES,
    GLMSettings,
    ScaleNotes,
    part_norm,
)
from fedsilo.models.privacy.fixed_point import split_numbers
from fedsilo.models.privacy.summed_metrics import TRAIN_LOSS

# A file in a run's folder that marks a refusal, because sums were over too few patients
_CONCENTRATED = "concentrated"


class GLMSite(SiteMethod):
    """Sums over all of the site's patients: those of the training, validation and test data."""

    settings: GLMSettings
    phases = ("train", OWN_FIT)

    def admit(self, session: SiteSession) -> None:
        """Check columns, outcomes and numbers of patients at a site whose data are open.

        A hospital that has only declared its data passes, and is checked when it uses them.

        Raises:
            SettingError: a chosen column is missing or named twice.
            SiteError: an outcome or a time cannot be used.
            RefusedError: there are too few patients or events.
        """
        if session.stand_in is None:
            read_patients(session, self.settings)

    def follow(self, part: MaskedPart, sites: int, before: ProvenSum | None) -> None:
        """Check that the message asks for the next sums of the fit, at trust 'sums'.

        The hospital computes the next coefficients itself from ``before``, the last round's sum,
        which is None in round 1. ``sites`` is the number of hospitals.

        Raises:
            RefusedError: the message asks for anything else, or the fit has ended.
            CheckpointError: the fit's record is unusable.
        """
        follow_path(part, self.settings, sites, before)

    def train(self, lab: Lab) -> Outgoing:
        """Send sums over this site's patients, from which the server fits one regression.

        They are the moments of outcome and columns, or log-likelihood, gradient and Hessian at
        received coefficients. They leave divided by the message's ``scale`` and the site's weight.

        Raises:
            RefusedError: the sums would rest on too few patients.
            SiteError: the message or outcomes are unusable.
        """
        notes, arrays = ScaleNotes.from_values(lab.instruction.notes), lab.arrays()
        if not (notes.scale > 0 and notes.grid > 0 and math.isfinite(notes.scale * notes.grid)):
            raise SiteError(f"site {lab.site}: 'scale' and 'grid' must be above 0")
        if notes.moments:
            patients = read_patients(lab.session, self.settings)
            moments = moments_of(patients.in_units(*self._units(lab)))
            vector, loss = moments.vector(), 0.0
        else:
            x, y = self._design(lab)
            beta = arrays[BETA].double().numpy() + arrays[BETA_REST].double().numpy()
            self._refuse_concentrated_run(lab, x, y, beta)
            sums = sums_at(self.settings.family, x, y, beta)
            vector, loss = sums.vector(), -sums.objective / sums.patients
        # The server weighs a reply by training samples, and in a secret sum by at most B of them
        weight = len(lab.session.silo.train)
        if lab.common.secure_aggregation != "none":
            weight = min(weight, lab.session.limits.secure_samples)
        norm = part_norm(lab.common)
        send = {UNCLIPPED: torch.tensor([CONSTANT * norm])}
        parts = split_numbers(vector / (weight * notes.scale), notes.grid)
        for name, part in zip(SUMS, parts, strict=True):
            send[name] = torch.from_numpy(part * norm)
        lab.metrics[TRAIN_LOSS] = loss  # every reply to this phase has one
        return Outgoing(send=send)

    def own_fit(self, lab: Lab) -> Outgoing:
        """Fit the model to this site's patients alone, and send coefficients and variances.

        Both are (k,). ``USABLE`` is [1] for a usable fit. All are zeros if too few patients decide
        the fit, or if they determine no coefficients.

        Raises:
            SiteError: the units, an outcome or a time cannot be used.
            RefusedError: there are too few patients.
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

    def _units(self, lab: Lab) -> tuple[Floats, Floats]:
        """Read the server's centres and deviations of outcome and columns, (1 + columns,) each.

        In these units a value is its distance from the centre, divided by the deviation. Only a
        linear model may have units for its outcome. Impossible units raise a SiteError.
        """
        arrays = lab.arrays()
        centers = arrays[CENTERS].double().numpy()
        deviations = arrays[DEVIATIONS].double().numpy()
        usable = np.isfinite(deviations).all() and (deviations > 0).all()
        if not usable or not np.isfinite(centers / deviations).all():
            raise SiteError(f"site {lab.site}: '{DEVIATIONS}' must be finite and above 0")
        is_linear = self.settings.family == "linear"
        if not is_linear and (centers[0], deviations[0]) != (0.0, 1.0):
            raise SiteError(
                f"site {lab.site}: the outcome of a {self.settings.family} model has no units, so "
                f"its '{CENTERS}' must be 0 and its '{DEVIATIONS}' 1"
            )
        return centers, deviations

    def _design(self, lab: Lab) -> tuple[Floats, Outcomes]:
        """Return the design matrix (n, k) of this site's patients, and their outcomes.

        The columns are in the server's units, as are a linear model's outcomes. k counts the
        intercept, which Cox's model lacks.
        """
        patients = read_patients(lab.session, self.settings)
        return patients.design(*self._units(lab), self.settings)

    def _refuse_concentrated_run(self, lab: Lab, x: Floats, y: Outcomes, beta: Floats) -> None:
        """Refuse sums that rest on fewer than 'privacy.sums-min-count' patients in effect.

        ``_refuse_concentrated`` computes this effective number. After one refusal this site refuses
        all later sums of the run. ``x`` is the design matrix (n, k), and ``beta`` has the received
        coefficients (k,).
        """
        # The folder is the run's, and runs of new names are counted ('max-runs-per-day')
        # Without the mark, a server could try out coefficients until the number of failed sites
        # changes, and so learn something about single patients
        mark = lab.state_files.folder / _CONCENTRATED
        if mark.exists():
            raise RefusedError(
                f"site {lab.site}: this run has asked for sums over too few patients before, so it "
                "gets no others: begin a run with another 'run.name'"
            )
        try:
            self._refuse_concentrated(lab, x, y, beta)
        except RefusedError:
            write_atomically(mark, "")
            raise

    def _refuse_concentrated(self, lab: Lab, x: Floats, y: Outcomes, beta: Floats) -> None:
        """Refuse sums that rest on fewer than 'privacy.sums-min-count' patients in effect.

        The effective number for values v is (sum |v|)^2 / sum v^2. It is checked for the patients'
        weights in the Hessian and for their residuals. A linear model always passes.
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
