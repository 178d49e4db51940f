import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.models.measures.survival_curves import published_curve, read_curve
from fedsilo.models.measures.survival_metrics import (
    baseline_hazard,
    brier_score,
    concordance,
    integrated_brier_score,
    kaplan_meier,
)

# Six patients by hand: events at 1, 2, 4; censored at 2, 3, 5
TIMES, EVENTS = np.array([1.0, 2, 2, 3, 4, 5]), np.array([1.0, 1, 0, 0, 1, 0])


def test_a_kaplan_meier_curve_by_hand():
    curve = kaplan_meier(TIMES, EVENTS)
    np.testing.assert_array_equal(curve.times, [1, 2, 4])
    np.testing.assert_array_equal(curve.at_risk, [6, 5, 2])
    np.testing.assert_allclose(curve.survival, [5 / 6, 5 / 6 * 4 / 5, 5 / 6 * 4 / 5 / 2])
    np.testing.assert_allclose(curve.variance, np.cumsum([1 / 30, 1 / 20, 1 / 2]))
    np.testing.assert_allclose(curve.at(np.array([0.5, 1, 3.9])), [1, 5 / 6, 2 / 3])
    np.testing.assert_allclose(curve.before(np.array([1.0, 2])), [1, 5 / 6])


def test_a_band_is_that_of_lifelines():
    # lifelines 0.30.3: KaplanMeierFitter().fit(TIMES, EVENTS).confidence_interval_
    low, high = kaplan_meier(TIMES, EVENTS).band()
    np.testing.assert_allclose(low, [0.27312285, 0.19461664, 0.01368488], atol=1e-8)
    np.testing.assert_allclose(high, [0.97471243, 0.90443416, 0.75484404], atol=1e-8)


def test_where_nobody_or_everybody_survives_the_band_is_a_point():
    low, high = kaplan_meier(np.array([1.0, 2]), np.array([1.0, 1])).band()
    assert (low[1], high[1]) == (0, 0)
    assert len(kaplan_meier(np.array([3.0]), np.array([0.0])).times) == 0


def test_concordance_by_hand():
    # Pairs: 1 before all five; 2 before 2+, 3, 4, 5; 4 before 5: ten
    assert concordance(TIMES, EVENTS, -TIMES) == pytest.approx((10 - 0.5) / 10)
    assert concordance(TIMES, EVENTS, TIMES) == pytest.approx(0.5 / 10)
    assert concordance(TIMES, EVENTS, np.zeros(6)) == 0.5
    assert concordance(TIMES, np.zeros(6), TIMES) is None
    # Two events at one time are no pair
    assert concordance(np.array([1.0, 1]), np.array([1.0, 1]), np.array([0.0, 1])) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_concordance_turns_around_with_the_risks_and_ignores_their_scale(seed):
    rng = np.random.default_rng(seed)
    times, events = rng.integers(0, 9, 25) * 1.0, rng.integers(0, 2, 25) * 1.0
    risks = rng.normal(size=25)
    index = concordance(times, events, risks)
    if index is not None:
        assert concordance(times, events, -risks) == pytest.approx(1 - index)
        assert concordance(times, events, 3 * risks + 7) == index


def test_a_baseline_hazard_without_risks_is_nelson_aalen():
    times, hazard = baseline_hazard(TIMES, EVENTS, np.zeros(6))
    np.testing.assert_array_equal(times, [1, 2, 4])
    np.testing.assert_allclose(hazard, np.cumsum([1 / 6, 1 / 5, 1 / 2]))


def test_brier_scores_by_hand():
    # Nobody is censored before 2, so at 1.5 it is the plain squared error: one dead, five alive
    survival = np.full((6, 1), 0.8)
    score = brier_score(TIMES, EVENTS, survival, np.array([1.5]))
    assert score[0] == pytest.approx((0.8**2 + 5 * 0.2**2) / 6)
    # At 3: of five at risk at 2, one dies first; of four one is censored, so G(2) = 3 / 4, and of
    # three another, so G(3) = 1 / 2. Two are followed beyond 3
    score = brier_score(TIMES, EVENTS, survival, np.array([3.0]))
    assert score[0] == pytest.approx((2 * 0.8**2 + 2 * 2 * 0.2**2) / 6)


def test_an_integrated_brier_score_is_that_of_scikit_survival():
    rng = np.random.default_rng(5)
    risks = rng.normal(size=60)
    death, end = rng.exponential(10 * np.exp(-risks)), rng.exponential(12, 60)
    times, events = np.minimum(death, end), (death <= end) * 1.0
    # scikit-survival: integrated_brier_score of exp(-H exp(risk)), H by Breslow
    assert integrated_brier_score(times, events, risks) == pytest.approx(0.1536706006, abs=1e-8)
    # Risks the wrong way around are worse than none
    assert integrated_brier_score(times, events, -risks) > integrated_brier_score(
        times, events, np.zeros(60)
    )
    assert integrated_brier_score(times, np.zeros(60), risks) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_no_published_step_shows_fewer_events_than_the_floor(seed, floor):
    rng = np.random.default_rng(seed)
    times, events = rng.exponential(rng.uniform(0.1, 900), 80), rng.integers(0, 2, 80) * 1.0
    before = 0
    points = read_curve(published_curve(times, events, floor))
    for point in points:
        happened = int(events[times <= point.time].sum())
        assert happened - before >= floor
        assert point.followed == (times > point.time).sum() >= floor
        assert 0 <= point.low <= point.share <= point.high <= 1
        before = happened
    assert len(points) <= 80 // floor


def test_a_curve_of_few_events_is_not_published():
    assert published_curve(TIMES, EVENTS, 5) == {}
    assert published_curve(TIMES, np.zeros(6), 1) == {}
    assert published_curve(np.zeros(6), np.ones(6), 1) == {}
