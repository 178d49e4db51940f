import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.models.maths.cox import FollowUp, cox_sums, risks_and_residuals
from fedsilo.models.maths.glm import UndeterminedError, fit_alone, sums_at

# Two hospitals, with ties of events, and ties of an event and a censored patient
TIMES = np.array([1, 2, 2, 3, 4, 4, 5, 6, 1, 1, 2, 3, 3, 5, 7, 8], float)
EVENTS = np.array([1, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1], float)
AGE = np.array([5.1, 6.2, 4.9, 3.3, 5.5, 2.1, 6.0, 1.0, 7.2, 5.9, 2.2, 6.1, 3.0, 4.4, 2.5, 3.9])
DOSE = np.array([1, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1, 0], float)
SITES = (slice(0, 8), slice(8, 16))
# By statsmodels 0.15.0: PHReg(TIMES, [AGE, DOSE], status=EVENTS, strata=site, ties=...).fit()
REFERENCE = {
    "efron": ([1.2979605127, 2.2114547984], [0.5159193417, 1.0459442822], -8.8084831100),
    "breslow": ([1.2070106839, 2.0933685123], [0.5157259409, 1.0482208078], -10.1119835944),
}


def hospital(part: slice, ties: str = "efron") -> tuple[np.ndarray, FollowUp]:
    columns = np.column_stack([AGE[part], DOSE[part]])
    return columns, FollowUp(TIMES[part], EVENTS[part], ties)


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_newton_over_hospitals_is_the_stratified_model_of_statsmodels(ties):
    beta = np.zeros(2)
    for _ in range(12):
        sums = [cox_sums(*hospital(part, ties), beta) for part in SITES]
        hessian = sum(site.hessian for site in sums)
        beta = beta + np.linalg.solve(hessian, sum(site.gradient for site in sums))
    estimates, errors, likelihood = REFERENCE[ties]
    np.testing.assert_allclose(beta, estimates, rtol=1e-8)
    np.testing.assert_allclose(np.sqrt(np.diag(np.linalg.inv(hessian))), errors, rtol=1e-8)
    assert sum(site.objective for site in sums) == pytest.approx(likelihood, rel=1e-10)


def test_a_partial_likelihood_by_hand():
    # Events at 1 and 2 of three patients; exp(eta) = 1, 2, 4: (1 / 7) (2 / 6)
    x, follow_up = (
        np.array([[0.0], [1.0], [2.0]]),
        FollowUp(np.array([1.0, 2, 3]), np.array([1.0, 1, 0])),
    )
    sums = cox_sums(x, follow_up, np.array([np.log(2)]))
    assert sums.objective == pytest.approx(np.log(1 / 7) + np.log(2 / 6))
    # The means of x at risk are 10 / 7 and 10 / 6
    assert sums.gradient[0] == pytest.approx(0 - 10 / 7 + 1 - 10 / 6)
    assert sums.hessian[0, 0] == pytest.approx((18 / 7 - (10 / 7) ** 2) + (18 / 6 - (10 / 6) ** 2))


@pytest.mark.parametrize(("ties", "likelihood"), [("breslow", 1 / 9), ("efron", 1 / 6)])
def test_two_of_three_patients_die_at_once(ties, likelihood):
    # Breslow: 1 / 3 twice. Efron: 1 / 3, then 1 / (3 - 2 / 2)
    follow_up = FollowUp(np.array([2.0, 2, 3]), np.array([1.0, 1, 0]), ties)
    sums = cox_sums(np.array([[0.0], [1.0], [5.0]]), follow_up, np.zeros(1))
    assert sums.objective == pytest.approx(np.log(likelihood))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["efron", "breslow"]))
def test_derivatives_are_those_of_the_objective(seed, ties):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(30, 2))
    follow_up = FollowUp(rng.integers(0, 8, 30).astype(float), rng.integers(0, 2, 30) * 1.0, ties)
    beta, small = rng.normal(size=2), 1e-5
    sums = cox_sums(x, follow_up, beta)
    for place in range(2):
        step = small * np.eye(2)[place]
        ahead, behind = cox_sums(x, follow_up, beta + step), cox_sums(x, follow_up, beta - step)
        slope = (ahead.objective - behind.objective) / (2 * small)
        assert slope == pytest.approx(sums.gradient[place], rel=1e-5, abs=1e-5)
        bend = (behind.gradient - ahead.gradient) / (2 * small)
        np.testing.assert_allclose(bend, sums.hessian[place], rtol=1e-5, atol=1e-4)


def test_residuals_times_columns_are_the_gradient_and_weights_are_positive():
    x, follow_up = hospital(SITES[1], "breslow")
    beta = np.array([0.4, -0.3])
    weights, residuals = risks_and_residuals(x, follow_up, beta)
    np.testing.assert_allclose(x.T @ residuals, cox_sums(x, follow_up, beta).gradient)
    assert residuals.sum() == pytest.approx(0)
    assert (weights >= 0).all()
    # At coefficients without end every sum is still a number
    far = cox_sums(x, follow_up, beta * 1e4)
    assert np.isfinite(far.hessian).all()
    assert np.isfinite(risks_and_residuals(x, follow_up, beta * 1e4)[0]).all()


def test_a_hospital_without_events_determines_no_coefficients():
    x, follow_up = hospital(SITES[0])
    with pytest.raises(UndeterminedError):
        fit_alone("cox", x, FollowUp(follow_up.times, np.zeros(8)))
    # A column that puts the patients in the order of their events
    with pytest.raises(UndeterminedError):
        fit_alone("cox", -TIMES[:8, None], follow_up)
    assert sums_at("cox", x, follow_up, np.zeros(2)).outcomes == 5
