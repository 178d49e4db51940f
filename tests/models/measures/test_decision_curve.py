"""Net benefit, by hand."""

import pytest

from fedsilo.models.measures.decision_curve import net_benefit


def test_net_benefit_weighs_false_alarms_by_the_odds_of_the_threshold() -> None:
    assert net_benefit(40, 20, 100, 0.2) == pytest.approx(0.4 - 0.2 * 0.25)
    assert net_benefit(40, 20, 100, 0.5) == pytest.approx(0.2)


def test_net_benefit_of_treating_all_is_zero_at_the_prevalence() -> None:
    assert net_benefit(30, 70, 100, 0.3) == pytest.approx(0)


def test_net_benefit_of_treating_nobody_is_zero() -> None:
    assert net_benefit(0, 0, 100, 0.4) == 0
