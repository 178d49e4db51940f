"""Both ends of a method on quadratic losses against the paper's equations in NumPy.

The NumPy versions are float64 and take the sums by samples; ten rounds must agree to 1e-6.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import quadratic
from tests.support.identity import flower_names  # noqa: F401
from tests.support.quadratic import HESSIANS, RATE, SAMPLES, SITES, SLOPES, START, rounds_of

Vector = np.ndarray[Any, Any]
P = np.array(SAMPLES) / sum(SAMPLES)
STEPS = (1, 2, 3)
AWAY = {3: ["b"], 7: ["a", "c"]}  # round -> sites that it does not ask


def asked(number: int) -> list[int]:
    return [k for k, site in enumerate(SITES) if site not in AWAY.get(number, ())]


def gradient(site: int, w: Vector) -> Vector:
    return np.asarray(HESSIANS[site] @ w - SLOPES[site])


def scaffold(eta_g: float) -> list[Vector]:
    """Algorithm 1, option II: control variates weighted by samples, models by samples per step."""
    x, c, own, found = np.array(START), np.zeros(2), np.zeros((3, 2)), []
    for number in range(1, 11):
        here = asked(number)
        weights, per_step = P[here] / P[here].sum(), P[here] / np.array(STEPS)[here]
        moved, turned = [], []
        for i in here:
            y = x
            for _ in range(STEPS[i]):
                y = y - RATE * (gradient(i, y) - own[i] + c)
            after = own[i] - c + (x - y) / (STEPS[i] * RATE)
            moved.append(y - x)
            turned.append(after - own[i])
            own[i] = after
        x = x + eta_g * per_step / per_step.sum() @ np.array(moved)
        c = c + P[here].sum() * weights @ np.array(turned)
        found.append(x)
    return found


def fednova() -> list[Vector]:
    """Eq. 6 and 7, a_i of ones."""
    x, found = np.array(START), []
    for number in range(1, 11):
        here = asked(number)
        weights, steps = P[here] / P[here].sum(), np.array(STEPS)[here]
        d = []
        for i in here:
            y = x
            for _ in range(STEPS[i]):
                y = y - RATE * gradient(i, y)
            d.append((x - y) / (RATE * STEPS[i]))
        x = x - weights @ steps * RATE * weights @ np.array(d)
        found.append(x)
    return found


def feddyn(alpha: float) -> list[Vector]:
    """Algorithm 1, the argmin by the sites' steps of SGD, with sites weighted by samples."""
    x, h, own, found = np.array(START), np.zeros(2), np.zeros((3, 2)), []
    for number in range(1, 11):
        here = asked(number)
        weights = P[here] / P[here].sum()
        trained = []
        for i in here:
            y = x
            for _ in range(STEPS[i]):
                y = y - RATE * (gradient(i, y) - own[i] + alpha * (y - x))
            own[i] = own[i] - alpha * (y - x)
            trained.append(y)
        mean = weights @ np.array(trained)
        h = h - alpha * P[here].sum() * (mean - x)
        x = mean - h / alpha
        found.append(x)
    return found


def adaptive(second: Callable[[Vector, Vector], Vector], beta1: float) -> list[Vector]:
    """Algorithm 2 of Reddi et al., eta 0.5 and tau 0.1, with sites weighted by samples."""
    x, m, v, found = np.array(START), np.zeros(2), np.full(2, 0.1**2), []
    for number in range(1, 11):
        here = asked(number)
        moved = []
        for i in here:
            y = x
            for _ in range(STEPS[i]):
                y = y - RATE * gradient(i, y)
            moved.append(y - x)
        delta = P[here] / P[here].sum() @ np.array(moved)
        m = beta1 * m + (1 - beta1) * delta
        v = second(v, delta**2)
        x = x + 0.5 * m / (np.sqrt(v) + 0.1)
        found.append(x)
    return found


ADAPTIVE = {"fedadam.server-learning-rate": 0.5, "fedadam.tau": 0.1}


@pytest.mark.parametrize(
    ("method", "own", "numpy_version"),
    [
        ("scaffold", {}, lambda: scaffold(1.0)),
        ("scaffold", {"scaffold.server-learning-rate": 0.5}, lambda: scaffold(0.5)),
        ("fednova", {}, fednova),
        ("feddyn", {"feddyn.regularisation-alpha": 0.5}, lambda: feddyn(0.5)),
        ("fedadam", ADAPTIVE, lambda: adaptive(lambda v, d: 0.99 * v + 0.01 * d, 0.9)),
        (
            "fedyogi",
            ADAPTIVE,
            lambda: adaptive(lambda v, d: v - 0.01 * d * np.sign(v - d), 0.9),
        ),
        ("fedadagrad", ADAPTIVE, lambda: adaptive(lambda v, d: v + d, 0.0)),
    ],
)
def test_ten_rounds_are_those_of_the_papers_equations_to_a_millionth(
    method: str,
    own: dict[str, Any],
    numpy_version: Callable[[], list[Vector]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = rounds_of(method, tmp_path, monkeypatch, AWAY, **own)
    np.testing.assert_allclose(found, numpy_version(), rtol=0, atol=1e-6)


def fixed_point(weights: Vector) -> Vector:
    """Return where the weighted sum of gradients is 0."""
    hessian, slope = np.tensordot(weights, HESSIANS, 1), weights @ SLOPES
    return np.asarray(np.linalg.solve(hessian, slope))


def test_scaffold_goes_to_the_minimum_of_the_weighted_losses_and_fedavg_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = fixed_point(P)
    ends = {
        method: rounds_of(method, tmp_path / method, monkeypatch, {}, rounds=60)[-1]
        for method in ("scaffold", "fedavg")
    }
    assert np.linalg.norm(ends["scaffold"] - best) < 1e-4
    assert np.linalg.norm(ends["fedavg"] - best) > 1e-2


def test_scaffold_converges_where_a_site_of_many_steps_has_a_flat_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weighted by samples alone, the model moves away 1.39 times as far each round: site c, of 59
    # steps, walks along w[0], in which its own loss is flat
    samples = (14, 8, 118)
    hessians = np.array([np.diag([8.0, 1.0]), np.diag([8.0, 0.1]), np.diag([0.0, 8.0])])
    slopes = np.array([[1.0, -1.0], [-2.0, 1.0], [0.0, 2.0]])
    for name, value in {"SAMPLES": samples, "HESSIANS": hessians, "SLOPES": slopes}.items():
        monkeypatch.setattr(quadratic, name, value)
    weights = np.array(samples) / sum(samples)
    best = np.linalg.solve(np.tensordot(weights, hessians, 1), weights @ slopes)
    found = rounds_of("scaffold", tmp_path, monkeypatch, {}, rounds=60)
    assert np.linalg.norm(found[-1] - best) < 1e-3


@pytest.mark.parametrize(
    ("method", "own"), [("scaffold", {}), ("feddyn", {"feddyn.regularisation-alpha": 0.5})]
)
def test_a_reply_that_is_lost_moves_neither_the_sites_correction_nor_where_the_run_ends(
    method: str, own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = {1: ["c"], 4: ["a", "b"], 5: ["b"]}
    away = rounds_of(method, tmp_path / "away", monkeypatch, lost, rounds=80, **own)
    gone = rounds_of(method, tmp_path / "lost", monkeypatch, {}, rounds=80, lost=lost, **own)
    np.testing.assert_array_equal(gone, away)  # as if those rounds had not asked them
    assert np.linalg.norm(gone[-1] - fixed_point(P)) < 0.01
