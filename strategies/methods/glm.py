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
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from fedsilo.core.errors import FitError
from fedsilo.core.messages import TRAIN
from fedsilo.core.methods import proves_sums
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.core.tasks import SURVIVAL
from fedsilo.models.maths.glm import (
    Floats,
    GLMSums,
    has_intercept,
    moments_length,
    sums_length,
)
from fedsilo.models.maths.glm_results import Fitted, Units, results_document
from fedsilo.models.maths.glm_steps import (
    FitProgress,
    FittedModel,
    first_progress,
    next_progress,
)
from fedsilo.models.methods.glm import (
    BETA,
    BETA_REST,
    CENTERS,
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
    grid_over,
    join_parts,
)
from fedsilo.strategies.loop.ask import weighted_sums
from fedsilo.strategies.loop.method import ArraySpec, Ask, Capabilities, Disclosures, Method, State

DOCUMENT = "fit.json"
# Families whose outcome may be a label of two classes
_OF_LABELS = ("logistic", "cox")


@dataclass(frozen=True)
class GLMState(FitProgress, State):
    """The progress of a regression, and the sites' own fits.

    Attributes:
        sites: site -> its own coefficients and variances; a site without a fit has empty lists.
        ended: whether the regression is finished.
    """

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
        """The indices of the regression's columns and of its outcome among the features."""
        return find_columns(self.features, self.settings)

    @property
    def column_names(self) -> list[str]:
        """The names of the explanatory columns."""
        return [self.features[place] for place in self.column_places.columns]

    @property
    def fitted_model(self) -> FittedModel:
        """The family and the columns of the regression."""
        return FittedModel(self.settings.family, self.column_names)

    @property
    def names(self) -> list[str]:
        """The coefficients' names: the intercept, if the family has one, then the columns."""
        return self.fitted_model.names

    def initial_state(self) -> GLMState:
        """Return the state before round 1: columns in their own units, and no coefficients.

        The state has a centre and a deviation for the outcome and each column, here 0 and 1.

        Raises:
            FitError: 'glm.outcome' is empty, and the data set's label does not suit 'glm.family'.
        """
        settings, classes = self.settings, self.shape.outputs
        is_time = self.common.task == SURVIVAL and settings.family == "cox"
        is_class = settings.family in _OF_LABELS and classes == 2
        if not (settings.outcome or is_time or is_class):
            raise FitError(
                f"the label of data set '{self.common.dataset}' does not suit a {settings.family} "
                f"model (outputs: {classes}): name a numeric column as 'glm.outcome'"
            )
        return GLMState(**asdict(first_progress(self.fitted_model)))

    def round(self, state: GLMState, ask: Ask) -> GLMState:
        """Ask all sites for sums over their patients, and take the step that the sums allow.

        The state decides which step comes next:

        - While ``beta``, the coefficients, is empty: ask for the columns' moments. They give a
          better centre and deviation for each column or, once the columns are standardised, the
          first coefficients.
        - Until the coefficients have converged: ask for the gradient and the Hessian at ``beta``,
          for a step of Newton's method. At convergence the state keeps the last ``sums``.
        - After convergence, only with 'glm.heterogeneity' at trust 'server': ask each site for a
          fit to its own patients.

        If a site's numbers were too large to send, no sums are used. The next round then asks again
        with a larger divisor, ``scale``.

        Raises:
            FitError: the patients' data determine no coefficients, a site could not answer, the
                sums are too large to send, or the steps have not converged in the last round.
        """
        after = self._advance(state, ask)
        if not after.sums and state.round + 1 >= self.common.rounds:
            raise FitError(
                f"the coefficients have not converged in {self.common.rounds} rounds: raise "
                "'rounds', or leave out columns"
            )
        return after

    def _advance(self, state: GLMState, ask: Ask) -> GLMState:
        """Ask the sites the next question, and return the state after their answers.

        Once ``sums`` is set, the question is for each site's own fit, and before that for sums.
        Unlike ``round``, this raises no error if the last round ends without convergence.
        """
        if state.sums:
            return replace(state, sites=self._ask_own_fits(state, ask), ended=True)
        after = next_progress(self.fitted_model, state, self._ask_vector(state, ask))
        asks_own_fits = self.common.trust == SERVER and self.settings.heterogeneity
        return replace(after, ended=bool(after.sums) and not asks_own_fits)

    def _ask_vector(self, state: GLMState, ask: Ask) -> Floats | None:
        """Ask all sites for sums over their patients, and add them up over the sites.

        While there are no coefficients (``beta``), these are the sums for each column's moments.
        Afterwards they are the gradient and the Hessian of the log-likelihood at ``beta``. The
        coefficients travel as two float32 arrays that add up to float64's accuracy. The sites
        return their sums in three float32 parts.

        Returns:
            The total as a float64 vector. None if a site had to clip its numbers, because the total
            is then wrong.

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
        grid = grid_over(self.common, len(ask.sites))
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
        joined = join_parts(self.common, samples, parts, grid)
        if joined is None:
            return None
        return joined * state.scale

    def _ask_own_fits(self, state: GLMState, ask: Ask) -> dict[str, list[list[float]]]:
        """Ask each site for a fit to its own patients: site -> [coefficients, variances].

        The server sends each asked site a centre and a deviation per column, and the fit is for
        columns standardised with them. Both lists are empty if the site reports no usable fit, or
        if a variance is not above 0. A site without a usable reply is left out.
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
        """Return "the coefficients have converged after ... rounds", or None if the run continues.

        ``state.ended`` decides. It becomes True in the round in which the coefficients converge. If
        the server then asks each site to fit the model to its own data alone, it becomes True one
        round later.
        """
        if state.ended:
            return f"the coefficients have converged after {state.round} rounds"
        return None

    def evaluate(self, state: GLMState, ask: Ask) -> None:
        """Do nothing, because there is no network to measure."""

    def documents(
        self, state: GLMState, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Return the content of ``fit.json`` by its file name: the model and facts about the run.

        The keys of ``results_document`` describe the model, such as "coefficients" in the columns'
        original units. The other keys are "outcome", "dataset", "trust", "missing", "hospitals" and
        "rounds". For Cox's model, "time", "ties" and "strata" are added.

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
        """Return the state's centres and deviations, which convert coefficients to original units.

        In the lists ``centers`` and ``deviations`` of the state, the outcome comes before the
        columns.
        """
        centers, deviations = np.array(state.centers), np.array(state.deviations)
        return Units(
            centers[1:],
            deviations[1:],
            float(centers[0]),
            float(deviations[0]),
            has_intercept(self.settings.family),
        )

    def _survival_facts(self) -> dict[str, str]:
        """Return the entries of ``fit.json`` that only a Cox model has.

        "time" is the name of the column with the survival times ('glm.time', or "time" if the
        setting is empty). "ties" is the setting 'glm.ties'. "strata" is always "hospitals", because
        each hospital has its own baseline hazard. The mapping is empty if the family is not "cox".
        """
        if self.settings.family != "cox":
            return {}
        return {
            "time": self.settings.time or "time",
            "ties": self.settings.ties,
            "strata": "hospitals",
        }

    def disclosures(self) -> Disclosures:
        """Describe the data that a site sends in a regression, in one or two sentences.

        The first sentence lists the sums over the site's patients, sent in each round. With secure
        aggregation it adds that the server learns only their total. At trust 'sums' it adds that
        each site learns the total too. At trust 'server' with 'glm.heterogeneity', a second
        sentence lists the fit to the site's own patients.
        """
        sums = (
            "each round: the sums over all its patients of the log-likelihood's gradient and "
            "Hessian, its number of patients and the sum of their outcomes"
        )
        if self.common.secure_aggregation != "none":
            sums += ", masked; the server learns only their sum over all sites"
        if proves_sums(self.common):
            sums += ", which each site learns too, to check the next question"
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
