"""The steps of a regression: each question follows from the questions and the totals before it.

A fit first finds units, in which each column has about mean 0 and deviation 1, from the columns'
moments. Then each total gives a step of Newton's method. The server takes these steps to ask the
next question. At trust 'sums' each hospital takes them too, and answers no other question.

Faults are reasons why the patients of all hospitals determine no regression, in words. Functions
that look for a fault return '' if they find none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fedsilo.core.errors import FitError
from fedsilo.core.one_line import join_names
from fedsilo.models.maths.glm import (
    LARGEST,
    Family,
    Floats,
    GLMSums,
    Moments,
    find_redundant,
    has_intercept,
    start_from,
)

# A step below this share of the largest coefficient ends the fit; Newton's method is then nearer
_TOLERANCE = 1e-8
# Scales of the columns' moments: first in their own units, up to 30 million, then in better ones
_FIRST_SCALE, _LATER_SCALE = 2.0**30, 2.0**16
_RESCALED = 16.0  # factor by which sums are made smaller if a site had to clip them
_MOST_RESCALED = 1e12
# Standardised columns need deviations of about 1; others are measured again in new units
_FIT = (0.1, 10.0)
_SHRUNK = 1e-3  # the most by which units become smaller in one round
_MOST_UNITS = 4  # the most changes of units; the moments are asked for once more than that
# L2 norm of the sums' first part. In a ball of norm 1 it leaves room for the others, which have a
# norm of 1/2 each (``models.privacy.fixed_point``)
LARGEST_NORM = 0.65
# The most by which a hospital's coefficients may differ from the server's. Two machines solve the
# same equations with residuals of about k * 1e-16 for k coefficients, and two float32 arrays carry
# a coefficient to 4e-15. This is 50 times both for 100 coefficients
_ROUNDING = 1e-12


@dataclass(frozen=True)
class FittedModel:
    """The model of a regression, which stays the same in all steps.

    Attributes:
        family: the family.
        columns: the names of the explanatory columns.
    """

    family: Family
    columns: Sequence[str]

    @property
    def names(self) -> list[str]:
        """The coefficients' names: the intercept, if the family has one, then the columns."""
        if has_intercept(self.family):
            return ["(intercept)", *self.columns]
        return list(self.columns)


@dataclass(frozen=True)
class FitProgress:
    """The question that a regression asks next, and the numbers that later questions depend on.

    All numbers follow from totals over all hospitals. They are JSON values, for checkpoints.

    Attributes:
        centers: the centres of outcome and columns, in their own units; the outcome's comes first.
        deviations: their deviations, in their own units and the same order.
        units_asked: the rounds that asked for the columns' moments.
        beta: the coefficients that the next round asks about; an intercept comes first. Empty while
            the units are unknown; the next round then asks for moments.
        before: the coefficients of the last accepted step.
        objective: the objective at ``before``; None before the first step.
        scale: divides the sums at the sites.
        sums: the final sums as ``GLMSums.vector``; empty until the steps have converged.
    """

    centers: list[float] = field(default_factory=list)
    deviations: list[float] = field(default_factory=list)
    units_asked: int = 0
    beta: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    objective: float | None = None
    scale: float = _FIRST_SCALE
    sums: list[float] = field(default_factory=list)


P = TypeVar("P", bound=FitProgress)


def first_progress(model: FittedModel) -> FitProgress:
    """Return the initial progress, whose question is for moments in the columns' own units."""
    size = 1 + len(model.columns)
    return FitProgress(centers=[0.0] * size, deviations=[1.0] * size)


