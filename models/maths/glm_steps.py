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

    The hospitals' answer, ``vector``, is one of three kinds:

    - None, if a hospital had to clip its numbers. The same sums are asked for again, divided by a
      16 times larger ``scale``.
    - The columns' moments, while ``progress.beta`` is empty. They give better units or, if the
      units are good enough, the first coefficients. A unit is a column's centre and deviation.
    - The sums at the coefficients ``progress.beta``. They give a step of Newton's method.

    Args:
        model: the family and the columns.
        progress: the state of the regression, with which the hospitals computed their sums.
        vector: the total over all hospitals, as ``Moments.vector`` or ``GLMSums.vector``, or None.

    Returns:
        The next state. If its ``sums`` are not empty, the fit has converged.

    Raises:
        FitError: the data determine no regression, for example because outcomes are all alike,
            columns are collinear or a coefficient grows without end. The sums may also be too large
            to send.
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
    """Tell whether the server's question differs from the expected one by more than rounding.

    The server asks for sums at given units and coefficients. Centres, deviations and ``scale`` must
    be equal. The coefficients may differ by a vector d if each element of H d is at most 1e-12 * r
    * (1 + b). Here r is the largest row sum of |H|, and b is the largest absolute expected
    coefficient. Rounding in a Newton step can make d large, but keeps H d small. NaN counts as a
    difference, and so does another number of coefficients.

    Args:
        asked: the server's state of the regression.
        expected: the state that a hospital worked out from the last total.
        vector: the last total, which contains the Hessian H. If None, H is the identity.
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
    """Choose new units, or the starting coefficients if the current units are good enough.

    A unit is the centre and deviation by which a column is standardised. It is good enough if the
    column, in this unit, has a mean between -10 and 10 and a deviation between 0.1 and 10. In a
    linear model this applies to the outcome too. New units are chosen at least once and at most
    four times.

    Args:
        model: the family and the columns.
        progress: the state of the regression, with the current units.
        moments: the moments of outcome and columns over all sites, in the current units.

    Returns:
        The next state of the regression. It has either new units, in which the hospitals send
        moments again, or the coefficients from which Newton's method starts (``start_from``).

    Raises:
        FitError: the outcomes are too alike (``one_outcome_fault``), or the fourth unit of a column
            is not good enough, so the column counts as constant.
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
    """Take a full step of Newton's method, or go halfway back if the last step was too long.

    Newton's method looks for the coefficients with the largest objective. The last step was too
    long if it lowered the objective by more than a margin for rounding. The next coefficients are
    then midway between those before and after that step. Otherwise a full step follows. The fit has
    converged if the full step changes every coefficient by less than 1e-8 * (1 + m), where m is the
    largest absolute coefficient after the step.

    Args:
        model: the family and the columns.
        progress: the state of the regression, with the current coefficients.
        sums: the sums over all patients at these coefficients.

    Returns:
        The state with the new coefficients. If the fit has converged, it also has ``sums``.

    Raises:
        FitError: the Hessian is singular, or a coefficient other than the intercept exceeds 12 in
            absolute value. The second rule does not apply to linear models.
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

    - A logistic model needs patients with each of the two outcomes.
    - A Poisson model needs at least one count above 0.
    - Cox's model needs at least one event.
    - A linear model always gives an empty string.

    Args:
        family: the family of the regression.
        moments: the moments over all patients, with the outcome as column 0.
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
    """Describe a fit whose coefficients grow without end, because a column separates the outcomes.

    A coefficient grows without end if its absolute value is above 12 (``LARGEST``). On columns of
    deviation 1, Newton's method gets beyond it only if the outcomes are separated. The intercept is
    not checked, and linear models are not checked.

    Args:
        family: the family of the model.
        names: the coefficients' names, the intercept's first if there is one.
        beta: the coefficients of standardised columns, (k,).

    Returns:
        One line for the error, which names the largest coefficient. An empty string if none is too
        large.
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
