"""Balanced accuracy over all sites' samples, by hand."""

import pytest

from fedsilo.comparison.pooled import TwoClassMetrics, pooled_balanced_accuracy

# 3 of 4 healthy and 3 of 6 ill; all 5 are ill and 4 right; 2 of 2 healthy and 1 of 3 ill
BOTH = TwoClassMetrics((4, 6), 0.6, (3 / 4 + 3 / 6) / 2)
ILL = TwoClassMetrics((0, 5), 0.8, None)
OTHER = TwoClassMetrics((2, 3), 0.6, (1 + 1 / 3) / 2)


def test_right_answers_of_each_class_follow_from_the_two_accuracies() -> None:
    assert [site.count_correct() for site in (BOTH, ILL, OTHER)] == [(3, 3), (0, 4), (2, 1)]
    assert TwoClassMetrics((5, 0), 0.8, None).count_correct() == (4, 0)


def test_pooled_each_sample_counts_once_of_its_class() -> None:
    found = pooled_balanced_accuracy([BOTH, ILL, OTHER])
    assert found == pytest.approx((5 / 6 + 8 / 14) / 2)
    right = pooled_balanced_accuracy([BOTH, TwoClassMetrics((0, 5), 1.0, None), OTHER])
    assert right == pytest.approx((5 / 6 + 9 / 14) / 2), "a site of one class counts, a little"


def test_equal_classes_at_a_site_or_one_class_at_all_have_no_pooled_figure() -> None:
    assert TwoClassMetrics((5, 5), 0.7, 0.7).count_correct() is None
    assert pooled_balanced_accuracy([BOTH, TwoClassMetrics((5, 5), 0.7, 0.7)]) is None
    assert pooled_balanced_accuracy([ILL]) is None
    assert pooled_balanced_accuracy([]) is None
