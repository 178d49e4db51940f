"""A server that asks for a regression's sums, and wants a patient's row.

At 'server' it sees each hospital's sums, at 'sums' those over all hospitals, and may choose
coefficients by the answers before.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.client_app.methods.glm_patients import Patients
from fedsilo.core.messages import ARRAYS, TRAIN
from fedsilo.models.maths.glm import (
    GLMSums,
    effective_patients,
    sums_at,
    sums_length,
    weights_and_residuals,
)
from fedsilo.models.methods.glm import (
    BETA,
    BETA_REST,
    CENTERS,
    DEVIATIONS,
    SUMS,
    UNCLIPPED,
    GLMSettings,
    ScaleNotes,
)
from fedsilo.models.privacy.fixed_point import join_sums
from tests.support.hospital import Hospital

Make = Callable[..., Hospital]
COLUMNS, GRID = "age,trestbps,thalach,oldpeak", 2.0**-12
SIZE = 5


NOTES = ScaleNotes(False, 2.0**16, GRID).to_values()


def question(beta: np.ndarray[Any, Any], columns: int) -> dict[str, Any]:
    """Return the arrays that ask for sums at coefficients of columns in their own units."""
    single = np.float32(beta)
    return {
        CENTERS: np.zeros(1 + columns),
        DEVIATIONS: np.ones(1 + columns),
        BETA: single,
        BETA_REST: beta - single,
        **dict.fromkeys(SUMS, np.zeros(sums_length(len(beta)))),
        UNCLIPPED: np.zeros(1),
    }


def asked(
    site: Hospital,
    beta: np.ndarray[Any, Any],
    round_: int = 1,
    columns: int = SIZE - 1,
    run_name: str = "attack",
) -> GLMSums | None:
    """Return the hospital's sums at coefficients of columns in their own units; None if refused."""
    arrays = question(beta, columns)
    reply = site.send(TRAIN, arrays, evaluate=False, notes=NOTES, round=round_, run_name=run_name)
    if reply is None:
        return None
    samples = len(site.silo().train)
    parts = [samples * reply[ARRAYS][name].numpy().astype(np.float64) for name in SUMS]
    joined = join_sums(parts, GRID)
    assert joined is not None
    return GLMSums.from_vector(joined * 2.0**16, len(beta))


def rows_of(site: Hospital) -> np.ndarray[Any, Any]:
    silo = site.silo()
    places = [silo.features.index(name) for name in COLUMNS.split(",")]
    rows = [part.inputs.double().numpy()[:, places] for part in silo.splits().values()]
    return np.column_stack([np.ones(sum(map(len, rows))), np.concatenate(rows)])


def aimed_at(rows: np.ndarray[Any, Any], steep: float) -> np.ndarray[Any, Any]:
    """Return coefficients at which only the patients of the highest blood pressure have weight."""
    values = np.sort(rows[:, 2])
    beta = np.zeros(SIZE)
    beta[:3:2] = -steep * values[-1], steep
    return beta


def nearest(rows: np.ndarray[Any, Any], candidate: np.ndarray[Any, Any]) -> float:
    return float((np.abs(rows - candidate) / rows.std(axis=0).clip(1)).max(axis=1).min())


def test_without_a_floor_aimed_coefficients_read_a_patient(hospital: Make) -> None:
    """The attack works: the Hessian is one patient's row, times its weight."""
    site = hospital(
        "hungary",
        {"sums-min-count": 1},
        method="glm",
        glm__columns=COLUMNS,
        evaluate_every=0,
        sums_min_count=1,
    )
    rows = rows_of(site)
    sums = asked(site, aimed_at(rows, 50.0))
    assert sums is not None
    assert nearest(rows, sums.hessian[0] / sums.hessian[0, 0]) < 0.01


@pytest.mark.parametrize("steep", [0.5, 5.0, 50.0])
def test_with_a_floor_aimed_coefficients_are_refused(hospital: Make, steep: float) -> None:
    site = hospital("hungary", method="glm", glm__columns=COLUMNS, evaluate_every=0)
    assert asked(site, aimed_at(rows_of(site), steep)) is None
    assert "sums-min-count" in site.refusals[0]


def test_single_answers_of_usual_coefficients_are_no_row(hospital: Make) -> None:
    """Rows of Hessians and differences between fits are means over many, far from every patient."""
    site = hospital("hungary", method="glm", glm__columns=COLUMNS, evaluate_every=0)
    rows, found, rng = rows_of(site), [], np.random.default_rng(3)
    before = None
    for round_ in range(1, 6):
        beta = np.concatenate([[0.0], rng.normal(scale=0.003, size=SIZE - 1)])
        sums = asked(site, beta, round_)
        if sums is None:
            continue
        # Not closer than the mean row, which every regression tells
        found.append(sums.hessian[0] / sums.hessian[0, 0])
        if before is not None:
            difference = sums.hessian - before.hessian
            found.append(difference[0] / difference[0, 0])
        before = sums
    assert len(found) > 3
    mean = nearest(rows, rows.mean(axis=0))
    assert min(nearest(rows, candidate) for candidate in found) > 0.5 * mean


