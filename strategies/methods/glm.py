"""A regression at the server: Newton's method on sums over the hospitals.

Messages to sites: ``beta`` (k,) and ``beta-rest`` (k,), float32, which add up to the coefficients
in float64, and zeros for the arrays that return. Notes: ``scale`` and ``grid``. Replies:
``sums/1`` to ``sums/3``, (m,) float32 each (``models.privacy.fixed_point``), and the constant
``sums/unclipped``, (1,), unmasked or masked for a secret sum. At trust 'server' each site then
sends a fit of its own, in the phase ``own-fit``.

The first rounds ask for each column's moments, until its values are in units in which they have
about mean 0 and deviation 1. The document ``fit.json`` has the coefficients in the columns' own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsilo.core.errors import FitError
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.core.tasks import SURVIVAL
from fedsilo.models.maths.glm import (
    Floats,
    GLMSums,
    Moments,
    has_intercept,
    moments_length,
    start_from,
    sums_length,
)
from fedsilo.models.maths.glm_faults import (
    constant_fault,
    endless_fault,
    one_outcome_fault,
    redundant_fault,
)
from fedsilo.models.maths.glm_results import Fitted, Units, results_document
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
    ChosenColumns,
    GLMSettings,
    ScaleNotes,
    find_columns,
    part_norm,
)
from fedsilo.models.privacy.fixed_point import LARGEST_NORM, grid_of, join_sums
from fedsilo.models.privacy.secure_sum import SAMPLES, quantisation
from fedsilo.strategies.loop.ask import weighted_sums
from fedsilo.strategies.loop.method import ArraySpec, Ask, Capabilities, Disclosures, Method, State

DOCUMENT = "fit.json"

# A step below this share of the largest coefficient ends the fit; Newton's method is then nearer
_TOLERANCE = 1e-8
# Scales of the columns' moments: first in their own units, up to 30 million, then in better ones
_FIRST_SCALE, _LATER_SCALE = 2.0**30, 2.0**16
_RESCALED = 16.0  # factor by which sums are made smaller if a site had to clip them
_MOST_RESCALED = 1e12
# Standardised columns need deviations of about 1; others are measured again in new units
_FIT = (0.1, 10.0)
_SHRUNK = 1e-3  # the most by which units become smaller in one round
# Families whose outcome may be a label of two classes
_OF_LABELS = ("logistic", "cox")
_MOST_UNITS = 4  # the most rounds that ask for moments


@dataclass(frozen=True)
class GLMState(State):
    """The units and coefficients of a regression.

    Attributes:
        centers: the centres of outcome and columns, in their own units; the outcome's comes first.
        deviations: their deviations, in their own units and the same order.
        units_asked: the rounds that asked for the columns' moments.
        beta: the coefficients that the next round sends; an intercept comes first. Empty while the
            units are unknown.
        before: the coefficients of the last accepted step.
        objective: the objective at ``before``; None before the first step.
        scale: divides the sums at the sites.
        sums: the final sums as ``GLMSums.vector``; empty until the steps have converged.
        sites: site -> its own coefficients and variances; a site without a fit has empty lists.
        ended: whether the regression is finished.
    """

    centers: list[float] = field(default_factory=list)
    deviations: list[float] = field(default_factory=list)
    units_asked: int = 0
    beta: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    objective: float | None = None
    scale: float = 1.0
    sums: list[float] = field(default_factory=list)
    sites: dict[str, list[list[float]]] = field(default_factory=dict)
    ended: bool = False


class GLM(Method):
    """Fits a logistic, linear, Poisson or Cox regression to the patients of all sites."""

    capabilities = Capabilities()
    state_class = GLMState
    settings: GLMSettings

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the table's features, the same at all sites."""
        return next(iter(self.participants.facts.values())).features

    @property
    def column_places(self) -> ChosenColumns:
        """The places of the columns and of the outcome."""
        return find_columns(self.features, self.settings)

    @property
    def column_names(self) -> list[str]:
        """The names of the explanatory columns."""
        return [self.features[place] for place in self.column_places.columns]

    @property
    def names(self) -> list[str]:
        """The coefficients' names: the intercept, if the family has one, then the columns."""
        if has_intercept(self.settings.family):
            return ["(intercept)", *self.column_names]
        return self.column_names

    def initial_state(self) -> GLMState:
        """Return the state before round 1, with unknown units and without coefficients.

        Raises:
            FitError: the outcome is the label, but the label does not suit the family.
        """
        settings, classes = self.settings, self.shape.outputs
        is_time = self.common.task == SURVIVAL and settings.family == "cox"
        is_class = settings.family in _OF_LABELS and classes == 2
        if not (settings.outcome or is_time or is_class):
            raise FitError(
                f"the label of data set '{self.common.dataset}' does not suit a {settings.family} "
                f"model (outputs: {classes}): name a numeric column as 'glm.outcome'"
            )
        size = 1 + len(self.column_names)
        return GLMState(centers=[0.0] * size, deviations=[1.0] * size, scale=_FIRST_SCALE)

    def round(self, state: GLMState, ask: Ask) -> GLMState:
        """Ask all sites for sums, and return the state after the step that the sums allow.

        The state decides which step comes next:

        - While ``beta`` is empty, the sites are asked for the columns' moments. The moments give
          better units or, once the units fit, the first coefficients.
        - Then the sites are asked for the gradient and the Hessian at ``beta``, which give a step
          of Newton's method.
        - Once ``sums`` is set, each site is asked for its own fit, and the run ends. This step
          comes only at trust 'server' with 'glm.heterogeneity'. Without it, the run ends when the
          coefficients have converged.

        If a site had to clip its numbers, its sums are not used. The next round then asks again
        with a larger ``scale``.

        Raises:
            FitError: the columns or outcomes determine no coefficients, a site could not answer,
                the sums are too large to send, or the steps have not converged in the last round.
        """
        after = self._advance(state, ask)
        if not after.sums and state.round + 1 >= self.common.rounds:
            raise FitError(
                f"the coefficients have not converged in {self.common.rounds} rounds: raise "
                "'rounds', or leave out columns"
            )
        return after

    def _advance(self, state: GLMState, ask: Ask) -> GLMState:
        """Ask the question that is next, and return the state after the answers (see ``round``)."""
        if state.sums:
            return replace(state, sites=self._ask_own_fits(state, ask), ended=True)
        vector = self._ask_vector(state, ask)
        if vector is None:
            if state.scale > _MOST_RESCALED:
                raise FitError(
                    "the sums are too large for a secret sum: give columns in larger units, and "
                    "leave 'secure-samples' of the site files at 16384 or less"
                )
            return replace(state, scale=state.scale * _RESCALED)
        if not state.beta:
            return self._find_units(state, Moments.from_vector(vector))
        sums = GLMSums.from_vector(vector, len(state.beta))
        if state.objective is None:
            _refuse(redundant_fault(self.names, sums.hessian))
        return self._step(state, sums)

    def _find_units(self, state: GLMState, moments: Moments) -> GLMState:
        """Return the state with new units or, if the current units fit, with coefficients.

        In units that fit, each column has a mean near 0 and a deviation near 1. The first
        coefficients are those of the model with only an intercept.

        Args:
            state: the state, whose units the moments are in.
            moments: the moments of the outcome and the columns over all sites.

        Raises:
            FitError: all outcomes are alike, or a column has the same value for all patients.
        """
        means, deviations = moments.means(), moments.deviations()
        sizes = np.sqrt(moments.squares / np.maximum(moments.known, 1.0))
        if self.settings.family != "linear":  # its outcome stays as it is
            means[0], deviations[0] = 0.0, 1.0
        is_fit = (deviations > _FIT[0]) & (deviations < _FIT[1]) & (np.abs(means) < _FIT[1])
        if is_fit.all() and state.units_asked:
            _refuse(one_outcome_fault(self.settings.family, moments))
            beta = start_from(self.settings.family, moments, len(self.names)).tolist()
            scale = (len(beta) + 3.0) / LARGEST_NORM
            return replace(state, beta=beta, before=beta, scale=scale)
        if state.units_asked >= _MOST_UNITS:
            _refuse(one_outcome_fault(self.settings.family, moments))
            _refuse(constant_fault(["outcome", *self.column_names], is_fit))
        # A variance far below the largest square is lost in rounding, so units shrink by steps
        shrunk = np.maximum(deviations, _SHRUNK * np.maximum(sizes, _SHRUNK))
        if self.settings.family != "linear":
            shrunk[0] = 1.0
        before = np.array(state.deviations)
        centers = np.array(state.centers) + before * means
        return replace(
            state,
            # Rounded to float32 here too, because sites receive them so
            centers=centers.astype(np.float32).tolist(),
            deviations=(before * shrunk).astype(np.float32).tolist(),
            units_asked=state.units_asked + 1,
            scale=_LATER_SCALE,
        )

    def _step(self, state: GLMState, sums: GLMSums) -> GLMState:
        """Take a step of Newton's method, or halve the last step if it was too long.

        The last step was too long if the objective is now lower than before that step. The new
        coefficients are then halfway between the coefficients now and before the step. Otherwise a
        full step is taken. If the full step is very small, the coefficients have converged. The
        state then gets ``sums`` and, if the sites are not to be asked for their own fits,
        ``ended``.

        Raises:
            FitError: a coefficient is beyond what data can determine.
        """
        beta = np.array(state.beta)
        slack = _TOLERANCE * (1 + abs(sums.objective))
        if state.objective is not None and sums.objective < state.objective - slack:
            return replace(state, beta=((beta + np.array(state.before)) / 2).tolist())
        step = np.linalg.solve(sums.hessian, sums.gradient)
        after = beta + step
        _refuse(endless_fault(self.settings.family, self.names, after))
        moved = replace(state, beta=after.tolist(), before=state.beta, objective=sums.objective)
        if np.abs(step).max() < _TOLERANCE * (1 + np.abs(after).max()):
            alone = self.common.trust != SERVER or not self.settings.heterogeneity
            return replace(moved, sums=sums.vector().tolist(), ended=alone)
        return moved

    def _ask_vector(self, state: GLMState, ask: Ask) -> Floats | None:
        """Ask all sites for moments or, if ``beta`` is set, for sums at ``beta``, and add them up.

        The result is None if a site had to clip its numbers, because the total is then wrong.

        Raises:
            FitError: a site could not answer.
        """
        size, asks_moments = len(self.names), not state.beta
        beta = np.array(state.beta or [0.0] * size)
        single = beta.astype(np.float32)
        length = sums_length(size)
        if asks_moments:
            length = moments_length(len(state.centers))
        empty = np.zeros(length, np.float32)
        send = {
            **_units_arrays(state),
            BETA: single,
            BETA_REST: (beta - single).astype(np.float32),
            **dict.fromkeys(SUMS, empty),
            UNCLIPPED: np.zeros(1, np.float32),
        }
        grid = self._grid(len(ask.sites))
        expect = {**dict.fromkeys(SUMS, ArraySpec(empty.shape)), UNCLIPPED: ArraySpec((1,))}
        replies = ask(
            TRAIN,
            dict.fromkeys(ask.sites, send),
            expect=dict.fromkeys(ask.sites, expect),
            reference={},
            notes=ScaleNotes(asks_moments, state.scale, grid),
        )
        if replies.failed or len(replies) < len(ask.sites):
            raise FitError(
                "a site could not answer, and a regression is of the patients of all sites: repair "
                "the site and resume, or start again without it"
            )
        samples, parts = weighted_sums(replies, (*SUMS, UNCLIPPED))
        norm = part_norm(self.common)
        constant = float(parts[UNCLIPPED][0]) / norm
        joined = join_sums([parts[name] / norm for name in SUMS], grid)
        # A clipped site sends less of everything, so of the constant too
        if joined is None or abs(constant - samples * CONSTANT) > grid:
            return None
        return joined * state.scale

    def _grid(self, sites: int) -> float:
        # The grid is that of parts before they are scaled to 'secure.clip-norm'
        secure = replace(self.common, clip_norm=1.0)
        return grid_of(quantisation(secure, sites, SAMPLES), sites)

    def _ask_own_fits(self, state: GLMState, ask: Ask) -> dict[str, list[list[float]]]:
        """Ask each site for its own fit: site -> [coefficients, variances].

        A site has two empty lists if it has no fit, or if a variance is not above 0.
        """
        spec = ArraySpec((len(self.names),))
        expect = {ESTIMATES: spec, VARIANCES: spec, USABLE: ArraySpec((1,))}
        replies = ask(
            OWN_FIT,
            dict.fromkeys(ask.sites, _units_arrays(state)),
            expect=dict.fromkeys(ask.sites, expect),
            reference={},
        )
        fits: dict[str, list[list[float]]] = {}
        for site, reply in replies.items():
            fits[site] = [[], []]
            if reply.arrays[USABLE][0] == 1 and (reply.arrays[VARIANCES] > 0).all():
                fits[site] = [
                    reply.arrays[ESTIMATES].tolist(),
                    reply.arrays[VARIANCES].tolist(),
                ]
        return fits

    def why_finished(self, state: GLMState) -> str | None:
        """Return the sentence that the coefficients have converged; None if the run continues.

        ``state.ended`` decides. It becomes True in the round in which the coefficients converge. If
        the run then asks for the sites' own fits, it becomes True in the next round, in which these
        arrive.
        """
        if state.ended:
            return f"the coefficients have converged after {state.round} rounds"
        return None

    def evaluate(self, state: GLMState, ask: Ask) -> None:
        """Do nothing, because there is no network to measure."""

    def documents(
        self, state: GLMState, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Return the content of ``fit.json`` by its file name: the fitted model and the run.

        The file has the coefficients in the columns' own units with standard errors, the measures
        of fit, and the sites' own fits. Further keys are the outcome, data set, trust, treatment of
        missing values, hospitals and number of rounds. Cox's model also has the keys of
        ``_survival_facts``.

        Args:
            state: the state after convergence.
            values: ignored.
        """
        sums = GLMSums.from_vector(np.array(state.sums), len(state.beta))
        fitted = Fitted(self.settings.family, self.names, np.array(state.beta), sums, state.sites)
        document = results_document(fitted, self._units(state))
        outcome = self.settings.outcome
        facts = next(iter(self.participants.facts.values()))
        if not outcome and facts.class_names:
            # The second of two classes, or the event
            outcome = facts.class_names[-1]
        return {
            DOCUMENT: {
                "outcome": outcome or "label",
                **self._survival_facts(),
                "dataset": self.common.dataset,
                "trust": self.common.trust,
                "missing": self.settings.missing,
                "hospitals": self.participants.sites(),
                "rounds": state.round,
                **document,
            }
        }

    def _units(self, state: GLMState) -> Units:
        """Collect centres and deviations, to convert coefficients to the columns' own units."""
        centers, deviations = np.array(state.centers), np.array(state.deviations)
        return Units(
            centers[1:],
            deviations[1:],
            float(centers[0]),
            float(deviations[0]),
            has_intercept(self.settings.family),
        )

    def _survival_facts(self) -> dict[str, str]:
        """Return the entries "time", "ties" and "strata" of ``fit.json``, which only Cox has.

        "strata" is always "hospitals". "time" and "ties" are the settings of these names. If 'time'
        is empty, the entry is "time". For any other family the mapping is empty.
        """
        if self.settings.family != "cox":
            return {}
        return {
            "time": self.settings.time or "time",
            "ties": self.settings.ties,
            "strata": "hospitals",
        }

    def disclosures(self) -> Disclosures:
        """List the data sent by a site: sums over its patients in each round.

        At trust 'server' with 'glm.heterogeneity', the site's own fit is listed too.
        """
        sums = (
            "each round: the sums over all its patients of the log-likelihood's gradient and "
            "Hessian, its number of patients and the sum of their outcomes"
        )
        if self.common.secure_aggregation != "none":
            sums += ", masked; the server learns only their sum over all sites"
        disclosed = Disclosures(sums)
        if self.common.trust == SERVER and self.settings.heterogeneity:
            return disclosed.also("once: the coefficients of its patients alone, with variances")
        return disclosed


def _units_arrays(state: GLMState) -> dict[str, Any]:
    """Return the centres and the deviations of outcome and columns as arrays to send, float32."""
    return {
        CENTERS: np.array(state.centers, np.float32),
        DEVIATIONS: np.array(state.deviations, np.float32),
    }


def _refuse(fault: str) -> None:
    """Raise a ``FitError`` with the message ``fault``, if the message is not empty."""
    if fault:
        raise FitError(fault)
