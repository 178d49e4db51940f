import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.tables.parsing import parse_table
from fedsilo.datasets.tables.schema import TableSchema
from fedsilo.models.maths.cox import FollowUp, cox_sums
from fedsilo.models.tasks.survival import partial_likelihood_loss
from fedsilo.models.tasks.task import task_named, task_of
from fedsilo.server_app.config.settings import resolve

SURVIVAL = task_named("survival")
LABEL = {
    "column": "died",
    "task": "survival",
    "time": "months",
    "classes": {"alive": ["0"], "dead": ["1"]},
}


def batch(seed: int = 0, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    labels = np.column_stack([rng.integers(1, 6, size), rng.integers(0, 2, size)])
    return torch.tensor(rng.normal(size=(size, 1))), torch.tensor(labels, dtype=torch.float64)


def test_the_loss_is_the_partial_likelihood_per_event():
    outputs, labels = batch()
    times, events = labels.numpy().T
    sums = cox_sums(outputs.numpy(), FollowUp(times, events, "breslow"), np.ones(1))
    loss = partial_likelihood_loss(outputs, labels)
    assert loss.item() == pytest.approx(-sums.objective / events.sum())


def test_the_loss_of_three_patients_by_hand():
    # Hazards 1, 2, 4; events at 1 and 2: -log(1 / 7) - log(2 / 6), over two events
    outputs = torch.tensor([[0.0], [np.log(2)], [np.log(4)]])
    labels = torch.tensor([[1.0, 1], [2, 1], [3, 0]])
    assert partial_likelihood_loss(outputs, labels).item() == pytest.approx(
        (np.log(7) + np.log(3)) / 2
    )


def test_outputs_in_half_precision_are_added_up_in_float32():
    """400 equal patients with an event each: the loss is log(400!) / 400."""
    outputs = torch.zeros(400, 1, dtype=torch.bfloat16)
    labels = torch.stack([torch.arange(400.0), torch.ones(400)], dim=1)
    loss = partial_likelihood_loss(outputs, labels)
    assert loss.item() == pytest.approx(math.lgamma(401) / 400, rel=1e-5)


def test_a_batch_without_events_changes_nothing():
    outputs, labels = batch()
    outputs.requires_grad_()
    partial_likelihood_loss(outputs, labels * torch.tensor([1.0, 0.0])).backward()
    assert (outputs.grad == 0).all()


def test_metrics_that_a_split_does_not_define_are_absent():
    outputs, labels = batch()
    assert set(SURVIVAL.metrics(outputs, labels)) == {"loss", "c-index", "brier"}
    alone = SURVIVAL.metrics(outputs[:1], labels[:1])
    assert set(alone) == {"loss"}


def test_strata_are_censored_patients_and_events():
    labels = SURVIVAL.stand_in_labels([2, 3], 1)
    assert labels.shape == (5, 2)
    assert SURVIVAL.strata(labels).tolist() == [0, 0, 1, 1, 1]


def test_a_survival_run_is_not_private():
    private = CommonSettings(task="survival", sample_clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(SettingError):
        task_of(private).check(is_table=True)


def schema(**changes: object) -> TableSchema:
    columns = [{"name": "age"}]
    return TableSchema.model_validate(
        {"columns": columns, "label": {**LABEL, **changes}, "sites": {"a": "a.csv", "b": "b.csv"}}
    )


def lines(*rows: str) -> list[tuple[int, list[str]]]:
    return list(enumerate([row.split(",") for row in ("age,months,died", *rows)], start=1))


def test_a_table_of_times_and_events_leaves_out_and_counts_rows_without_them():
    table = parse_table(lines("50,3.5,1", "60,?,0", "70,12,?", "80,0,0"), schema(), "a")
    np.testing.assert_array_equal(table.labels, np.array([[3.5, 1], [0, 0]], np.float32))
    assert table.left_out.count == 2


@pytest.mark.parametrize("row", ["50,-1,1", "50,soon,1", "50,3,2"])
def test_a_negative_time_or_an_unknown_event_is_refused_by_line(row):
    with pytest.raises(DataError, match="line 3"):
        parse_table(lines("40,1,0", row), schema(), "a")


@pytest.mark.parametrize(
    "changes",
    [
        {"time": ""},
        {"task": "classification"},
        {"classes": {"alive": ["0"]}},
        {"classes": {"a": ["0"], "b": ["1"], "c": ["2"]}},
    ],
)
def test_a_label_that_contradicts_itself_is_refused(changes):
    with pytest.raises(ValidationError):
        schema(**changes)


def test_a_site_s_events_keep_their_share_in_each_split(tmp_path: Path):
    common = resolve(
        {"dataset": "survival-synthetic", "task": "survival", "method": "fedavg"}
    ).common
    silo = load_silo("lake", common)
    assert (silo.shape.outputs, silo.task) == (1, "survival")
    shares = [counts[1] / sum(counts) for counts in silo.label_counts().values() if sum(counts)]
    assert max(shares) - min(shares) < 0.02


def test_predictions_are_risks_beside_times_and_events():
    outputs, labels = batch(size=3)
    columns = SURVIVAL.answer_columns(outputs, ["dead"]) | SURVIVAL.truth_columns(labels, ["dead"])
    assert list(columns) == ["risk", "time", "event"]
    assert columns["risk"] == outputs[:, 0].tolist()
    assert "no risk" in SURVIVAL.summarise(outputs[:0], ["dead"])