COX = {
    "dataset": "survival-synthetic",
    "task": "survival",
    "method": "glm",
    "glm__family": "cox",
    "glm__columns": "age,nodes,treated",
    "evaluate_every": 0,
}


def cox_aimed(steep: float) -> np.ndarray[Any, Any]:
    """Return coefficients of Cox's model at which each event has one or two patients at risk."""
    return steep * np.array([1.0, 0.37, 0.11])


def test_without_a_floor_a_cox_regression_tells_two_patients_apart(hospital: Make) -> None:
    """The attack works: the Hessian is the difference of two patients' rows, times a weight."""
    site = hospital("lake", {"sums-min-count": 1}, **COX, sums_min_count=1)
    silo = site.silo()
    rows = np.concatenate([part.inputs.double().numpy() for part in silo.splits().values()])
    rows = rows[:, [silo.features.index(name) for name in ("age", "nodes", "treated")]]
    differences = (rows[:, None] - rows[None]).reshape(-1, 3)
    lengths = np.linalg.norm(differences, axis=1)
    directions = differences[lengths > 0] / lengths[lengths > 0, None]
    sums = asked(site, cox_aimed(3.0), columns=3)
    assert sums is not None
    largest = np.linalg.eigh(sums.hessian)[1][:, -1]
    assert np.abs(directions @ largest).max() > 1 - 1e-4


@pytest.mark.parametrize("steep", [1.0, 3.0, 10.0])
def test_with_a_floor_a_cox_regression_at_aimed_coefficients_is_refused(
    hospital: Make, steep: float
) -> None:
    site, usual = hospital("lake", **COX), np.array([0.03, 0.1, -0.5])
    assert asked(site, cox_aimed(steep), columns=3) is None
    assert "sums-min-count" in site.refusals[0]
    # This run gets nothing more, and another run gets honest coefficients answered
    assert asked(site, usual, 2, columns=3) is None
    assert asked(site, usual, columns=3, run_name="other") is not None


def test_a_linear_regression_tells_nothing_by_a_second_question() -> None:
    """All answers follow from the first: gradient and objective are known polynomials."""
    rng = np.random.default_rng(0)
    x, y = np.column_stack([np.ones(50), rng.normal(size=(50, 2))]), rng.normal(size=50)
    first = sums_at("linear", x, y, np.zeros(3))
    for _ in range(20):
        beta = rng.normal(size=3) * 10.0 ** rng.integers(-3, 4)
        again = sums_at("linear", x, y, beta)
        np.testing.assert_array_equal(again.hessian, first.hessian)
        np.testing.assert_allclose(again.gradient, first.gradient - first.hessian @ beta)
        told = first.objective + first.gradient @ beta - beta @ first.hessian @ beta / 2
        assert again.objective == pytest.approx(told)


def test_a_shifted_mean_would_read_the_one_patient_who_lacks_a_value() -> None:
    """So a hospital refuses where few lack a value: tests/methods/test_cox_fit.py."""
    rng = np.random.default_rng(1)
    columns = rng.normal(size=(40, 2))
    columns[7, 0] = np.nan
    patients = Patients(columns, rng.normal(size=40))
    settings, sums = GLMSettings(family="linear", outcome="y"), []
    for center in (0.0, 1.0):
        x, y = patients.design(np.array([0.0, center, 0.0]), np.ones(3), settings)
        sums.append(sums_at("linear", x, y, np.zeros(3)).hessian[1, 2])
    # Only the known values have moved, by 1
    everybody = columns[:, 1].sum()
    assert everybody - (sums[0] - sums[1]) == pytest.approx(columns[7, 1])


def test_differences_of_seven_allowed_answers_read_an_outlier() -> None:
    """The attack works. So at 'sums' a hospital follows the fit: ``test_fits_that_depart.py``."""
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(240), rng.normal(size=(240, 4))])
    x[0, 2] = 6.0
    y, steps, hessians = (rng.random(240) < 0.5) * 1.0, np.linspace(0.1, 0.6, 7), []
    for step in steps:
        beta = np.array([0.0, 0.0, step, 0.0, 0.0])
        spread = weights_and_residuals("logistic", x, y, beta)
        assert min(map(effective_patients, spread)) > 10
        exact = sums_at("logistic", x, y, beta).hessian
        # At the precision of a secret sum
        hessians.append(exact * (1 + 1e-8 * rng.normal(size=exact.shape)))
    # The combination in which all powers of the column below the twelfth cancel
    powers = steps[:, None] ** (2 * np.arange(7))
    combination = np.linalg.solve(powers.T, np.eye(7)[6])
    found = np.tensordot(combination, hessians, 1)[0]
    np.testing.assert_allclose(found / found[0], x[0], atol=0.1)
