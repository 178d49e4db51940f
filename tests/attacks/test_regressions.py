"""A server that asks for a regression's sums, and wants a patient's row."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.core.messages import ARRAYS, TRAIN
from fedsilo.models.maths.glm import GLMSums, sums_length
from fedsilo.models.methods.glm import (
    BETA,
    BETA_REST,
    CENTERS,
    DEVIATIONS,
    SUMS,
    ScaleNotes,
)
from fedsilo.models.privacy.fixed_point import join_sums
from tests.support.hospital import Hospital

Make = Callable[..., Hospital]
COLUMNS, GRID = "age,trestbps,thalach,oldpeak", 2.0**-12
SIZE = 5


def asked(site: Hospital, beta: np.ndarray[Any, Any], round_: int = 1) -> GLMSums | None:
    """Return the hospital's sums at coefficients of columns in their own units; None if refused."""
    single = np.float32(beta)
    arrays = {
        CENTERS: np.zeros(SIZE),
        DEVIATIONS: np.ones(SIZE),
        BETA: single,
        BETA_REST: beta - single,
        **dict.fromkeys(SUMS, np.zeros(sums_length(SIZE))),
    }
    notes = ScaleNotes(False, 2.0**16, GRID).to_values()
    reply = site.send(TRAIN, arrays, evaluate=False, notes=notes, round=round_)
    if reply is None:
        return None
    samples = len(site.silo().train)
    parts = [samples * reply[ARRAYS][name].numpy().astype(np.float64) for name in SUMS]
    joined = join_sums(parts, GRID)
    assert joined is not None
    return GLMSums.from_vector(joined * 2.0**16, SIZE)


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
