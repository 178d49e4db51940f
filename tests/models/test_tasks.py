"""Tasks: their metrics by hand and beside scikit-learn, and what every task promises."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from fedsilo.core.errors import SettingError
from fedsilo.core.metric_names import METRICS, is_metric_key
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.core.tasks import MULTI_LABEL, REGRESSION, TASKS
from fedsilo.models.measures.regression_metrics import pool_outcome_bins
from fedsilo.models.tasks.task import Task, task_class, task_named, task_of

NUMBERS = st.lists(st.floats(-100, 100), min_size=2, max_size=30)


def regression(mean: float = 0.0, std: float = 1.0, **changes: str) -> Task:
    task = task_of(CommonSettings(task=REGRESSION, **changes))  # type: ignore[arg-type]
    return task.scaled_by(FeatureStatistics(np.array([mean]), np.array([std])))


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_metrics_are_in_the_table_of_metrics(name: str) -> None:
    task = task_class(name)
    for metric in (task.headline, *task.shown, *task.always):
        assert metric in METRICS
    assert METRICS[task.headline].better != 0


@pytest.mark.parametrize("name", TASKS)
def test_stand_in_labels_have_the_declared_strata(name: str) -> None:
    task = task_named(name)
    counts = list(range(2, 2 + task.stratum_count(3)))
    labels = task.stand_in_labels(counts, 3)
    assert torch.bincount(task.strata(labels), minlength=len(counts)).tolist() == counts
    assert str(labels.dtype) == f"torch.{task.label_type}"


def test_regressions_errors_are_in_the_outcomes_unit() -> None:
    task = regression(mean=10.0, std=2.0)
    predictions = task.predict(torch.tensor([[0.0], [1.0], [-1.0], [2.0]]))
    assert predictions[:, 0].tolist() == [10.0, 12.0, 8.0, 14.0]
    found = task.metrics(predictions, torch.tensor([11.0, 12.0, 10.0, 13.0]))
    # Errors -1, 0, -2, 1; the outcomes' mean is 11.5, and their squared deviations sum to 5
    assert found["mae"] == pytest.approx(1.0)
    assert found["rmse"] == pytest.approx(math.sqrt(6 / 4))
    assert found["r2"] == pytest.approx(1 - 6 / 5)
    assert found["loss"] == pytest.approx(6 / 4 / 2.0**2)


@settings(max_examples=10, deadline=None)
@given(NUMBERS, st.data())
def test_regressions_metrics_are_scikit_learns(observed: list[float], data: st.DataObject) -> None:
    size = len(observed)
    predicted = data.draw(st.lists(st.floats(-100, 100), min_size=size, max_size=size))
    labels = torch.tensor(observed, dtype=torch.float64)
    found = regression().metrics(torch.tensor(predicted, dtype=torch.float64)[:, None], labels)
    assert found["mae"] == pytest.approx(sklearn.mean_absolute_error(observed, predicted))
    squared = sklearn.mean_squared_error(observed, predicted)
    assert found["rmse"] == pytest.approx(math.sqrt(squared))
    if "r2" in found and np.var(observed) > 1e-6:
        assert found["r2"] == pytest.approx(sklearn.r2_score(observed, predicted), rel=1e-6)


def test_a_constant_outcome_has_no_r2() -> None:
    found = regression().metrics(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 3.0]))
    assert sorted(found) == ["loss", "mae", "rmse"]


def test_the_loss_does_not_depend_on_the_unit() -> None:
    outputs, labels = torch.tensor([[0.5], [-1.0]]), torch.tensor([3.0, 9.0])
    days = regression(mean=5.0, std=2.0).criterion()(outputs, labels)
    hours = regression(mean=120.0, std=48.0).criterion()(outputs, 24 * labels)
    assert days.item() == pytest.approx(hours.item())
    # Standardised outcomes -1 and 2: errors 1.5 and -3, of which Huber's loss takes |e| - 1/2
    assert days.item() == pytest.approx((1.5**2 + 3**2) / 2)
    huber = regression(mean=5.0, std=2.0, loss="huber").criterion()(outputs, labels)
    assert huber.item() == pytest.approx((1.0 + 2.5) / 2)


@settings(max_examples=10, deadline=None)
@given(NUMBERS)
def test_outcome_bins_add_up_over_sites(numbers: list[float]) -> None:
    task, half = regression(std=30.0), len(numbers) // 2
    values = torch.tensor(numbers, dtype=torch.float64)
    parts = [
        task.counts(part[:, None], part, 1) for part in (values[:half], values[half:]) if len(part)
    ]
    assert all(is_metric_key(f"incoming.test.{name}") for part in parts for name in part)
    pooled = pool_outcome_bins(parts)
    assert sum(one.count for one in pooled) == len(numbers)
    assert all(one.predicted == pytest.approx(one.observed) for one in pooled)


def test_small_bins_do_not_leave() -> None:
    values = torch.tensor([[0.01], [0.02], [0.03], [5.0]], dtype=torch.float64)
    found = regression().counts(values, values[:, 0], 3)
    assert sorted(found) == ["outcome.5.count", "outcome.5.observed", "outcome.5.predicted"]


@pytest.mark.parametrize("name", [REGRESSION, MULTI_LABEL])
def test_a_samples_part_is_bounded_and_finite(name: str) -> None:
    predictions = torch.tensor([[math.nan], [1e30], [-1e30], [0.5]], dtype=torch.float64)
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0])
    if name == MULTI_LABEL:
        labels = labels[:, None]
    parts = task_named(name).parts(predictions, labels)
    assert sorted(parts) == sorted(task_named(name).part_ranges(1))
    for values in parts.values():
        assert ((values >= 0) & (values <= 1)).all()


def test_findings_have_the_mean_of_scikit_learns_auc() -> None:
    rng = np.random.default_rng(1)
    labels = (rng.random((40, 3)) < 0.4).astype(np.float32)
    labels[:, 2] = 0  # nobody has the third finding, so it counts in no mean
    scores = rng.random((40, 3))
    task = task_named(MULTI_LABEL)
    found = task.metrics(torch.from_numpy(scores), torch.from_numpy(labels))
    first = [sklearn.roc_auc_score(labels[:, k], scores[:, k]) for k in (0, 1)]
    assert found["auc"] == pytest.approx(np.mean(first), rel=1e-6)
    first = [sklearn.average_precision_score(labels[:, k], scores[:, k]) for k in (0, 1)]
    assert found["average-precision"] == pytest.approx(np.mean(first), rel=1e-6)
    logs = sklearn.log_loss(labels.ravel(), np.stack([1 - scores.ravel(), scores.ravel()], 1))
    assert found["loss"] == pytest.approx(logs)
    counts = task.counts(torch.from_numpy(scores), torch.from_numpy(labels), 5)
    assert counts["finding.0.count"] == labels[:, 0].sum()
    assert not any(name.startswith("finding.2.") for name in counts)


@pytest.mark.parametrize(
    "changes",
    [
        {"task": REGRESSION, "loss": "evidential"},
        {"task": REGRESSION, "class_weights": "balanced"},
        {"task": MULTI_LABEL, "loss": "huber"},
        {"task": MULTI_LABEL, "vectorised": 3},
        {"loss": "squared"},
    ],
)
def test_settings_of_another_task_are_refused(changes: dict[str, str]) -> None:
    common = CommonSettings(**changes)  # type: ignore[arg-type]
    with pytest.raises(SettingError):
        task_of(common).check(is_table=True)
