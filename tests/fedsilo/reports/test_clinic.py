"""What sites counted, read again: by hand."""

import pytest

from fedsilo.reports.clinic import COLUMNS, class_outcomes

METRICS = {
    "class.0.right": 8.0,
    "class.0.false": 1.0,
    "class.0.auc": 0.9,
    "class.1.false": 2.0,
    "accuracy": 0.8,
}


def test_sensitivity_and_specificity_are_shares_of_the_class_and_of_the_others() -> None:
    healthy, ill = class_outcomes(METRICS, ["healthy", "ill", "unseen"], [10, 4, None], 14)
    assert (healthy.samples, healthy.others) == (10, 4)
    sensitivity, specificity, area = healthy.sensitivity(), healthy.specificity(), healthy.area()
    assert sensitivity is not None
    assert specificity is not None
    assert area is not None
    assert (sensitivity.value, specificity.value, area.value) == pytest.approx((0.8, 0.75, 0.9))
    assert ill.sensitivity() is None, "the site did not tell it"
    assert ill.specificity() is not None
    assert ill.area() is None


def test_a_rounded_count_is_never_more_than_there_are() -> None:
    (one, _) = class_outcomes({"class.0.right": 1240.0}, ["a", "b"], [1236, 5], 1241)
    assert one.right == 1236


def test_predictive_values_by_hand() -> None:
    """Of 10 healthy 8 are found, of 4 others 1 is taken for healthy: 8 of 9 and 3 of 5."""
    healthy, ill = class_outcomes(METRICS, ["healthy", "ill", "unseen"], [10, 4, None], 14)
    positive, negative = healthy.positive_predictive_value(), healthy.negative_predictive_value()
    assert positive is not None
    assert negative is not None
    assert (positive.value, negative.value) == pytest.approx((8 / 9, 3 / 5))
    assert ill.positive_predictive_value() is None, "its sensitivity is not known"
    assert len(healthy.cells()) == 1 + len(COLUMNS)
    nothing = class_outcomes({"class.0.right": 0.0, "class.0.false": 0.0}, ["a", "b"], [5, 5], 10)
    assert nothing[0].positive_predictive_value() is None
