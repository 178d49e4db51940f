"""What sites counted, read again: by hand."""

import pytest

from fedsilo.reports.clinic import class_outcomes

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