def next_progress(model: FittedModel, progress: P, vector: Floats | None) -> P:
    """Advance a regression by one round, and decide which sums the hospitals compute next.

    ``vector`` is the total of their answers. It holds the columns' moments while ``progress.beta``
    is empty, and then the sums. None means that a hospital clipped its numbers. The round is then
    repeated with a larger ``scale``.

    Raises:
        FitError: the data determine no regression.
    """
    if vector is None:
        if progress.scale > _MOST_RESCALED:
            raise FitError(
                "the sums are too large for a secret sum: give columns in larger units, and "
                "leave 'secure-samples' of the site files at 16384 or less"
            )
        return replace(progress, scale=progress.scale * _RESCALED)
    if not progress.beta:
        return _find_units(model, progress, Moments.from_vector(vector))
    sums = GLMSums.from_vector(vector, len(progress.beta))
    if progress.objective is None:
        _refuse(redundant_fault(model.names, sums.hessian))
    return _step(model, progress, sums)


def differs(asked: FitProgress, expected: FitProgress, vector: Floats | None) -> bool:
    """Tell whether the server asks for other sums than expected, by more than rounding.

    Centres, deviations and ``scale`` must be equal. Coefficients may differ by a rounding error,
    whose size follows from the Hessian in ``vector``. NaN counts as a difference.

    Args:
        asked: the server's state.
        expected: the state that a hospital worked out.
        vector: the last total, or None.
    """
    ours, theirs = np.array(expected.beta), np.array(asked.beta)
    exact = [(asked.centers, expected.centers), (asked.deviations, expected.deviations)]
    if any(one != other for one, other in exact) or asked.scale != expected.scale:
        return True
    if ours.shape != theirs.shape:
        return True
    hessian = np.eye(len(ours))
    if vector is not None:
        hessian = GLMSums.from_vector(vector, len(ours)).hessian
    largest = np.abs(hessian).sum(axis=1).max(initial=0.0) * (1 + np.abs(ours).max(initial=0.0))
    distance = np.abs(hessian @ (theirs - ours)).max(initial=0.0)
    # Written so that NaN differs
    return not distance <= _ROUNDING * largest


def _find_units(model: FittedModel, progress: P, moments: Moments) -> P:
    """Choose new units or, if the current units are good enough, the first coefficients.

    In a good unit, a column's mean is within 10 of 0 and its deviation within 0.1 to 10. A FitError
    tells of outcomes all alike or a constant column.
    """
    means, deviations = moments.means(), moments.deviations()
    sizes = np.sqrt(moments.squares / np.maximum(moments.known, 1.0))
    if model.family != "linear":  # its outcome stays as it is
        means[0], deviations[0] = 0.0, 1.0
    is_fit = (deviations > _FIT[0]) & (deviations < _FIT[1]) & (np.abs(means) < _FIT[1])
    if is_fit.all() and progress.units_asked:
        _refuse(one_outcome_fault(model.family, moments))
        beta = start_from(model.family, moments, len(model.names)).tolist()
        scale = (len(beta) + 3.0) / LARGEST_NORM
        return replace(progress, beta=beta, before=beta, scale=scale)
    if progress.units_asked >= _MOST_UNITS:
        _refuse(one_outcome_fault(model.family, moments))
        _refuse(constant_fault(["outcome", *model.columns], is_fit))
    # A variance far below the largest square is lost in rounding, so units shrink by steps
    shrunk = np.maximum(deviations, _SHRUNK * np.maximum(sizes, _SHRUNK))
    if model.family != "linear":
        shrunk[0] = 1.0
    before = np.array(progress.deviations)
    centers = np.array(progress.centers) + before * means
    return replace(
        progress,
        # Rounded to float32 here too, because sites receive them so
        centers=centers.astype(np.float32).tolist(),
        deviations=(before * shrunk).astype(np.float32).tolist(),
        units_asked=progress.units_asked + 1,
        scale=_LATER_SCALE,
    )


