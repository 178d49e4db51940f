"""The table of tasks: what a network learns, from a class of an image to a number of a patient.

Each entry names a class of ``models/tasks``, which has everything that differs between tasks: the
loss, the form of a label, the metrics and what a report shows. A class is imported when it is first
used, so a list of tasks needs no PyTorch.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple


class TaskEntry(NamedTuple):
    """One line of the table of tasks."""

    place: str  # ``module:Class``, a subclass of ``fedsilo.models.tasks.task.Task``
    description: str  # one sentence for lists of tasks
    # The number of groups whose samples a site counts, and that are spread evenly over splits. 0
    # means one group per output of the network, such as a class
    strata: int
    # Whether a label is a number, which sites standardise together with the features of a table
    numeric: bool = False


CLASSIFICATION: Final = "classification"
REGRESSION: Final = "regression"
MULTI_LABEL: Final = "multi-label"
SEGMENTATION: Final = "segmentation"
SURVIVAL: Final = "survival"
TASKS = {
    CLASSIFICATION: TaskEntry(
        "fedsilo.models.tasks.classification:Classification",
        "One of several classes for each patient or image.",
        strata=0,
    ),
    REGRESSION: TaskEntry(
        "fedsilo.models.tasks.regression:Regression",
        "A number for each patient or image.",
        strata=1,
        numeric=True,
    ),
    SEGMENTATION: TaskEntry(
        "fedsilo.models.tasks.segmentation:Segmentation",
        "The class of each pixel of an image, from masks.",
        strata=0,
    ),
    MULTI_LABEL: TaskEntry(
        "fedsilo.models.tasks.multilabel:MultiLabel",
        "Several findings for each patient or image, each present or absent.",
        strata=1,
    ),
    SURVIVAL: TaskEntry(
        "fedsilo.models.tasks.survival:Survival",
        "The time to an event, of patients of whom some are censored (Cox).",
        strata=2,
    ),
}


def tasks_except(name: str) -> tuple[str, ...]:
    """Return the names of all tasks but one, for methods that suit every other task."""
    return tuple(task for task in TASKS if task != name)


def numeric_columns(task: str, features: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns that all sites standardise together.

    These are a table's features and, if the labels of the task are numbers, the outcome. Sites send
    sums over these columns, in this order.

    Args:
        task: a name in ``TASKS``.
        features: the names of the features; empty for images.
        names: the outcome's name as the only item, if the labels are numbers. For any other task,
            ``names`` is ignored.

    Raises:
        KeyError: ``TASKS`` does not have the task.
    """
    if TASKS[task].numeric:
        return (*features, *names)
    return tuple(features)


def count_strata(task: str, outputs: int) -> int:
    """Return the number of groups, called strata, in which a site counts its samples.

    Some tasks have a fixed number: 1 for regression and multi-label, 2 for survival. In any other
    task each class is a group, and the number is ``outputs``.

    Args:
        task: a name in ``TASKS``.
        outputs: the number of outputs of the network.

    Raises:
        KeyError: ``TASKS`` does not have the task.
    """
    return TASKS[task].strata or outputs
