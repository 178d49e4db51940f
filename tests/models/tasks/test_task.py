"""Defaults of a task that defines only what it must, as another author's task would."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.tasks import MULTI_LABEL, REGRESSION, SEGMENTATION, SURVIVAL
from fedsilo.models.tasks.task import Task, curve_label, describe_range, task_class, task_of
from tests.support.errors import refuses


class Angle(Task):
    """A number of a circle: only what is abstract."""

    name = REGRESSION
    headline = "loss"

    def criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda outputs, labels: (outputs - labels).abs().mean()

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs

    def metrics(self, predictions: Tensor, labels: Tensor) -> dict[str, float]:
        return {"loss": 0.0}

    def stand_in_labels(self, counts: Sequence[int], outputs: int) -> Tensor:
        return torch.zeros(sum(counts))


@pytest.fixture
def angle() -> Angle:
    return Angle(CommonSettings())


def test_samples_are_one_group_of_which_nothing_is_unusual(angle: Angle) -> None:
    assert angle.strata(torch.zeros(3)).tolist() == [0, 0, 0]
    assert angle.stratum_count(5) == 1
    assert angle.stratum_names(["degrees"]) == ["samples"]
    assert angle.odd_counts([0]) == ""


def test_only_metrics_of_the_task_can_stop_a_run(angle: Angle) -> None:
    assert angle.may_report("loss", [0], 1)
    assert not angle.may_report("accuracy", [9], 1)


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        (np.zeros(3), False),
        (np.zeros(3, np.int64), False),
        (np.zeros(4), True),
        (np.zeros((3, 1)), True),
        (np.array(["a", "b", "c"]), True),
        (np.array([0.0, np.nan, 1.0]), True),
        (np.array([0.0, np.inf, 1.0]), True),
    ],
)
def test_labels_are_a_finite_number_for_each_sample(labels: Any, fault: bool, angle: Angle) -> None:
    assert bool(angle.label_fault(labels, 3, ["degrees"])) is fault


def test_a_task_tells_names_and_has_no_table_unless_it_says_so(angle: Angle) -> None:
    predictions = torch.zeros(2, 1, dtype=torch.float64)
    assert angle.describe(["degrees"]) == angle.summarise(predictions, ["degrees"]) == "degrees"
    assert angle.truth_columns(torch.zeros(2), ["degrees"]) == {}
    with refuses(SettingError, f"'{REGRESSION}'"):
        angle.answer_columns(predictions, ["degrees"])


def test_a_private_run_measures_nothing_and_a_site_sends_no_counts(angle: Angle) -> None:
    assert angle.parts(torch.zeros(2, 1), torch.zeros(2)) == {}
    assert angle.part_ranges(1) == {}
    assert angle.counts(torch.zeros(2, 1), torch.zeros(2), 1) == {}
    low, high = angle.limits(1)["loss"]
    assert low == -high < 0


def test_a_task_that_compares_patients_cannot_be_private() -> None:
    private = CommonSettings(task=SURVIVAL, sample_clip_norm=1.0, noise_multiplier=1.0)
    with refuses(SettingError, "'privacy.sample-clip-norm'", f"'{SURVIVAL}'"):
        task_of(private).check(is_table=True)


def test_a_task_of_no_name_is_refused_with_those_that_exist() -> None:
    with refuses(SettingError, SEGMENTATION, MULTI_LABEL):
        task_class("segmentations")


def test_an_axis_has_the_label_of_the_first_task_with_that_curve() -> None:
    label = task_class(REGRESSION).curves["mae"]
    assert curve_label("mae") == label
    assert curve_label("nothing") == "nothing"


def test_numbers_are_told_by_their_range_and_lower_median() -> None:
    numbers = torch.tensor([18.84, 56.42, 30.0, 31.0])
    assert describe_range(numbers) == "from 18.8 to 56.4, median 30"