def _step(model: FittedModel, progress: P, sums: GLMSums) -> P:
    """Take a step of Newton's method to maximise the objective, or halve the last step.

    A last step that lowered the objective is halved, except for rounding errors. The result has
    ``sums`` once a step barely changes the coefficients. A FitError says that no step is possible.
    """
    beta = np.array(progress.beta)
    # Near the optimum, rounding alone may lower the objective; no step is halved for that
    slack = _TOLERANCE * (1 + abs(sums.objective))
    if progress.objective is not None and sums.objective < progress.objective - slack:
        return replace(progress, beta=((beta + np.array(progress.before)) / 2).tolist())
    try:
        step = np.linalg.solve(sums.hessian, sums.gradient)
    except np.linalg.LinAlgError:
        raise FitError(
            "no regression: after this step the patients determine no next one (the Hessian is "
            "singular): leave columns out of 'glm.columns'"
        ) from None
    after = beta + step
    _refuse(endless_fault(model.family, model.names, after))
    moved = replace(progress, beta=after.tolist(), before=progress.beta, objective=sums.objective)
    if np.abs(step).max() < _TOLERANCE * (1 + np.abs(after).max()):
        return replace(moved, sums=sums.vector().tolist())
    return moved


def _refuse(fault: str) -> None:
    """Raise a ``FitError`` with the message ``fault``, if the message is not empty."""
    if fault:
        raise FitError(fault)


def one_outcome_fault(family: Family, moments: Moments) -> str:
    """Describe why the outcomes rule out a regression, or return an empty string.

    A logistic model needs patients with each of the two outcomes. A Poisson model needs a count
    above 0, and Cox's model needs an event. A linear model always gives an empty string.
    ``moments`` cover all patients, with the outcome as column 0.
    """
    total, patients = moments.totals[0], moments.patients
    if family == "logistic" and not 0.5 < total < patients - 0.5:
        outcome = round(total / patients)
        return f"no regression: all {round(patients)} patients have the outcome {outcome}"
    if family == "poisson" and total < 0.5:
        return f"no regression: the counts of all {round(patients)} patients are 0"
    if family == "cox" and total < 0.5:
        return f"no regression: none of the {round(patients)} patients has an event"
    return ""


def constant_fault(names: Sequence[str], is_fit: npt.NDArray[np.bool_]) -> str:
    """Describe the columns whose values vary too little for a regression.

    Args:
        names: the names to describe. The outcome may be among them.
        is_fit: for each name, in the same order, False if it counts as constant.

    Returns:
        One line for the error, which lists the names that count as constant. An empty string if
        none does.
    """
    constant = join_names([name for name, fit in zip(names, is_fit, strict=True) if not fit])
    if not constant:
        return ""
    return f"no regression: {constant} is the same for all patients: leave it out of 'glm.columns'"


def redundant_fault(names: Sequence[str], hessian: Floats) -> str:
    """Describe the columns that are linear combinations of the columns before them.

    Args:
        names: the coefficients' names, in the order of the Hessian's rows.
        hessian: the Hessian over all patients, (k, k), in which ``find_redundant`` finds the
            columns.

    Returns:
        One line for the error, which lists these columns. An empty string if there are none.
    """
    redundant = find_redundant(hessian)
    if not redundant:
        return ""
    quoted = join_names([f"'{names[place]}'" for place in redundant])
    return (
        f"no regression: {quoted} follows from the columns before it (collinear): leave it "
        "out of 'glm.columns'"
    )


def endless_fault(family: Family, names: Sequence[str], beta: Floats) -> str:
    """Describe a fit whose coefficients grow without end, or return an empty string.

    Coefficients grow without end if a column separates the outcomes. The sign is an absolute value
    above 12, for standardised columns. The intercept and linear models are not checked. The result
    names the largest coefficient, for an error.
    """
    first = int(has_intercept(family))
    sizes = np.abs(beta[first:])
    if family == "linear" or sizes.max(initial=0.0) <= LARGEST:
        return ""
    separated = "outcomes"
    if family == "cox":
        separated = "patients with an early event from the others"
    return (
        f"no regression: the coefficient of '{names[first + int(sizes.argmax())]}' grows without "
        f"end, because the column, alone or with others, separates the {separated}: leave it out "
        "of 'glm.columns'"
    )
