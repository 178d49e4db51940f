"""Reasons why the patients of all hospitals determine no regression, in words.

Each function returns '' if it finds no fault.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsilo.core.one_line import join_names
from fedsilo.models.maths.glm import (
    LARGEST,
    Family,
    Floats,
    Moments,
    find_redundant,
    has_intercept,
)


def one_outcome_fault(family: Family, moments: Moments) -> str:
    """Describe outcomes that are so alike that no regression exists; empty if they are not.

    A logistic model needs patients with both outcomes, a Poisson model at least one count above 0,
    and Cox's model at least one event. A linear model has no such fault.

    Args:
        family: the family of the regression.
        moments: the moments over all patients; the outcome is column 0.
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
    """Describe the columns, and the outcome, that have the same value for all patients.

    Args:
        names: the names of the outcome and of the columns.
        is_fit: for each name, in the same order, whether its values vary enough for a regression.

    Returns:
        One line for the error, with the names that do not vary; empty if all vary.
    """
    constant = join_names([name for name, fit in zip(names, is_fit, strict=True) if not fit])
    if not constant:
        return ""
    return f"no regression: {constant} is the same for all patients: leave it out of 'glm.columns'"


def redundant_fault(names: Sequence[str], hessian: Floats) -> str:
    """Describe the columns that are linear combinations of the columns before them.

    Args:
        names: the coefficients' names, in the order of the Hessian's rows.
        hessian: the Hessian over all patients, (k, k). ``find_redundant`` finds the columns by it.

    Returns:
        One line for the error, with the names of these columns; empty if there are none.
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
    """Explain that the largest coefficient grows without end; '' if it does not.

    A coefficient counts as endless if its absolute value is above 12 (``LARGEST``). It then grows
    in every step, because its column separates the outcomes. The intercept is not checked. For a
    linear model the result is always ''.

    Args:
        family: the family.
        names: the coefficients' names, the intercept's first if there is one.
        beta: the coefficients of standardised columns, (k,).

    Returns:
        One line for the error, with the name of the largest coefficient.
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
