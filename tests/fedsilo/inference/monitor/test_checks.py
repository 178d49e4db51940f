"""The checks of new cases, by hand."""

import numpy as np
import torch

from fedsilo.inference.monitor.checks import (
    accuracy_check,
    certainty_check,
    coverage_check,
    drift_checks,
    error_check,
)

RNG = np.random.default_rng(0)


def _rows(*columns: list[float]) -> torch.Tensor:
    return torch.tensor(columns, dtype=torch.float32).T


def test_coverage_check_counts_sets_with_the_true_class() -> None:
    sets = torch.tensor([[True, False]] * 18 + [[False, True]] * 2)
    check = coverage_check(sets, torch.zeros(20, dtype=torch.int64), 0.9)
    assert check.value.startswith("18 of 20, 0.900")
    assert not check.alarm
    few = coverage_check(sets, torch.tensor([0] * 10 + [1] * 10), 0.9)
    assert few.value.startswith("12 of 20, 0.600")
    assert few.alarm, "Wilson's interval ends at 0.781"


def test_certainty_check_compares_mean_confidence_with_right_answers() -> None:
    probabilities = torch.tensor([[0.9, 0.1]] * 20)
    right = certainty_check(probabilities, torch.tensor([0] * 18 + [1] * 2))
    assert right.value.startswith("0.900 and 0.900")
    assert not right.alarm
    assert certainty_check(probabilities, torch.tensor([0] * 10 + [1] * 10)).alarm


def test_accuracy_check_is_an_alarm_only_certainly_below_the_run() -> None:
    predicted, labels = torch.zeros(20, dtype=torch.int64), torch.tensor([0] * 14 + [1] * 6)
    assert accuracy_check(predicted, labels, 0.95).alarm, "0.7 (0.481 to 0.855)"
    assert not accuracy_check(predicted, labels, 0.85).alarm


def test_drift_check_of_a_shifted_feature_is_an_alarm_and_of_the_same_is_none() -> None:
    old = _rows([*map(float, range(200))])
    same, shifted = _rows([*map(float, range(0, 200, 2))]), old + 150
    (none,) = drift_checks(["age"], old, same, 10)
    (alarm,) = drift_checks(["age"], old, shifted, 10)
    assert not none.alarm
    assert alarm.alarm
    assert "over 5 cells" in none.value, "100 new samples of 2 x 10 each"


def test_drift_check_takes_levels_of_a_column_together_and_keeps_the_schemas_order() -> None:
    # cp has the levels 1 (60), 2 (40) and 3 (20); new ones are all of level 1
    old = _rows([0.0] * 60 + [1.0] * 60, [-1.0] * 60 + [2.0] * 40 + [-1.0] * 20,
                [-1.0] * 100 + [2.0] * 20)  # fmt: skip
    new = _rows([0.0] * 40 + [1.0] * 40, [-1.0] * 80, [-1.0] * 80)
    sex, pain = drift_checks(["sex", "cp=2", "cp=3"], old, new, 10)
    assert (sex.name, pain.name) == ("distribution of sex", "distribution of cp")
    assert sex.value == "PSI 0.000 over 2 cells"
    assert "over 3 cells" in pain.value
    assert pain.alarm


def test_drift_check_has_no_cell_of_few_training_samples() -> None:
    old = _rows([0.0] * 95 + [1.0] * 5)
    assert list(drift_checks(["rare"], old, old, 10)) == []


def test_drift_check_counts_missing_values_as_a_cell_of_their_own() -> None:
    nan = float("nan")
    # Two of three new cases lack it: as level 1, which a mean imputes, they would give 0.167
    old, new = _rows([0.0] * 160 + [1.0] * 40), _rows([nan] * 80 + [0.0] * 32 + [1.0] * 8)
    (check,) = drift_checks(["kind=2"], old, new, 10)
    assert check.value == "PSI 1.279 over 2 cells", "with level 2: 0.53 ln 3.67 + 0.53 ln 3"
    assert check.alarm
    (same,) = drift_checks(["kind=2"], torch.cat([old, new]), torch.cat([old, new]), 10)
    assert same.value == "PSI 0.000 over 3 cells"
    assert list(drift_checks(["kind=2"], _rows([nan] * 50), new, 10)) == []


def test_errors_are_an_alarm_once_their_whole_interval_is_above_those_of_the_run() -> None:
    errors = torch.tensor([1.0, 2.0, 3.0])  # their mean is 2, and its interval 2 - 1.13 to 2 + 1.13
    check = error_check(errors, 0.9)
    assert (check.value, check.alarm) == ("2.00 (0.868 to 3.13)", False)
    assert error_check(errors, 0.8).alarm
