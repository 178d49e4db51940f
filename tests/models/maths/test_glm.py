import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression, PoissonRegressor

from fedsilo.core.errors import FitError
from fedsilo.models.maths.glm import (
    GLMSums,
    UndeterminedError,
    effective_patients,
    find_redundant,
    fit_alone,
    moments_of,
    sums_at,
)
from fedsilo.models.maths.glm_steps import FitProgress, FittedModel, differs, next_progress
from fedsilo.models.maths.meta_analysis import combine_effects


def patients(family: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = np.column_stack([np.ones(300), rng.normal(size=(300, 3))])
    eta = x @ [0.3, 0.8, -0.5, 0.0]
    if family == "logistic":
        return x, (rng.random(300) < expit(eta)).astype(float)
    if family == "poisson":
        return x, rng.poisson(np.exp(eta)).astype(float)
    return x, eta + rng.normal(size=300)


@pytest.mark.parametrize("family", ["logistic", "linear", "poisson"])
def test_gradient_and_hessian_are_derivatives_of_the_objective(family):
    x, y = patients(family)
    beta, small = np.array([0.1, 0.2, 0.3, -0.1]), 1e-5
    sums = sums_at(family, x, y, beta)
    for place in range(4):
        step = small * np.eye(4)[place]
        ahead, behind = sums_at(family, x, y, beta + step), sums_at(family, x, y, beta - step)
        slope = (ahead.objective - behind.objective) / (2 * small)
        bend = (behind.gradient - ahead.gradient) / (2 * small)
        assert slope == pytest.approx(sums.gradient[place], rel=1e-6, abs=1e-5)
        np.testing.assert_allclose(bend, sums.hessian[place], rtol=1e-6, atol=1e-5)


def test_fits_agree_with_scikit_learn_without_penalty():
    x, y = patients("logistic")
    beta, _ = fit_alone("logistic", x, y)
    theirs = LogisticRegression(C=np.inf, tol=1e-12, max_iter=10_000).fit(x[:, 1:], y)
    np.testing.assert_allclose(beta[1:], theirs.coef_[0], atol=1e-6)
    x, y = patients("poisson")
    beta, _ = fit_alone("poisson", x, y)
    counts = PoissonRegressor(alpha=0, tol=1e-12, max_iter=10_000).fit(x[:, 1:], y)
    np.testing.assert_allclose(beta[1:], counts.coef_, atol=1e-6)


def test_a_linear_fit_is_least_squares_with_its_textbook_errors():
    # y = 1, 2, 4 at x = 0, 1, 2: slope 1.5, intercept 5/6, residual variance 1/6 with one degree
    x = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    beta, covariance = fit_alone("linear", x, np.array([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(beta, [5 / 6, 1.5])
    assert covariance[1, 1] == pytest.approx(1 / 12)
    steep, _ = fit_alone("linear", x, 100 * np.array([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(steep, [500 / 6, 150.0])


def test_sums_of_two_groups_add_up_and_survive_the_vector():
    x, y = patients("poisson")
    beta = np.array([0.1, 0.2, 0.3, -0.1])
    first, second = (
        sums_at("poisson", x[:100], y[:100], beta),
        sums_at("poisson", x[100:], y[100:], beta),
    )
    both = GLMSums.from_vector(first.vector() + second.vector(), 4)
    whole = sums_at("poisson", x, y, beta)
    np.testing.assert_allclose(both.hessian, whole.hessian)
    np.testing.assert_allclose(both.gradient, whole.gradient, atol=1e-12)
    assert both.objective == pytest.approx(whole.objective)


@pytest.mark.parametrize("fault", ["separated", "constant", "collinear", "one outcome"])
def test_no_coefficients_where_data_determine_none(fault):
    x, y = patients("logistic")
    if fault == "separated":
        y = (x[:, 1] > 0).astype(float)
    elif fault == "constant":
        x[:, 2] = 5.0
    elif fault == "collinear":
        x[:, 3] = x[:, 1] + x[:, 2]
    else:
        y[:] = 1.0
    with pytest.raises(UndeterminedError):
        fit_alone("logistic", x, y)


def test_redundant_columns_are_those_that_follow_from_columns_before():
    x, y = patients("linear")
    x = np.column_stack([x, x[:, 1] - 2 * x[:, 2], np.full(300, 7.0)])
    assert find_redundant(sums_at("linear", x, y, np.zeros(6)).hessian) == [4, 5]


def test_effective_patients_of_equal_and_of_single_weights():
    assert effective_patients(np.full(8, -0.2)) == pytest.approx(8)
    assert effective_patients(np.array([0.0, 3.0, 0.0])) == pytest.approx(1)
    assert effective_patients(np.zeros(3)) == 0


def test_moments_leave_out_missing_values():
    moments = moments_of(np.array([[1.0, np.nan], [3.0, 5.0]]))
    np.testing.assert_array_equal(moments.known, [2, 1])
    np.testing.assert_allclose(moments.means(), [2, 5])
    np.testing.assert_allclose(moments.deviations(), [1, 0])


def test_effects_over_hospitals_by_hand():
    # Weights 1 and 1: mean 1, Q = 2, tau^2 = (2 - 1) / (2 - 2 / 2) = 1, so both weights become 1/2
    combined = combine_effects([0.0, 2.0], [1.0, 1.0])
    assert (combined.fixed, combined.random, combined.q) == pytest.approx((1.0, 1.0, 2.0))
    assert combined.tau_squared == pytest.approx(1.0)
    assert combined.fixed_error == pytest.approx(0.5**0.5)
    assert combined.random_error == pytest.approx(1.0)
    assert combined.i_squared == pytest.approx(0.5)


def test_equal_effects_have_no_heterogeneity():
    combined = combine_effects([0.5, 0.5, 0.5], [0.1, 0.2, 0.3])
    assert (combined.tau_squared, combined.i_squared) == (0.0, 0.0)
    assert combined.random_error == combined.fixed_error


def test_a_hessian_that_determines_no_step_ends_the_fit():
    sums = GLMSums(-3.0, 20.0, 8.0, np.ones(2), np.ones((2, 2)))
    asked = FitProgress(beta=[0.1, 0.1], before=[0.0, 0.0], objective=-4.0)
    with pytest.raises(FitError, match="singular"):
        next_progress(FittedModel("logistic", ["age"]), asked, sums.vector())


@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-3])
def test_another_machine_s_solver_asks_the_same_question_and_another_step_does_not(apart):
    """``apart`` is how far two columns are from being the same: then solvers differ more."""
    rng = np.random.default_rng(4)
    x = np.column_stack([np.ones(200), rng.normal(size=(200, 3))])
    x[:, 3] = x[:, 2] + apart * x[:, 3]
    y = (rng.random(200) < expit(x[:, 1])) * 1.0
    sums = sums_at("logistic", x, y, np.zeros(4))
    step = np.linalg.solve(sums.hessian, sums.gradient)
    also = np.linalg.inv(sums.hessian) @ sums.gradient
    expected, vector = FitProgress(beta=step.tolist()), sums.vector()
    assert not differs(FitProgress(beta=also.tolist()), expected, vector)
    for place in range(4):
        moved = step + 1e-6 * np.eye(4)[place]
        assert differs(FitProgress(beta=moved.tolist()), expected, vector)
        assert differs(FitProgress(beta=moved.tolist()), expected, None)
