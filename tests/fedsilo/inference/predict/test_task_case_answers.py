"""Answers of pages of cases from predictions and metrics made by hand, without a run."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.core.errors import DataError
from fedsilo.core.tasks import MULTI_LABEL, REGRESSION, SURVIVAL
from fedsilo.inference.predict import task_case_answers
from fedsilo.inference.predict.case_answers import CaseAnswers
from fedsilo.inference.predict.task_case_answers import case_answers
from fedsilo.models.tasks.task import task_named
from tests.support.run_files import summary


def _answers(
    task: str,
    numbers: list[list[float]],
    classes: tuple[str, ...],
    metrics: dict[str, float] | None = None,
    **values: float,
) -> Any:
    """Return the answers for some predictions; ``values`` are the site's final metrics."""
    run: Any = SimpleNamespace(
        floor=10,
        silos={"north": {}},
        summary=summary(sites={"north": values}, mean={"c-index": 0.6}),
        last_metrics=lambda split: {"north": metrics or {}},
    )
    table = torch.tensor(numbers, dtype=torch.float64)
    own = task_named(task)
    predictions: Any = SimpleNamespace(
        task=own,
        probabilities=table,
        own=table,
        classes=classes,
        predicted=lambda: next(iter(own.answer_columns(table, classes).values())),
    )
    model: Any = SimpleNamespace(site="north")
    answers: CaseAnswers = case_answers(run, model, predictions)
    return answers


BIN = {"outcome.6.count": 12.0, "outcome.6.predicted": 21.0, "outcome.6.observed": 23.0}


def test_a_number_has_its_range_and_the_samples_like_it() -> None:
    answers = _answers(REGRESSION, [[20.0], [40.0]], ("days",), BIN, rmse=2.0, mae=1.5)
    assert "days" in answers.question()
    assert answers.cells(0) == ["20.0", "16.0 to 24.0"]
    # The scale goes from 20 - 4 to 40 + 4
    (bar,) = answers.bars(0)
    assert (bar.share, bar.low, bar.high) == pytest.approx((4 / 28, 0.0, 8 / 28))
    assert bar.is_point
    assert "12 test samples" in answers.notes(0)[0]
    assert answers.notes(1) == [], "no bin is within the root mean square error"
    assert "1.50" in answers.limits()[0]
    assert "days" in answers.explained_number(0)


def test_a_number_of_a_run_without_errors_has_no_range() -> None:
    answers = _answers(REGRESSION, [[20.0]], ("days",))
    assert answers.cells(0) == ["20.0", "-"]
    (bar,) = answers.bars(0)
    assert (bar.share, bar.low, bar.high) == (0.5, None, None), "one number is in the middle"
    assert len(answers.limits()) == 2


def test_findings_are_named_from_one_half_and_the_least_sure_is_told() -> None:
    numbers = [[0.9, 0.6], [0.1, 0.05]]
    metrics = {"finding.0.count": 12.0, "finding.0.auc": 0.875}
    answers = _answers(MULTI_LABEL, numbers, ("nodule", "mass"), metrics)
    assert "nodule, mass" in answers.question()
    assert answers.cells(0) == ["nodule, mass", "mass 0.60"]
    assert answers.cells(1) == ["no finding", "nodule 0.10"]
    assert [bar.name for bar in answers.bars(1)] == ["nodule", "mass"]
    assert (answers.is_unsure(0), answers.is_unsure(1)) == (True, False)
    assert answers.explained_number(0) == "the probability of nodule"
    assert "nodule 0.88" in answers.limits()[1]
    assert len(_answers(MULTI_LABEL, numbers, ("nodule", "mass")).limits()) == 1


def _risks(monkeypatch: pytest.MonkeyPatch, times: list[float], hazard: list[float]) -> Any:
    """Return the answers for risks -1, 0 and 2, where the median training patient has 0."""
    baseline = task_case_answers._Baseline(30, 0.0, np.array(times), np.array(hazard))
    monkeypatch.setattr(task_case_answers, "_estimate_baseline", lambda *_: baseline)
    return _answers(SURVIVAL, [[-1.0], [0.0], [2.0]], ("relapse",))


def test_a_risk_is_a_hazard_ratio_and_a_survival_over_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = _risks(monkeypatch, [2.0, 4.0], [0.2, 0.8])
    assert "relapse" in answers.question()
    # exp(-0.8) is below one half, exp(-0.8 / e) is not, and exp(-0.2 e^2) is below already
    assert [answers.cells(index)[1] for index in range(3)] == ["later than 4", "4", "2"]
    assert answers.cells(1)[0] == "1.00"
    assert sorted(range(3), key=answers.rank) == [2, 1, 0], "the highest risk comes first"
    shares = {bar.name: bar.share for bar in answers.bars(1)}
    assert list(shares.values()) == pytest.approx([1.0, np.exp(-0.2), np.exp(-0.2), np.exp(-0.8)])
    assert ["half" in answers.notes(index)[1].lower() for index in range(3)] == [True] * 3
    assert "4." in answers.notes(1)[1]
    assert "30 training patients" in answers.limits()[0]
    assert "0.60" in answers.limits()[1]
    assert answers.explained_number(0)


def test_too_few_events_leave_the_ratio_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = _risks(monkeypatch, [], [])
    assert answers.cells(1) == ["1.00", "-"]
    assert answers.bars(1) == []
    assert len(answers.notes(1)) == 1
    assert "fewer than 10 of 30" in answers.limits()[0]


def test_training_patients_that_have_changed_give_neither_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise DataError("the rows have changed")

    monkeypatch.setattr(task_case_answers, "_estimate_baseline", refuse)
    answers = _answers(SURVIVAL, [[0.0]], ("relapse",))
    assert (answers.cells(0), answers.bars(0), answers.notes(0)) == (["-", "-"], [], [])
    assert "the rows have changed" in answers.limits()[0]


@pytest.mark.parametrize(("events", "times"), [(12, [1.0, 2.0]), (2, [])])
def test_the_baseline_ends_where_few_patients_are_followed(
    events: int, times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the events happen at 1 and half at 2; ten patients are followed until 3
    happened = [1.0] * (events // 2) + [2.0] * (events - events // 2)
    labels = torch.tensor([[time, 1.0] for time in happened] + [[3.0, 0.0]] * 9 + [[3.0, 1.0]])
    model: Any = SimpleNamespace(
        samples=lambda split: SimpleNamespace(labels=labels, inputs=torch.zeros(len(labels), 2)),
        probabilities=lambda batches, split: torch.zeros(len(labels), 1),
    )
    monkeypatch.setattr(task_case_answers, "refuse_other_rows", lambda *_: None)
    baseline = task_case_answers._estimate_baseline(model, 10)
    assert (baseline.times.tolist(), baseline.patients) == (times, events + 10)
    if times:
        # Breslow: 6 of 22 patients, then 6 of the 16 that are left
        assert baseline.hazard.tolist() == pytest.approx([6 / 22, 6 / 22 + 6 / 16])
        assert baseline.survival(100.0)[-1] == pytest.approx(0.0)
