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

        ``read_patients`` makes the checks. A hospital that has only declared its data passes now,
        and its data are checked when they are used.

        Raises:
            SettingError: the settings name a column that the table lacks, or name one twice.
            SiteError: an outcome or a time cannot be used.
            RefusedError: the site has fewer patients or events than the minimum. The same values
                are missing in only a few patients, or a category of a two-valued column has only a
                few.
        """
        if session.stand_in is None:
            read_patients(session, self.settings)

    def follow(self, part: MaskedPart, sites: int, before: ProvenSum | None) -> None:
        """Check that the message asks for the next sums of the fit, at trust 'sums'.

        From the sum of the round before, the hospital computes the coefficients at which the server
        must ask for the next sums (``follow_path``). The message must ask for exactly these.

        Args:
            part: the message.
            sites: the number of hospitals in the sum that the message asks for.
            before: the sum of the round before; None in round 1.

        Raises:
            RefusedError: the message asks for anything else, or asks on although the fit has
                converged or failed.
            SettingError: the settings name a column that the table lacks, or name one twice.
            SiteError: the settings that come with the message cannot be read.
            CheckpointError: the hospital's record of the fit is damaged, or cannot be written.
        """
        follow_path(part, self.settings, sites, before)

    def train(self, lab: Lab) -> Outgoing:
        """Send sums over this site's patients, from which the server fits one regression.

        - If the message asks for moments, they are the number, sum and sum of squares of the known
          values in the outcome and in each column. The reported loss is 0.
        - Otherwise they are the log-likelihood, gradient, Hessian and two counts at the received
          coefficients (``GLMSums``). The reported loss is minus the log-likelihood per patient.

        The sums are divided by the message's ``scale``, so that they fit a secret sum, and by the
        site's weight, by which the server multiplies them again. The weight is the number of
        training samples, in a secret sum at most 'secure-samples'. The sums leave as three arrays
        (``split_numbers``). A constant in a fourth array shows the server whether numbers were
        clipped.

        Raises:
            RefusedError: the sums would rest on too few patients, now or earlier in this run, or
                the patients break a rule on counts (``read_patients``).
            SiteError: the message has an impossible scale, or the units, an outcome or a time
                cannot be used.
            SettingError: the settings name a column that the table lacks, or name one twice.
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

        The site sends the arrays ``ESTIMATES`` and ``VARIANCES``, (k,) each, and ``USABLE``, which
        is [1] for a usable fit. All three are zeros if these patients determine no coefficients, or
        if in effect fewer patients than 'privacy.sums-min-count' decide the fit. The reason then
        goes to the site's log.

        Raises:
            SettingError: the settings name a column that the table lacks, or name one twice.
            SiteError: the units in the message, an outcome or a time cannot be used.
            RefusedError: the patients break a rule on counts (``read_patients``).
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
        """Read the server's units of outcome and columns: centres and deviations, (1 + columns,).

        In these units a value is the value minus its centre, divided by its deviation. The first
        entry belongs to the outcome. Only a linear model may have units for its outcome. Any other
        model needs its outcomes unchanged, such as 0 and 1.

        Raises:
            SiteError: a deviation is not finite and above 0, or a centre is not finite. In a model
                that is not linear, the outcome's centre is not 0 or its deviation is not 1.
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

        The columns, and in a linear model the outcomes, are in the server's units (``_units``). k
        counts the intercept, which Cox's model does not have.

        Raises:
            SettingError: the settings name a column that the table lacks, or name one twice.
            SiteError: the units in the message, an outcome or a time cannot be used.
            RefusedError: the patients break a rule on counts (``read_patients``).
        """
        patients = read_patients(lab.session, self.settings)
        return patients.design(*self._units(lab), self.settings)

    def _refuse_concentrated_run(self, lab: Lab, x: Floats, y: Outcomes, beta: Floats) -> None:
        """Check that the sums do not rest on only a few patients, and never did in this run.

        Sums rest on few patients if a few large values outweigh all others. The check is that of
        ``_refuse_concentrated``. If it fails, a mark in the run's folder makes this site refuse all
        later sums of the run. At trust 'sums' the server learns how many sites failed. Without the
        mark, a server could try out coefficients until that number changes, and so learn something
        about single patients.

        Args:
            lab: the lab of the message.
            x: the design matrix (n, k).
            y: the outcomes of the n patients.
            beta: the received coefficients (k,).

        Raises:
            RefusedError: the sums rest on too few patients, now or earlier in this run.
        """
        # The folder is the run's, and runs of new names are counted ('max-runs-per-day')
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
        """Check that the sums at these coefficients do not rest on only a few patients.

        Each patient has one weight in the Hessian and one residual in the gradient. The effective
        number of patients is (sum |v|)^2 / sum v^2 of the values v, once for the weights and once
        for the residuals. A linear model is not checked, nor any model if 'privacy.sums-min-count'
        is at most 1.

        Args:
            lab: the lab of the message.
            x: the design matrix (n, k).
            y: the outcomes of the n patients.
            beta: the coefficients (k,).

        Raises:
            RefusedError: an effective number is below 'privacy.sums-min-count'.
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
